"""Tensors at any address that the contract allows: multiples of 16 bytes, not of 32 or of what an allocator gives.

In the checks before, tensors end where their memory ends; after this one they lie as timed launches have them.
"""

from cuda_l2.tasks.products import ProductCases
from cuda_l2.verify import exact
from cuda_l2.verify._base import Check, GpuSession, Session, require_right

STEP, STEPS = 16, 16


class Alignment(Check):
    name = "alignment"
    order = 12
    device = "cuda"

    def run(self, session: Session) -> None:
        assert isinstance(session, GpuSession)
        cases = session.cases
        for index, steps in enumerate((1, int(cases.rng.integers(2, STEPS)))):
            session.as_shifted(steps * STEP)
            if isinstance(cases, ProductCases):
                exact.require_exact(session, cases, [index])
            else:
                case = cases.drawn("state 0")
                require_right(
                    case, session.launch(case), f"where tensors begin {steps * STEP} bytes off, on {cases.usual}"
                )
        session.as_shifted(0)


CHECK = Alignment()
