"""Tensors may lie right behind one another, in one page, in any order, as an allocator gives them to a user.

Neither the checks before nor timed launches have them so: each tensor has a buffer of its own there. A kernel that
computes otherwise here would gain nothing in timing, but be wrong at a user's.
"""

import torch

from cuda_l2.verify._base import Check, GpuSession, Outputs, Session, differs, require_same


class SideBySide(Check):
    name = "side by side"
    order = 58  # once it is known that launches are repeatable
    device = "cuda"

    def run(self, session: Session) -> None:
        assert isinstance(session, GpuSession)
        case = session.cases.drawn("state 0")
        right: Outputs = {}
        for several in session.launch_side_by_side(case):
            right = right or {name: output.clone() for name, output in several[0].items()}
            if torch.stack([differs(found, right) for found in several]).any():  # one wait for all of them
                for found in several:
                    require_same(found, right, "gives another result where tensors lie right behind one another")


CHECK = SideBySide()
