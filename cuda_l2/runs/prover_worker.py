"""A process that verifies candidates one after the other, beside others that do. Started by `prover`.

One JSON line in with a candidate, answered by one: the verdict, and what the sanitizer is yet to look at. What goes
wrong otherwise is answered too and ends the process: its GPU context may be broken.
"""

import json
import sys
from typing import Any

from cuda_l2.machine.cuda.alone import Job
from cuda_l2.machine.cuda.sanitizer import Tool
from cuda_l2.records import Build, Candidate, Gemm, from_json, to_json
from cuda_l2.system.errors import UserError


class Deferred:
    """Takes the sanitizer's jobs and finds nothing yet."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Tool, Job]] = []

    def __call__(self, tool: Tool, job: Job, timeout_s: float) -> str:
        del timeout_s  # of who runs it
        self.jobs.append((tool, job))
        return ""


def main() -> None:
    import torch  # noqa: PLC0415 - only in a worker's own process

    from cuda_l2.rigs.cuda import CudaRig  # noqa: PLC0415

    patience, deferred = float(sys.argv[1]), Deferred()
    with CudaRig(patience=patience, tunes=False, sanitize=deferred) as rig:
        torch.cuda.empty_cache()  # what measuring the ceilings took
        for line in sys.stdin:
            message = json.loads(line)
            deferred.jobs.clear()
            try:
                with rig.open(Gemm.parse(message["gemm"]), message["seed"]) as bench:
                    build = from_json(Build, message["build"])
                    verdict = bench.verify(Candidate(message["source"]), build, full=True)
            except (UserError, RuntimeError) as error:  # torch's and the driver's are RuntimeErrors
                _answer({"error": " ".join(str(error).split()) or type(error).__name__})
                return
            _answer({"verdict": to_json(verdict), "jobs": [[tool, to_json(job)] for tool, job in deferred.jobs]})


def _answer(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
