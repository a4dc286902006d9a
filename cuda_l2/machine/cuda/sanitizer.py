"""NVIDIA's compute-sanitizer on candidates launched alone: what a tool finds, in one line.

memcheck sees every access to global and shared memory, and knows the bounds of each array. racecheck sees pairs of
accesses to the same shared memory that nothing orders. initcheck sees reads of global memory that nothing has written:
scratch workspaces are left to it as the driver gives them.
"""

import enum
import functools
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cuda_l2.contract.cuda import Plan
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cuda import alone as cuda_alone
from cuda_l2.machine.cuda import toolkit
from cuda_l2.machine.cuda.alone import Ended, Job
from cuda_l2.records import Task, VerdictStatus
from cuda_l2.system import scratch
from cuda_l2.system.errors import MachineError, UserError

LAUNCHES = 2
PADDING_BYTES = 65536
"""Left free behind every array, so that running past an end meets no other array."""
MAX_REPORTS = 4
MAX_REASON = 400

_PREFIX = "========="
_REPORT = re.compile(r"(?:Error: |Warning: )?(?:Race|Invalid|Misaligned|Uninitialized|Barrier|Potential|Divergent)\b")
_NOISE = re.compile(r"COMPUTE-SANITIZER|Saved host backtrace|Host Frame|in \S+\.so\b")
_SUMMARY = re.compile(r"(?:RACECHECK|ERROR) SUMMARY: (\d+) (?:hazard|error)")
_NOT_HERE = re.compile(r"Device not supported|Failed to initialize|LibraryNotLoaded")
_PROBE = """
from cuda.bindings import driver
driver.cuInit(0)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
driver.cuMemAlloc(8)
"""
PROBE_TIMEOUT_S = 60.0


class Tool(enum.StrEnum):
    MEMCHECK = "memcheck"
    RACECHECK = "racecheck"
    INITCHECK = "initcheck"


def find() -> Path:
    """The program, or a UserError that says how to get it."""
    found = toolkit.program("compute-sanitizer")
    if not found:
        raise UserError(
            "full verification needs compute-sanitizer, which was not found: install the CUDA toolkit,"
            " or pip install nvidia-cuda-sanitizer-api"
        )
    return found


@functools.cache
def works() -> bool:
    """Whether it can watch this GPU; under some virtual machines it says that it cannot. UserError where missing."""
    command = [str(find()), "--tool", Tool.MEMCHECK, sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return not _NOT_HERE.search(done.stdout + done.stderr)


def job(tool: Tool, cubin: Path, plan: Plan, task: Task, given: str = "") -> Job:
    """What a tool is to watch of a candidate. given: the file of inputs and weights, as `Job` has it."""
    return Job(str(cubin), plan, task, LAUNCHES, fills_scratch=tool is not Tool.INITCHECK, given=given)


def findings(tool: Tool, job: Job, timeout_s: float) -> str:
    """What the tool reports first of a candidate's launches, in one line; empty where it finds nothing.

    Fault where the candidate cannot be launched, or does not end.
    """
    return judged(tool, _watched(tool, [job], timeout_s))


def silent(tool: Tool, jobs: Sequence[Job], timeout_s: float) -> bool:
    """Whether the tool has nothing to say of several candidates, launched one after the other in one process.

    Starting a process under the tool costs more than most candidates. Where this is False, `findings` says of each
    whether it was to blame.
    """
    try:
        return not judged(tool, _watched(tool, jobs, timeout_s), len(jobs))
    except (Fault, MachineError):
        return False


def _watched(tool: Tool, jobs: Sequence[Job], timeout_s: float) -> Ended:
    with scratch.folder() as folder:
        return cuda_alone.run([str(find()), *options(tool)], jobs, folder, timeout_s)


def judged(tool: Tool, ended: Ended, count: int = 1) -> str:
    """What a run of so many jobs under a tool found; MachineError where the machine ended it.

    Fault where it says nothing of them, or one ended it.
    """
    found = parse(ended.output)
    if found:
        return found
    if ended.machine:
        raise MachineError(f"under {tool}: {ended.machine}")
    if ended.refused:
        raise Fault(VerdictStatus.FORBIDDEN, ended.refused)
    if ended.status is None:
        raise Fault(VerdictStatus.TIMED_OUT, f"did not finish in time under {tool}")
    summary = _SUMMARY.search(ended.output)
    if ended.fault or len(ended.digests) < count or not summary:
        raise Fault(VerdictStatus.CRASHED, f"ended under {tool}: {ended.fault or last_line(ended.output)}")
    if int(summary.group(1)):
        return last_line(ended.output)
    same = all(len(set(digests)) == 1 for digests in ended.digests)
    return "" if same else "the same launch gave another result"


def options(tool: Tool) -> list[str]:
    """Beside the tool: no backtraces of ours, no report of driver calls that say no, as some of ours may."""
    chosen = ["--tool", tool, "--show-backtrace", "no", "--print-limit", str(MAX_REPORTS)]
    if tool is Tool.MEMCHECK:
        chosen += ["--report-api-errors", "no", "--padding", str(PADDING_BYTES)]
    return chosen


def parse(output: str) -> str:
    """The first report in a tool's output, errors before warnings, in one line; empty where there is none."""
    reports = [lines for lines in _reports(output) if _REPORT.match(lines[0])]
    reports.sort(key=lambda lines: lines[0].startswith("Warning"))
    if not reports:
        return ""
    lines = reports[0][:2] if " reported between " in reports[0][0] else reports[0]  # one pair of accesses will do
    return " ".join(lines)[:MAX_REASON]


def _reports(output: str) -> Iterator[list[str]]:
    """The lines of each report, which end with an empty one; backtraces left out."""
    lines: list[str] = []
    for line in [*output.splitlines(), _PREFIX]:
        if not line.startswith(_PREFIX):
            continue  # the program's own
        text = line.removeprefix(_PREFIX).strip()
        if text and not _NOISE.search(text):
            lines.append(text)
        elif not text and lines:
            yield lines
            lines = []


def last_line(output: str) -> str:
    """The last thing a tool said."""
    lines = [line.removeprefix(_PREFIX).strip() for line in output.splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")[:MAX_REASON]
