"""Proves a built candidate correct, or says which check it fails and where.

Correct means all of: the task's results on inputs of many kinds, within its tolerance or precision contract; special
values; hygiene and state; and on the GPU no forbidden instruction and no race. The candidate runs in its own process;
references never enter it.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from cuda_l2.contract import ContractError
from cuda_l2.machine._base import Fault
from cuda_l2.records import Verdict, VerdictStatus
from cuda_l2.system.steps import step
from cuda_l2.verify._base import CheckFailed, CheckOf, Judged, Session, all_checks

S = TypeVar("S", bound=Judged)


def verify(
    open_session: Callable[[], S],
    checks: Sequence[CheckOf[S]],
    *,
    full: bool = False,
    begins: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Run every check that applies on one session.

    checks: in order; those of the launch contract are `all_checks()`.
    full: also the checks that are too slow for every candidate of a search.
    begins: called with each check's name before it runs.
    """
    start = time.perf_counter()
    passed: list[str] = []
    status, check_name, reason, element = VerdictStatus.CORRECT, "", "", None
    session = None
    try:
        with open_session() as session:
            for check in checks:
                check_name = check.name
                if (full or not check.full_only) and check.applies(session):
                    begins(check.name)
                    with step(f"checking a kernel: {check.name}"):
                        check.run(session)
                    passed.append(check.name)
        check_name = ""
    except CheckFailed as failure:
        status, reason, element = failure.status, failure.reason, failure.element
    except ContractError as error:
        status, reason = VerdictStatus.UNHYGIENIC, str(error)
    except Fault as fault:
        status, reason = fault.status, fault.reason
    return Verdict(
        status=status,
        check=check_name,
        reason=reason,
        element=element,
        passed=tuple(passed),
        rms_error=session.rms_error if session else float("nan"),
        max_error=session.max_error if session else float("nan"),
        max_allowed=session.max_allowed if session else float("nan"),
        baseline_deviation=session.baseline_deviation if session else float("nan"),
        seconds=time.perf_counter() - start,
    )


__all__ = ["Session", "all_checks", "verify"]
