"""Builds CUDA candidates: text rules, contract, compile in the sandbox, rules on PTX and machine code, publish.

No GPU and no driver is needed: the compiler is told the target's architecture. A build is cached by content (source,
architecture, compiler, headers, rules) and appears by one rename, so that a killed build leaves nothing half-written.
The contract is no part of what is compiled: one kernel under several contracts is compiled once and judged under each.
"""

import concurrent.futures
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cuda_l2 import contract
from cuda_l2.build import cache, compile_server, cubin, cuda_rules, lexing, noncoherent, sass, spins, unpaired
from cuda_l2.build.cuda_compiler import Compiled, Toolchain, compile_source, cutlass, toolchain
from cuda_l2.contract import CudaContract
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Build, BuildStatus, Candidate, KernelFacts
from cuda_l2.system import sandbox, scratch

ARTIFACT, WAITING = "kernel.cubin", "waiting"
GROUP = 16
"""Candidates whose machine code one run of nvdisasm reads."""
MAX_LOG = 20_000


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A candidate that is compiled, and still to be judged by its machine code."""

    candidate: Candidate
    entry: Path
    contract: CudaContract
    compiled: Compiled
    machine_code: cubin.Cubin


def build_all(candidates: Sequence[Candidate], target: CudaTarget) -> list[Build]:
    """Build several candidates, as many at once as the target has cores; order is kept."""
    tools = toolchain()
    entries = [_entry(candidate.source, target, tools) for candidate in candidates]
    distinct = dict(zip(entries, candidates, strict=True))
    builds: dict[Path, Build] = {}
    waiting: list[_Compiled] = []
    with scratch.writing(), concurrent.futures.ThreadPoolExecutor(max_workers=max(1, target.cores)) as pool:
        attempts = pool.map(lambda entry: _compile(distinct[entry], entry, target, tools), distinct)
        for entry, attempt in zip(distinct, attempts, strict=True):
            if isinstance(attempt, Build):
                builds[entry] = attempt
            else:
                waiting.append(attempt)
        groups = [waiting[i : i + GROUP] for i in range(0, len(waiting), GROUP)]
        for judged in pool.map(lambda group: _judge(group, target, tools), groups):
            builds |= judged
    return [
        replace(builds[entry], candidate_id=candidate.id) for entry, candidate in zip(entries, candidates, strict=True)
    ]


def _entry(text: str, target: CudaTarget, tools: Toolchain) -> Path:
    """Cache folder of what is built from a source, or compiled from its code alone."""
    terms = (contract, contract.cuda, contract.cuda_reader, contract.expressions)
    modules = (
        sys.modules[__name__],
        cuda_rules,
        lexing,
        cubin,
        sass,
        unpaired,
        noncoherent,
        spins,
        compile_server,
        *terms,
    )
    parts = [cache.rules_version(*modules), text, target.arch, tools.identity, str(sandbox.kind())]
    if _with_cutlass(text):
        parts.append((cutlass() or (None, ""))[1])
    return cache.entry(parts)


def _with_cutlass(text: str) -> bool:
    return any(name.startswith(cuda_rules.CUTLASS_FOLDERS) for name in cuda_rules.includes(text))


def _compile(candidate: Candidate, entry: Path, target: CudaTarget, tools: Toolchain) -> Build | _Compiled:
    """Everything up to the compiler and what its words and PTX tell."""
    found = cache.find(entry)
    if found:
        return found
    finish = functools.partial(_finish, candidate, entry, tools)
    reason = cuda_rules.refuse_text(candidate.source)
    if reason:
        return finish(BuildStatus.REFUSED, reason)
    try:
        terms = contract.parse_cuda(candidate.source)
    except contract.ContractError as error:
        return finish(BuildStatus.REFUSED, str(error))
    if not target.runs(terms.arch):
        return finish(BuildStatus.REFUSED, f"needs {terms.arch}; the target is {target.arch}")
    compiled = _compile_once(candidate.source, target, tools)
    if compiled.status is not BuildStatus.BUILT:
        return finish(compiled.status, compiled.reason, compiled)
    try:
        return _Compiled(candidate, entry, terms, compiled, cubin.read(compiled.cubin))
    except cubin.CubinError as error:
        return finish(BuildStatus.FAILED, str(error), compiled)


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
            waiting = tuple((entry / WAITING).read_text().split())
            return Compiled(found.status, log=found.log, cubin=kernel, seconds=found.seconds, waiting=waiting)
        before = "\n" * source[: len(source) - len(code)].count("\n")
        compiled = compile_source(before + code, target.arch, tools, with_cutlass=_with_cutlass(code))
        if compiled.status is BuildStatus.BUILT:
            compiled = _judge_ptx(compiled)
        if compiled.status is BuildStatus.BUILT and compiled.repeatable:
            artifact = str(entry / ARTIFACT)
            kept = Build("", BuildStatus.BUILT, log=compiled.log, artifact=artifact, seconds=compiled.seconds)
            _publish(entry, kept, code, compiled.cubin, compiled.waiting)
        return compiled


def _judge_ptx(compiled: Compiled) -> Compiled:
    reason = cuda_rules.refuse_ptx(compiled.ptx)
    if reason:
        return replace(compiled, status=BuildStatus.REFUSED, reason=reason)
    reason = cubin.refuse_warnings(cubin.warnings(compiled.log))
    if reason:
        return replace(compiled, status=BuildStatus.FAILED, reason=reason)
    reason = unpaired.refuse(compiled.ptx) or noncoherent.refuse(compiled.ptx) or spins.refuse(compiled.ptx)
    if reason:
        return replace(compiled, status=BuildStatus.REFUSED, reason=reason)
    return replace(compiled, waiting=spins.waiting(compiled.ptx))


def _judge(group: Sequence[_Compiled], target: CudaTarget, tools: Toolchain) -> dict[Path, Build]:
    """The machine code of several candidates, read at once; alone where one of them cannot be read."""
    words = (word for each in group for kernel in each.machine_code.kernels for word in kernel.words)
    try:
        texts = sass.disassemble(words, target.arch, tools.nvdisasm)
    except sass.SassError as error:
        if len(group) > 1:
            return {entry: build for each in group for entry, build in _judge([each], target, tools).items()}
        (each,) = group
        return {each.entry: _finish(each.candidate, each.entry, tools, BuildStatus.FAILED, str(error), each.compiled)}
    builds = {}
    for each in group:
        reason = cubin.refuse(each.machine_code, texts, each.contract, target.capability[0])
        reason = reason or spins.refuse_alone(each.compiled.waiting, each.contract)
        status = BuildStatus.REFUSED if reason else BuildStatus.BUILT
        kernels = () if reason else cubin.facts(each.machine_code, texts, each.compiled.log)
        builds[each.entry] = _finish(each.candidate, each.entry, tools, status, reason, each.compiled, kernels)
    return builds


def _finish(
    candidate: Candidate,
    entry: Path,
    tools: Toolchain,
    status: BuildStatus,
    reason: str,
    compiled: Compiled = Compiled(BuildStatus.FAILED, "not compiled"),
    kernels: tuple[KernelFacts, ...] = (),
) -> Build:
    """The candidate's record, published unless the machine may be the cause of a failure."""
    built = status is BuildStatus.BUILT
    build = Build(
        candidate_id=candidate.id,
        status=status,
        reason=reason,
        log=compiled.log[-MAX_LOG:],
        artifact=str(entry / ARTIFACT) if built else "",
        compiler=str(tools),
        sandbox=str(sandbox.kind()),
        seconds=compiled.seconds,
        kernels=kernels,
        warnings=cubin.warnings(compiled.log),
    )
    if compiled.repeatable:
        _publish(entry, build, candidate.source, compiled.cubin if built else b"")
    return build


def _publish(entry: Path, build: Build, source: str, kernel: bytes, waiting: Sequence[str] = ()) -> None:
    with scratch.folder() as work:
        (work / compile_server.SOURCE).write_text(source, errors="replace")
        if kernel:
            (work / ARTIFACT).write_bytes(kernel)
            (work / WAITING).write_text("\n".join(waiting))
        cache.publish(work, entry, build)
