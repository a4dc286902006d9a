"""Builds CPU candidates: text rules, preprocess, rules again, compile in the sandbox, rules on instructions, publish.

The cache is addressed by content (source, flags, compiler, machine). A build happens in a folder of its own
and appears in the cache by one rename, so that a killed build leaves nothing half-written.
"""

import concurrent.futures
import errno
import functools
import os
import re
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from cuda_l2 import contract
from cuda_l2.build import binary, cache, lexing, rules
from cuda_l2.contract.buffers import PRODUCTS
from cuda_l2.machine.cpu.target import CpuTarget
from cuda_l2.records import Build, BuildStatus, Candidate
from cuda_l2.system import sandbox, scratch
from cuda_l2.system.errors import MachineError

SOURCE_NAME = "candidate.c"
CPU_S, TIMEOUT_S = 30, 300.0
"""Limits of the compiler: of its processor time, and of time by the clock, however busy the machine."""
LIMITS = sandbox.Limits(memory_bytes=4 << 30, cpu_seconds=CPU_S, file_bytes=16 << 20)
_DRIVER_SAYS = re.compile(r"^[^:\s]+: [a-z ]*error: .*CPU time limit exceeded", re.M)
"""What the driver says of a program that it started; a line about the source begins with a place in it."""


def build_all(candidates: Sequence[Candidate], target: CpuTarget) -> list[Build]:
    """Build several candidates, as many at once as the target has cores; order is kept."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, target.cores)) as pool:
        return list(pool.map(lambda candidate: build(candidate, target), candidates))


def build(candidate: Candidate, target: CpuTarget) -> Build:
    """Build one candidate, or say why not."""
    start = time.perf_counter()
    folder = _entry(candidate, target)
    found = cache.find(folder)
    if found:
        return found
    with scratch.writing(), scratch.folder() as work:
        status, reason, log = _compile(candidate, target, work)
        result = Build(
            candidate_id=candidate.id,
            status=status,
            reason=reason,
            log=log[-20_000:],
            artifact=str(folder / "kernel.so") if status is BuildStatus.BUILT else "",
            compiler=target.compiler_version,
            sandbox=str(sandbox.kind()),
            seconds=time.perf_counter() - start,
        )
        if status is not BuildStatus.TIMED_OUT:  # a slow machine is not a property of the source
            for name in ("expanded.i", "kernel.s"):
                (work / name).unlink(missing_ok=True)
            shutil.rmtree(work / ".root", ignore_errors=True)
            cache.publish(work, folder, result)
        return result


def link(candidate: Candidate, target: CpuTarget, helper: Path, work: Path) -> str:
    """Compile a candidate that was built before together with an object file of ours into library.so in `work`.

    The library hides the candidate's symbols. Returns the reason where the compiler fails; empty otherwise.
    """
    (work / SOURCE_NAME).write_text(candidate.source)
    shutil.copyfile(helper, work / "helper.o")
    flags = [flag for flag in target.compile_flags if flag != "-nostdlib"]
    command = [target.compiler, *flags, "-fvisibility=hidden", "-pthread", SOURCE_NAME, "helper.o", "-o", "library.so"]
    done = sandbox.run(sandbox.wrap(command, work, LIMITS, reads=_toolchain(target)), TIMEOUT_S, cwd=work)
    if late := _late(done):
        return late
    return _first_error(done.output, done.status) if done.status else ""


def _entry(candidate: Candidate, target: CpuTarget) -> Path:
    flags = " ".join(target.compile_flags)
    version = cache.rules_version(rules, lexing, binary, contract, contract.cpu)
    return cache.entry([version, candidate.source, flags, target.compiler, target.machine, str(sandbox.kind())])


def _compile(candidate: Candidate, target: CpuTarget, work: Path) -> tuple[BuildStatus, str, str]:
    """Status, reason and compiler log; on success kernel.so lies in `work`."""
    reason = rules.refuse_text(candidate.source)
    if reason:
        return BuildStatus.REFUSED, reason, ""
    try:
        terms = contract.parse_cpu(candidate.source)
    except contract.ContractError as error:
        return BuildStatus.REFUSED, str(error), ""
    (work / SOURCE_NAME).write_text(candidate.source)
    flags = list(target.compile_flags)
    preprocess = [target.compiler, "-E", *flags, "-Werror=date-time", SOURCE_NAME, "-o", "expanded.i"]
    compile_ = [target.compiler, "-S", *flags, "expanded.i", "-o", "kernel.s"]
    assemble = [target.compiler, *flags, "kernel.s", "-o", "kernel.so"]
    for step in (preprocess, compile_, assemble):
        done = sandbox.run(sandbox.wrap(step, work, LIMITS, reads=_toolchain(target)), TIMEOUT_S, cwd=work)
        if late := _late(done):
            return BuildStatus.TIMED_OUT, late, done.output
        if done.status and shutil.disk_usage(work).free < LIMITS.file_bytes:  # not a property of the source
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if done.status:
            return BuildStatus.FAILED, _first_error(done.output, done.status), done.output
        if step is preprocess:
            if (work / "expanded.i").stat().st_size > rules.MAX_EXPANSION_BYTES:
                return BuildStatus.REFUSED, f"expands to more than {rules.MAX_EXPANSION_BYTES >> 20} MiB", ""
            expanded = (work / "expanded.i").read_text(errors="replace")
            reason = rules.refuse_expansion(expanded, SOURCE_NAME)
            names, lines = rules.headers(expanded, SOURCE_NAME)
            if not reason and not lines <= _header_lines(names, target):
                reason = "a macro of the source changes what a header says; define macros after the #includes"
            if reason:
                return BuildStatus.REFUSED, reason, ""
        if step is compile_:
            assembly = (work / "kernel.s").read_text(errors="replace")
            reason = rules.refuse_assembly(assembly, product=terms.interface in PRODUCTS.values())
            if reason:
                return BuildStatus.REFUSED, reason, ""
    reason = binary.refuse_binary(work / "kernel.so", terms.entry)
    return (BuildStatus.REFUSED, reason, done.output) if reason else (BuildStatus.BUILT, "", done.output)


@functools.lru_cache(maxsize=64)
def _header_lines(names: tuple[str, ...], target: CpuTarget) -> frozenset[str]:
    """The lines of these headers, included in this order, as no macro of a candidate's has changed them."""
    with scratch.folder() as work:
        (work / SOURCE_NAME).write_text("".join(f"#include <{name}>\n" for name in names))
        command = [target.compiler, "-E", *target.compile_flags, SOURCE_NAME, "-o", "expanded.i"]
        done = sandbox.run(sandbox.wrap(command, work, LIMITS, reads=_toolchain(target)), TIMEOUT_S, cwd=work)
        if done.status != 0:
            raise MachineError(f"{target.compiler} cannot read its own headers: {_first_error(done.output, 1)}")
        return rules.headers((work / "expanded.i").read_text(errors="replace"), SOURCE_NAME)[1]


def _toolchain(target: CpuTarget) -> list[Path]:
    """Folders the compiler needs beside the system's: its own installation, where it lies elsewhere."""
    paths_ = [Path(target.compiler), Path(target.compiler).resolve()]
    roots = {path.parent.parent for path in paths_}
    return [root for root in sorted(roots) if not str(root).startswith(("/usr", "/etc")) and root != Path("/")]


def _late(done: sandbox.Finished) -> str:
    """Which limit of time ended the compiler, or the process that it started; empty where none did."""
    if done.status is None:
        return f"the compiler did not finish within {TIMEOUT_S:.0f} s"
    if done.status in (-signal.SIGXCPU, 128 + signal.SIGXCPU) or (done.status and _DRIVER_SAYS.search(done.output)):
        return f"the compiler did not finish within {LIMITS.cpu_seconds} s of processor time"
    return ""


def _first_error(output: str, status: int) -> str:
    lines = [line for line in output.splitlines() if "error" in line.lower()] or output.splitlines()[-1:]
    return lines[0].strip()[:300] if lines else f"the compiler ended with status {status}"
