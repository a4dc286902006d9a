"""On a GPU, once it was timed: which kernels ran, and whether the profiler sees all that was counted from outside.

It comes last since CUPTI, which watches, stays in the process and may take time at every launch.
"""

import re

from cuda_l2.kernelbench._base import ModuleCheck, ModuleSession
from cuda_l2.kernelbench.onlooker import left_to_pytorch, what_is_left
from cuda_l2.kernelbench.process import Call, Watched
from cuda_l2.machine.cpu.worker import Fault

_VENDORS = re.compile(r"cublas|cudnn|cutlass|gemm|flash", re.I)


class Kernels(ModuleCheck):
    name = "kernels on the GPU"
    order = 80
    late = True

    def applies(self, session: ModuleSession) -> bool:
        return not session.module.on_cpu

    def run(self, session: ModuleSession) -> None:
        try:
            watched = _one_call(session)
        except Fault as fault:
            if "all" not in session.allowed:
                raise
            session.notes.append(f"its kernels were not seen: {fault.reason}")
            return
        session.notes += what_is_left(watched)
        vendors = [name for name in watched.kernels if _VENDORS.search(name)]
        if vendors:
            session.notes.append(f"runs the kernels {', '.join(name[:60] for name in vendors[:4])}")
        session.onlooker.require_allowed(left_to_pytorch(watched))
        session.onlooker.require_seen()


def _one_call(session: ModuleSession) -> Watched:
    case = session.cases.get("state 0", weights_seed=13)
    session.module.prepare([Call(case.task, case.tensors, case.numbers)], {})
    session.module.run()
    return session.module.profile(gpu=True)


CHECK = Kernels()
