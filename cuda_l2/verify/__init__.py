"""Proves a built candidate correct, or says which check it fails and where.

Correct means all of: exact match, the precision contract, baseline-bounded deviation, special values,
hygiene. The candidate runs in its own process (execute.worker); references never enter it.
"""

import time
from pathlib import Path

from cuda_l2 import contract
from cuda_l2.execute.arena import Arena
from cuda_l2.execute.worker import Fault, Worker
from cuda_l2.records import Build, Candidate, Verdict, VerdictStatus
from cuda_l2.verify._base import Cases, CheckFailed, Session, all_checks


def verify(candidate: Candidate, build: Build, arena: Arena, cases: Cases) -> Verdict:
    """Run every check that applies on a fresh worker."""
    start = time.perf_counter()
    gemm = cases.gemm
    terms = contract.parse_cpu(candidate.source)
    passed: list[str] = []
    status, check_name, reason, element = VerdictStatus.CORRECT, "", "", None
    session = None
    try:
        workspace = terms.workspace_bytes(gemm.m, gemm.n, gemm.k)
        if workspace > arena.workspace_bytes:
            limit = arena.workspace_bytes >> 20
            raise CheckFailed(VerdictStatus.UNHYGIENIC, f"asks for {workspace} bytes of workspace; at most {limit} MiB")
        with Worker(arena, Path(build.artifact), terms) as worker:
            session = Session(gemm, arena, worker, workspace, cases)
            for check in all_checks():
                check_name = check.name
                if check.applies(gemm):
                    check.run(session)
                    passed.append(check.name)
        check_name = ""
    except CheckFailed as failure:
        status, reason, element = failure.status, failure.reason, failure.element
    except contract.ContractError as error:
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
        baseline_deviation=session.baseline_deviation if session else float("nan"),
        seconds=time.perf_counter() - start,
    )


__all__ = ["Cases", "verify"]
