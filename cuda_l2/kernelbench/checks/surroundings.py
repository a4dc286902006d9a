"""Functions of torch and Python are left alone, and nothing goes on when a call has given its result."""

import time

from cuda_l2.kernelbench._base import ModuleCheck, ModuleSession
from cuda_l2.records import VerdictStatus
from cuda_l2.system.text import counted
from cuda_l2.verify._base import CheckFailed

IDLE_S = 0.4
MOST_CPU_SHARE = 0.25
"""Share of one core, in idle time."""


class Surroundings(ModuleCheck):
    name = "surroundings"
    order = 60

    def run(self, session: ModuleSession) -> None:
        module = session.module
        case = session.cases.drawn("state 0", weights=13)
        session.make(case)
        session.launch(case)
        replaced = module.replaced()
        if replaced:
            raise CheckFailed(VerdictStatus.FORBIDDEN, f"replaces {', '.join(replaced[:4])}")
        module.thaw()
        before = module.cpu_seconds()
        time.sleep(IDLE_S)
        used = module.cpu_seconds() - before
        extra = module.processes() - module.own_processes
        module.freeze()
        if extra > 0:
            own = counted(extra, "process", "processes")
            raise CheckFailed(VerdictStatus.FORBIDDEN, f"leaves {own} of its own running")
        if used > MOST_CPU_SHARE * IDLE_S:
            raise CheckFailed(VerdictStatus.FORBIDDEN, f"works on after its result: {used / IDLE_S:.1f} cores busy")


CHECK = Surroundings()
