"""A clock for tests: time passes only when it is read or slept."""

from cuda_l2.measure.clock import Clock


def ticking(step_s: float = 1e-3) -> Clock:
    """A clock that moves on by a step whenever it is read."""
    now = [0.0]

    def read() -> float:
        now[0] += step_s
        return now[0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return Clock(read, sleep)
