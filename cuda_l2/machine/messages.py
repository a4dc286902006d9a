"""Waiting for a message between two processes that take turns.

A process that sleeps is woken tens of microseconds late, more where compilers keep every core busy. Most answers come
within a millisecond, so both look again and again for that long before they sleep.
"""

import select
import socket
import time

SPIN_S = 0.0015
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)


def wait(channel: socket.socket, timeout_s: float) -> bool:
    """Whether a message, or the other end's going, came in time."""
    began = time.perf_counter()
    while time.perf_counter() - began < SPIN_S:
        try:
            channel.recv(1, _LOOK)
        except BlockingIOError:
            continue
        except OSError:  # for the caller's own call to meet
            pass
        return True
    return bool(select.select([channel], [], [], timeout_s)[0])
