"""After many equal launches in a row the next one still computes: nothing that a launch leaves tells it to rest."""

from cuda_l2.verify._base import Check, Session, require_same

LEAST, MOST = 100, 1000


class Often(Check):
    name = "often"
    order = 56

    def run(self, session: Session) -> None:
        case = session.cases.drawn("state 0")
        right = session.launch(case)
        count = round(LEAST * (MOST / LEAST) ** session.cases.rng.random())
        reason = "does not compute any more after many equal launches: it keeps state"
        for found in session.launch_often(case, count):
            require_same(found, right, reason)


CHECK = Often()
