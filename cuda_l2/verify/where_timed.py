"""From here on tensors lie where timed launches have them, in any of their windows; in the checks before, they end
where their memory ends. The values' checks before are asked again: no arithmetic may be for other addresses alone.
"""

from cuda_l2.verify import distributions, exact
from cuda_l2.verify._base import Check, CheckFailed, Session

AGAIN = (exact.CHECK, distributions.CHECK)


class WhereTimed(Check):
    name = "where timed"
    order = 32
    device = "cuda"

    def run(self, session: Session) -> None:
        session.as_timed()
        try:
            for check in AGAIN:
                if check.applies(session):
                    check.run(session)
        except CheckFailed as failure:
            reason = f"{failure.reason} (where timed launches lie)"
            raise CheckFailed(failure.status, reason, failure.element) from None


CHECK = WhereTimed()
