"""Which mutants are judged: a fixed sample, spread over operators, none the same machine code as another."""

import bisect
import hashlib
import io
import itertools
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile

from cuda_l2.contract import ContractError, parse, plan_cuda
from cuda_l2.records import Build, BuildStatus, Task
from mutation.operators import GROUPS, OPERATORS
from mutation.source import Source
from mutation.subjects import Subject

QUOTAS = {"synchronisation": 9, "bounds": 3, "accumulator": 2, "index": 4, "epilogue": 3, "split": 2, "contract": 2}
"""Mutants of one subject that are judged, by the operator's group."""
PLAIN_QUOTAS = {
    "synchronisation": 4,
    "bounds": 7,
    "accumulator": 3,
    "index": 8,
    "epilogue": 4,
    "split": 3,
    "contract": 3,
}
"""The same where CPUs' kernels and kernels for tasks are mutated: of some groups a CPU has none."""
ELF = b"\x7fELF"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
assert set(QUOTAS) == set(GROUPS)


@dataclass(frozen=True)
class Mutant:
    """One small fault in one kernel."""

    id: str  # subject/operator/hash of what changes where
    subject: str
    operator: str
    group: str
    line: int
    before: str  # the line as it was
    after: str  # and as it is
    source: str


def enumerate_mutants(subject: str, text: str) -> list[Mutant]:
    """Every mutant of a source, in order of operators and places. Ids do not depend on line numbers."""
    source, found = Source(text), []
    seen: set[str] = set()
    for operator in OPERATORS:
        places: Counter[str] = Counter()
        for edit in operator.edits(source):
            mutated = edit.apply(text)
            if mutated == text or mutated in seen:
                continue
            seen.add(mutated)
            before = source.line_text(edit.start).strip()
            what = "\0".join([before, edit.replacement, *(part[2] for part in edit.also)])
            places[what] += 1
            where = f"{_slug(subject)}/{_slug(operator.name)}/{_digest(f'{what}{places[what]}')}"
            after = _changed_line(text, mutated, edit.start)
            found.append(
                Mutant(where, subject, operator.name, operator.group, source.line(edit.start), before, after, mutated)
            )
    return found


def ordered(mutants: Iterable[Mutant], used: Mapping[str, int]) -> dict[str, list[Mutant]]:
    """By group: operators in turn, those used least so far first, each one's mutants in the order of a hash."""
    queues: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for mutant in mutants:
        queues[mutant.group][mutant.operator].append(mutant)
    found = {}
    for group, operators in queues.items():
        names = sorted(operators, key=lambda name: (used.get(name, 0), _digest(name)))
        turns = itertools.zip_longest(*(sorted(operators[name], key=lambda m: _digest(m.id)) for name in names))
        found[group] = [mutant for turn in turns for mutant in turn if mutant is not None]
    return found


def select(
    subject: Subject,
    original: str,
    sms: int,
    build: Callable[[Sequence[str]], Iterable[Build]],
    used: Counter[str],
    quotas: Mapping[str, int] = QUOTAS,
) -> Iterator[tuple[Mutant, Build]]:
    """The subject's sample with its builds: mutants that compile and are not the same as another, up to the quotas.

    used: how many mutants of each operator other subjects have given; counts on here. The same machine code under
    the same plan cannot behave otherwise: such mutants are no mutants.
    """
    (built,) = build([original])
    if built.status is not BuildStatus.BUILT:
        raise ValueError(f"{subject.name} does not build: {built.reason}")
    queues = ordered(enumerate_mutants(subject.name, original), used)
    seen = {fingerprint(built, original, subject.task, sms)}
    missing = {group: quotas[group] for group in queues}
    while batch := [mutant for group, queue in queues.items() for mutant in queue[: 2 * missing[group]]]:
        for group, queue in queues.items():
            del queue[: 2 * missing[group]]
        for mutant, built in zip(batch, build([mutant.source for mutant in batch]), strict=True):
            if built.status in (BuildStatus.FAILED, BuildStatus.TIMED_OUT) or not missing[mutant.group]:
                continue
            found = fingerprint(built, mutant.source, subject.task, sms)
            if found not in seen:
                seen.add(found)
                missing[mutant.group] -= 1
                used[mutant.operator] += 1
                yield mutant, built


def fingerprint(build: Build, source: str, task: Task, sms: int) -> str:
    """Machine code and launches: what the device sees of a candidate. sms: a GPU's; 0 for a CPU.

    Of a GPU's machine code that of kernels which are launched.
    """
    code = Path(build.artifact).read_bytes() if build.artifact else build.reason.encode()
    try:
        plan = repr(plan_cuda(source, task, sms) if sms else parse(source))
        if sms and code.startswith(ELF):
            code = _launched(code, {launch.kernel for launch in plan_cuda(source, task, sms).launches})
    except ContractError as error:
        plan = str(error)
    return hashlib.sha256(plan.encode() + code).hexdigest()


def _launched(code: bytes, kernels: Set[str]) -> bytes:
    """Sections of a cubin that belong to these kernels, and its constants."""
    found = [
        f"{section.name} {section['sh_size']} {section['sh_info']}".encode() + section.data()
        for section in ELFFile(io.BytesIO(code)).iter_sections()
        if section.name.rpartition(".")[2] in kernels or section.name == ".nv.constant3"
    ]
    return b"".join(found)


def equivalents() -> dict[str, str]:
    """Why a mutant computes the same: reasons by id, found by reading."""
    entries = tomllib.loads(EQUIVALENT.read_text())
    for where, entry in entries.items():
        if set(entry) != {"reason"} or len(entry["reason"]) < 20:
            raise ValueError(f"{EQUIVALENT.name}: {where} needs a reason and nothing else")
    return {where: entry["reason"] for where, entry in entries.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _slug(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def _changed_line(text: str, mutated: str, start: int) -> str:
    """The line of the mutant that holds the first difference."""
    common = min(len(text), len(mutated))
    first = bisect.bisect_left(range(common), True, key=lambda i: text[: i + 1] != mutated[: i + 1])
    first = first if first < common else start
    begin, end = mutated.rfind("\n", 0, first) + 1, mutated.find("\n", first)
    return mutated[begin : end if end >= 0 else len(mutated)].strip()
