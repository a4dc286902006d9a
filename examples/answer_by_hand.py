"""An OpenAI-compatible endpoint whose model is a person with an editor.

    python examples/answer_by_hand.py answers --port 8765
    cuda-l2 optimize 64x4096x4096:tn --target cpu --policy openai:by-hand@http://127.0.0.1:8765/v1 \\
        --budget 2h --concurrency 1

Each request's messages are written to a file in the folder, 001.ask.md, 002.ask.md and so on. The request is answered
with the text of 001.answer.md as soon as a file of that name is there: write it elsewhere and move it in, as the first
text found is sent. So you see what a model sees, and a strong model that is reached in no other way can be tried.
It listens on the loopback address alone.
"""

import argparse
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

POLL_S = 0.2
LARGEST_REQUEST = 4 << 20  # bytes


class Endpoint(ThreadingHTTPServer):
    """Listens on 127.0.0.1; a port of 0 takes a free one. Numbers go on from the files that the folder holds."""

    def __init__(self, folder: Path, port: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._lock = folder, threading.Lock()
        super().__init__(("127.0.0.1", port), Request)

    def asked(self, messages: list[dict[str, str]]) -> Path:
        """Writes a question; returns the path where its answer is expected."""
        text = "\n\n".join(f"=== {message['role']}\n\n{message['content']}" for message in messages)
        with self._lock:
            number = 1 + max((int(path.name.split(".")[0]) for path in self.folder.glob("*.ask.md")), default=0)
            (self.folder / f"{number:03}.ask.md").write_text(text + "\n", encoding="utf-8")
        return self.folder / f"{number:03}.answer.md"


class Request(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if not self.path.endswith("/chat/completions") or not 0 < length <= LARGEST_REQUEST:
            return self.send_error(404)
        path = self.server.asked(json.loads(self.rfile.read(length))["messages"])
        print(f"a question waits for {path}", flush=True)
        while not path.exists():
            time.sleep(POLL_S)
        message = {"role": "assistant", "content": path.read_text(encoding="utf-8")}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = json.dumps({"object": "chat.completion", "model": "by-hand", "choices": [choice]}).encode()
        try:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:
            print(f"nobody waited for {path} any more", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An endpoint whose answers a person writes into files.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8765)
    given = parser.parse_args()
    with Endpoint(given.folder, given.port) as endpoint:
        print(f"http://127.0.0.1:{endpoint.server_port}/v1", flush=True)
        endpoint.serve_forever()
