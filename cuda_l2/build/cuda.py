"""Builds CUDA candidates: text rules, contract, compile in the sandbox, rules on PTX and machine code, publish.

No GPU and no driver is needed: the compiler is told the target's architecture. A build is cached by content (source,
architecture, compiler, headers, rules) and appears by one rename, so that a killed build leaves nothing half-written.
The contract is no part of what is compiled: one kernel under several contracts is compiled once and judged under each.
"""

import concurrent.futures
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cuda_l2 import contract
from cuda_l2.build import cache, compile_server, cubin, cuda_rules, lexing, sass, unpaired
from cuda_l2.build.cuda_compiler import Compiled, Compiler, Toolchain, compile_source, cutlass, toolchain
from cuda_l2.contract import CudaContract
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Build, BuildStatus, Candidate
from cuda_l2.system import sandbox, scratch

__all__ = ["Compiler", "build_all"]

ARTIFACT = "kernel.cubin"
GROUP = 16
"""Candidates whose machine code one run of nvdisasm reads."""
MAX_LOG = 20_000


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One candidate on its way: finished, or compiled and still to be judged by its machine code."""

    candidate: Candidate
    entry: Path
    build: Build | None = None
    contract: CudaContract | None = None
    compiled: Compiled = Compiled(BuildStatus.FAILED, "not compiled")
    machine_code: cubin.Cubin | None = None


def build_all(candidates: Sequence[Candidate], target: CudaTarget, compiler: Compiler = Compiler.NVRTC) -> list[Build]:
    """Build several candidates, as many at once as the target has cores; order is kept."""
    tools = toolchain(compiler)
    entries = [_entry(candidate.source, target, tools) for candidate in candidates]
    distinct = dict(zip(entries, candidates, strict=True))
    try:
        with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, target.cores)) as pool:
            attempts = list(pool.map(lambda item: _compile(item[1], item[0], target, tools), distinct.items()))
            builds = {attempt.entry: attempt.build for attempt in attempts if attempt.build}
            waiting = [attempt for attempt in attempts if not attempt.build]
            groups = [waiting[i : i + GROUP] for i in range(0, len(waiting), GROUP)]
            for group, judged in zip(groups, pool.map(lambda g: _judge(g, target, tools), groups), strict=True):
                builds |= {attempt.entry: build for attempt, build in zip(group, judged, strict=True)}
    except OSError as error:
        raise scratch.unwritable(error) from None
    return [
        replace(builds[entry], candidate_id=candidate.id) for entry, candidate in zip(entries, candidates, strict=True)
    ]


def _entry(text: str, target: CudaTarget, tools: Toolchain) -> Path:
    """Of what is built from a source, or compiled from its code alone."""
    terms = (contract, contract.cuda, contract.cuda_reader, contract.expressions)
    modules = (sys.modules[__name__], cuda_rules, lexing, cubin, sass, unpaired, compile_server, *terms)
    parts = [cache.rules_version(*modules), text, target.arch, tools.identity, str(sandbox.kind())]
    if _with_cutlass(text):
        parts.append((cutlass() or (None, ""))[1])
    return cache.entry(parts)


def _with_cutlass(text: str) -> bool:
    return any(name.startswith(cuda_rules.CUTLASS_FOLDERS) for name in cuda_rules.includes(text))


def _compile(candidate: Candidate, entry: Path, target: CudaTarget, tools: Toolchain) -> _Attempt:
    """Everything up to the compiler and what its words and PTX tell."""
    found = cache.find(entry)
    if found:
        return _Attempt(candidate, entry, found)
    attempt = _Attempt(candidate, entry)
    reason = cuda_rules.refuse_text(candidate.source)
    if reason:
        return _finished(attempt, tools, BuildStatus.REFUSED, reason)
    try:
        terms = contract.parse_cuda(candidate.source)
    except contract.ContractError as error:
        return _finished(attempt, tools, BuildStatus.REFUSED, str(error))
    if not target.runs(terms.arch):
        return _finished(attempt, tools, BuildStatus.REFUSED, f"needs {terms.arch}; the target is {target.arch}")
    compiled = _compile_once(candidate.source, target, tools)
    attempt = replace(attempt, contract=terms, compiled=compiled)
    if compiled.status is not BuildStatus.BUILT:
        return _finished(attempt, tools, compiled.status, compiled.reason)
    try:
        return replace(attempt, machine_code=cubin.read(compiled.cubin))
    except cubin.CubinError as error:
        return _finished(attempt, tools, BuildStatus.FAILED, str(error))


def _compile_once(source: str, target: CudaTarget, tools: Toolchain) -> Compiled:
    """The code of a source compiled, and judged by all that does not ask for its contract.

    What passes is kept for other contracts. What does not is compiled for each: its log names lines of the whole text.
    """
    code = contract.code(source)
    entry = _entry(code, target, tools)
    with cache.alone(entry):
        found = cache.find(entry)
        if found:
            kernel = Path(found.artifact).read_bytes()
            return Compiled(found.status, log=found.log, cubin=kernel, seconds=found.seconds)
        before = "\n" * source[: len(source) - len(code)].count("\n")
        compiled = compile_source(before + code, target.arch, tools, with_cutlass=_with_cutlass(code))
        if compiled.status is BuildStatus.BUILT:
            compiled = _judge_ptx(compiled)
        if compiled.status is BuildStatus.BUILT and compiled.repeatable:
            artifact = str(entry / ARTIFACT)
            kept = Build("", BuildStatus.BUILT, log=compiled.log, artifact=artifact, seconds=compiled.seconds)
            _publish(entry, kept, code, compiled.cubin)
        return compiled


def _judge_ptx(compiled: Compiled) -> Compiled:
    reason = cuda_rules.refuse_ptx(compiled.ptx)
    if reason:
        return replace(compiled, status=BuildStatus.REFUSED, reason=reason)
    reason = cubin.refuse_warnings(cubin.warnings(compiled.log))
    if reason:
        return replace(compiled, status=BuildStatus.FAILED, reason=reason)
    reason = unpaired.refuse(compiled.ptx)
    return replace(compiled, status=BuildStatus.REFUSED, reason=reason) if reason else compiled


def _judge(group: Sequence[_Attempt], target: CudaTarget, tools: Toolchain) -> list[Build]:
    """The machine code of several candidates, read at once; alone where one of them cannot be read."""
    kernels = [kernel for attempt in group if attempt.machine_code for kernel in attempt.machine_code.kernels]
    try:
        texts = sass.disassemble((word for kernel in kernels for word in kernel.words), target.arch, tools.nvdisasm)
    except sass.SassError as error:
        if len(group) > 1:
            return [build for attempt in group for build in _judge([attempt], target, tools)]
        return [_finish(group[0], tools, BuildStatus.FAILED, str(error))]
    builds = []
    for attempt in group:
        assert attempt.machine_code is not None and attempt.contract is not None
        reason = cubin.refuse(attempt.machine_code, texts, attempt.contract, target.capability[0])
        if reason:
            builds.append(_finish(attempt, tools, BuildStatus.REFUSED, reason))
        else:
            builds.append(_finish(attempt, tools, BuildStatus.BUILT, "", texts))
    return builds


def _finished(attempt: _Attempt, tools: Toolchain, status: BuildStatus, reason: str) -> _Attempt:
    return replace(attempt, build=_finish(attempt, tools, status, reason))


def _finish(
    attempt: _Attempt, tools: Toolchain, status: BuildStatus, reason: str, texts: dict[bytes, str] | None = None
) -> Build:
    """The candidate's record, published unless the machine may be the cause of a failure."""
    compiled = attempt.compiled
    built = status is BuildStatus.BUILT
    kernels = cubin.facts(attempt.machine_code, texts, compiled.log) if attempt.machine_code and texts else ()
    build = Build(
        candidate_id=attempt.candidate.id,
        status=status,
        reason=reason,
        log=compiled.log[-MAX_LOG:],
        artifact=str(attempt.entry / ARTIFACT) if built else "",
        compiler=str(tools),
        sandbox=str(sandbox.kind()),
        seconds=compiled.seconds,
        kernels=kernels,
        warnings=cubin.warnings(compiled.log),
    )
    if compiled.repeatable:
        _publish(attempt.entry, build, attempt.candidate.source, compiled.cubin if built else b"")
    return build


def _publish(entry: Path, build: Build, source: str, kernel: bytes) -> None:
    work = scratch.make_folder()
    try:
        (work / compile_server.SOURCE).write_text(source, errors="replace")
        if kernel:
            (work / ARTIFACT).write_bytes(kernel)
        cache.publish(work, entry, build)
    finally:
        shutil.rmtree(work, ignore_errors=True)
