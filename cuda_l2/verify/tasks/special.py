"""NaN and infinities among the inputs come out where the exact result has them, and touch nothing else.

Each kind stands in one element, or several kinds in a few, of one tensor of real numbers. Nothing is asked of elements
in which PyTorch itself gives another kind than the exact result has, nor where the reference refuses such inputs.
"""

from cuda_l2.tasks.cases import SPECIAL
from cuda_l2.verify.tasks._base import GpuTaskSession, TaskCheck, TaskSession, require_right

MAX_TENSORS = 3
"""Of a task with more tensors of real numbers, so many drawn at random."""


class SpecialValues(TaskCheck):
    name = "special values"
    order = 40

    def applies(self, session: TaskSession) -> bool:
        return not isinstance(session, GpuTaskSession)

    def run(self, session: TaskSession) -> None:
        names = session.cases.real_tensors
        for index in session.cases.rng.permutation(len(names))[:MAX_TENSORS]:
            for kind in SPECIAL:
                case = session.cases.special(names[int(index)], kind)
                if case is not None:
                    require_right(case, session.launch(case), f"with {kind} in {names[int(index)]}")


CHECK = SpecialValues()
