"""A process of a pool: answers requests, one after the other, on the GPU that it sees first. Started by `pool`.

One JSON line in with a request, answered by one. Before that a line for each that is said meanwhile, and while the
GPU's lock is waited for one every few seconds. An error that is not for users ends the process: its GPU context may be
broken. A failure of the machine is a line before that.
"""

import contextlib
import io
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from cuda_l2.system import lock, process_tree, steps, turns, variables
from cuda_l2.system.errors import UserError, failure_of_machine
from cuda_l2.system.line_process import packed, unpacked
from cuda_l2.system.loading import loading

TICK_S = 5.0


class _Channel(io.TextIOBase):
    """The pipe to who started this process, for answers and, as standard error, for what is said."""

    def __init__(self) -> None:
        self._pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print there
        self._lock, self._begun = threading.Lock(), ""

    def send(self, **message: Any) -> None:
        with self._lock:
            print(json.dumps(message), file=self._pipe, flush=True)

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            self.send(said=line.strip().removeprefix("cuda-l2: "))
        return len(text)

    def tick(self) -> None:
        """While another process has the GPU's lock, or a turn alone, say so, since this is no hang."""
        while True:
            threading.Event().wait(TICK_S)
            running = steps.current()
            if running and running.name in (lock.WAITING, turns.WAITING):
                self.send(waits=True)


def main() -> None:
    process_tree.end_with_parent()  # the pool's thread, which lives as long as the pool
    variables.clean_process()
    channel, serve = _Channel(), None
    threading.Thread(target=channel.tick, daemon=True).start()
    with contextlib.redirect_stderr(channel), contextlib.ExitStack() as held:
        for line in sys.stdin:
            message = json.loads(line)
            try:
                serve = serve or _opened(held, message["servant"])
                channel.send(answer=packed(serve(unpacked(message["request"]))))
            except UserError as error:
                channel.send(error=str(error))
            except RuntimeError as error:
                said = failure_of_machine(error)
                if not said:
                    raise
                channel.send(failed=said)
                return


def _opened(held: contextlib.ExitStack, servant: str) -> Callable[[Any], Any]:
    with loading():  # its modules, and torch
        found = unpacked(servant)
    serve: Callable[[Any], Any] = held.enter_context(found.opened())
    return serve


if __name__ == "__main__":
    main()
