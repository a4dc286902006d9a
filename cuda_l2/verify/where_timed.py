"""The values' checks again where timed launches lie: no arithmetic may be for other addresses alone.

The first time tensors end where their memory ends. Here they lie in any of the windows that timed launches have.
"""

from cuda_l2.verify import distributions, exact, magnitudes, precision, special
from cuda_l2.verify._base import Check, CheckFailed, Session

AGAIN = (exact.CHECK, precision.CHECK, magnitudes.CHECK, distributions.CHECK, special.CHECK)


class WhereTimed(Check):
    name = "where timed"
    order = 52
    device = "cuda"

    def run(self, session: Session) -> None:
        session.as_timed()
        for check in AGAIN:
            if check.applies(session):
                try:
                    check.run(session)
                except CheckFailed as failure:
                    reason = f"{failure.reason} (where timed launches lie, {check.name})"
                    raise CheckFailed(failure.status, reason, failure.element) from None


CHECK = WhereTimed()
