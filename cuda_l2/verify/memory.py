"""Writes at any distance: a launch changes nothing that is mapped but its outputs and its workspaces.

Around tensors and right behind workspaces every launch is watched. Here all else is too: the rest of the workspaces'
memory, and what the runtime itself keeps where candidates could reach it. In one launch inputs can only be read, so
that what is written there and written back shows too.
"""

from cuda_l2.verify._base import Check, GpuSession, Session, require_same

LAUNCHES = 2
OTHER = "is not repeatable: the same launch gave another result"


class Memory(Check):
    name = "memory"
    order = 57
    device = "cuda"

    def run(self, session: Session) -> None:
        assert isinstance(session, GpuSession)
        case = session.cases.drawn("state 0")
        right = session.launch(case)
        for _ in range(LAUNCHES):
            require_same(session.launch_watched(case), right, OTHER)
        require_same(session.launch_guarded(case), right, OTHER)


CHECK = Memory()
