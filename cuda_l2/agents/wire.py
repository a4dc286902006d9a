"""Standard input and output as an MCP server's lines: bounded messages, and no reading while a reply is not taken.

File descriptors 0 and 1 are moved away, so that neither this program's own words nor its children meet the protocol.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import sys
import threading
from typing import BinaryIO, Self

from cuda_l2.agents import MAX_MESSAGE_BYTES

INVALID_REQUEST = -32600
"""JSON-RPC 2.0, section 5.1."""
_KEPT = 200
"""Bytes of a line's head and tail that may name its request."""
_ID = rb'"id"\s*:\s*(\d{1,18}|"[\w-]{1,64}")'
_HEAD = re.compile(rb'^\s*\{\s*"jsonrpc"\s*:\s*"2.0"\s*,\s*' + _ID)
_TAIL = re.compile(_ID + rb"\s*\}\s*$")


class Wire:
    """Lines from the client, as an asynchronous iterator; `write` and `flush` to it. A context manager."""

    def __enter__(self) -> Self:
        self._input, self._output = os.dup(0), os.dup(1)  # children do not inherit them
        with open(os.devnull) as nothing:  # noqa: PTH123
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        return self

    def __exit__(self, *_: object) -> None:
        os.dup2(self._output, 1)

    def start(self) -> None:
        """Begin to read, for the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[str] = asyncio.Queue(maxsize=1)
        self._idle = asyncio.Event()  # no reply is being written
        self._idle.set()
        self._writing = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()  # a read cannot be cancelled

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        await self._idle.wait()
        line = await self._lines.get()
        if not line:
            raise StopAsyncIteration
        return line

    async def write(self, text: str) -> None:
        self._idle.clear()
        await asyncio.to_thread(self._write, text)

    async def flush(self) -> None:
        self._idle.set()

    def _read(self) -> None:
        with open(self._input, "rb", closefd=False) as file:
            while line := file.readline(MAX_MESSAGE_BYTES):
                if line.endswith(b"\n") or len(line) < MAX_MESSAGE_BYTES:
                    self._put(line.decode(errors="replace"))
                else:
                    self._refuse(line, file)
        self._put("")

    def _put(self, line: str) -> None:
        with contextlib.suppress(RuntimeError, concurrent.futures.CancelledError):  # the server has ended
            asyncio.run_coroutine_threadsafe(self._lines.put(line), self._loop).result()

    def _refuse(self, head: bytes, file: BinaryIO) -> None:
        """Read a message that is too long to its end, and answer with an error where its request's number shows."""
        size, tail = len(head), head[-_KEPT:]
        while not tail.endswith(b"\n") and (more := file.readline(MAX_MESSAGE_BYTES)):
            size, tail = size + len(more), (tail + more)[-_KEPT:]
        print(f"cuda-l2: a client's message of {size / 1e6:.0f} MB was refused", file=sys.stderr, flush=True)
        if named := _TAIL.search(tail) or _HEAD.match(head[:_KEPT]):
            said = f"a message may have at most {MAX_MESSAGE_BYTES >> 20} MiB; submit fewer files at once"
            error = {"code": INVALID_REQUEST, "message": said}
            self._write(json.dumps({"jsonrpc": "2.0", "id": json.loads(named.group(1)), "error": error}) + "\n")

    def _write(self, line: str) -> None:
        with self._writing, contextlib.suppress(BrokenPipeError):  # the client is gone, and input ends too
            left = memoryview(line.encode())
            while left:
                left = left[os.write(self._output, left) :]
