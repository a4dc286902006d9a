"""The first launch of a process is one like those that are timed.

What a candidate makes of its first inputs must not tell it whether it is checked or timed: other checks begin with
zeros and ones.
"""

from cuda_l2.verify._base import Check, Session, require_right


class FirstLaunch(Check):
    name = "first launch"
    order = 5
    device = "cpu"  # on a GPU nothing outlives a launch but what is watched
    products = True  # checks of other tasks begin with usual values

    def run(self, session: Session) -> None:
        case = session.cases.drawn("first")
        require_right(case, session.launch(case), f"at the first launch, on {session.cases.usual}")


CHECK = FirstLaunch()
