"""Tasks of one parallel_for may overlap in time as they like: none may write what another one reads or writes.

Two that add to the same memory go wrong when they do so at once, which may be once in thousands of launches. So some
tasks are run one by one, and what each changes is compared: two change no byte both, unless atomic operations order
them. Then threads begin their first tasks some random time apart, so that every part of one meets every part of the
other.
"""

from cuda_l2.records import VerdictStatus
from cuda_l2.verify._base import CheckFailed, require_same
from cuda_l2.verify._cpu_only import CpuCheck, CpuOnly

LAUNCHES = 200


class Overlap(CpuCheck):
    name = "overlap"
    order = 59  # once it is known that launches are repeatable

    def run_on(self, session: CpuOnly) -> None:
        case = session.cases.drawn("state 0")
        right = session.launch(case)
        where = session.tasks_collide(case)
        if where:
            raise CheckFailed(
                VerdictStatus.UNHYGIENIC, f"two tasks of one parallel_for change the same bytes of {where}, in no order"
            )
        reason = "gives another result when its tasks begin at other times: one writes what another one uses"
        for found in session.launch_apart(case, LAUNCHES):
            require_same(found, right, reason)


CHECK = Overlap()
