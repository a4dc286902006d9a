"""An OpenAI-compatible endpoint that answers from a script, over real HTTP, and remembers what it was asked."""

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Say:
    """One response of the script."""

    text: str | None = ""
    status: int = 200
    finish: str = "stop"
    body: bytes | None = None  # instead of a chat completion
    headers: dict[str, str] = field(default_factory=dict)
    usage: dict[str, int] | None = field(default_factory=lambda: {"prompt_tokens": 1000, "completion_tokens": 100})
    missing: int = 0  # bytes that the response promises and does not send
    wait: Callable[[], Any] = lambda: None


@dataclass
class Server:
    """The address to ask at, the script still to play, and every request so far."""

    address: str
    script: Callable[[dict[str, Any], int], Say]
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def prompts(self) -> list[str]:
        """The last message of each request."""
        return [request["messages"][-1]["content"] for request in self.requests]


@contextmanager
def serving(
    script: "list[Say] | Callable[[dict[str, Any], int], Say]", certificate: tuple[Path, Path] | None = None
) -> Iterator[Server]:
    """A server for the script: a list, whose last entry repeats, or a function of the request and its number.

    certificate: files of a certificate and its key, for https.
    """

    def from_list(request: dict[str, Any], number: int) -> Say:
        assert isinstance(script, list)
        return script[min(number, len(script) - 1)]

    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(server.requests)
                server.requests.append(request)
                server.keys.append(self.headers.get("Authorization", ""))
                server.headers.append({name.lower(): value for name, value in self.headers.items()})
            say = server.script(request, number)
            say.wait()
            body = say.body
            if body is None and say.status == 200:
                message = {"role": "assistant", "content": say.text}
                choice = {"index": 0, "message": message, "finish_reason": say.finish}
                fields = {"id": "x", "object": "chat.completion", "created": 0, "model": "stub", "choices": [choice]}
                body = json.dumps(fields | ({"usage": say.usage} if say.usage else {})).encode()
            elif body is None:
                body = json.dumps({"error": {"message": say.text}}).encode()
            try:
                self.send_response(say.status)
                for name, value in say.headers.items():
                    self.send_header(name, value)
                if "Content-Type" not in say.headers:
                    self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body) + say.missing))
                self.end_headers()
                self.wfile.write(body)
            except ConnectionError:
                pass  # the client had enough

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        http.socket = context.wrap_socket(http.socket, server_side=True, do_handshake_on_connect=False)
    scheme = "https" if certificate else "http"
    server = Server(
        f"{scheme}://127.0.0.1:{http.server_address[1]}/v1", from_list if isinstance(script, list) else script
    )
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
