"""The values' checks again where timed launches lie: no arithmetic may be for other addresses alone.

The first time tensors end where their memory ends. Here they lie in any of the windows that timed launches have.
"""

from cuda_l2.verify import distributions, exact, magnitudes, precision, special
from cuda_l2.verify._base import Check, CheckFailed, Session

AGAIN = (exact.CHECK, precision.CHECK, magnitudes.CHECK, distributions.CHECK)


class WhereTimed(Check):
    name = "where timed"
    order = 52
    device = "cuda"

    def run(self, session: Session) -> None:
        session.as_timed()
        try:
            for check in AGAIN:
                if check.applies(session):
                    check.run(session)
            for window in range(session.windows):  # no timed launch has such values
                session.window = window
                special.CHECK.run(session)
        except CheckFailed as failure:
            reason = f"{failure.reason} (where timed launches lie)"
            raise CheckFailed(failure.status, reason, failure.element) from None
        finally:
            session.window = None


CHECK = WhereTimed()
