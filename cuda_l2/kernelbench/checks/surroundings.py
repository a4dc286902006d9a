"""Functions of torch and Python are left alone, and nothing goes on when a call has given its result."""

import time

from cuda_l2.kernelbench._base import ModuleCheck, ModuleSession
from cuda_l2.kernelbench.process import Module
from cuda_l2.records import VerdictStatus
from cuda_l2.system.text import counted
from cuda_l2.verify._base import CheckFailed

IDLE_S = 0.4
MOST_CPU_SHARE = 0.25
"""Share of one core, in idle time."""
MOST_LOOKS = 50
"""On a busy machine a thread that works on gets a core late: then it is looked at again."""


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
        used = self._used(module)
        extra = module.processes() - module.own_processes
        module.freeze()
        if extra > 0:
            own = counted(extra, "process", "processes")
            raise CheckFailed(VerdictStatus.FORBIDDEN, f"leaves {own} of its own running")
        if used > MOST_CPU_SHARE:
            raise CheckFailed(VerdictStatus.FORBIDDEN, f"works on after its result: {used:.1f} cores busy")

    @staticmethod
    def _used(module: Module) -> float:
        """Share of a core that its threads use after a result, or would if nothing else had the cores.

        Over, too, is what still works when the machine was too busy to let it take as much as counts.
        """
        start, share = module.cpu_seconds(), 0.0
        for _ in range(MOST_LOOKS):
            before_s, queued_before_s = module.cpu_seconds(), module.queued_s()
            time.sleep(IDLE_S)
            now_s = module.cpu_seconds()
            share = (now_s - before_s + module.queued_s() - queued_before_s) / IDLE_S
            if share <= MOST_CPU_SHARE or now_s - start > MOST_CPU_SHARE * IDLE_S:
                break
        return share


CHECK = Surroundings()
