"""Which mutants are judged: a fixed sample, spread over operators, none the same machine code as another."""

import hashlib
import itertools
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cuda_l2.contract import ContractError, parse_cuda
from cuda_l2.records import Build, BuildStatus, Gemm
from mutation.operators import GROUPS, OPERATORS
from mutation.source import Source

QUOTAS = {
    "synchronisation": 10,
    "bounds": 4,
    "accumulator": 3,
    "index": 5,
    "epilogue": 4,
    "split": 3,
    "contract": 3,
}
"""Mutants of one subject that are judged, by the operator's group."""
SURPLUS = 3
"""So many times as many are built: some do not compile, some are the same machine code as others."""
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
            digest = hashlib.sha256(f"{what}\0{places[what]}".encode()).hexdigest()[:10]
            where = f"{_slug(subject)}/{_slug(operator.name)}/{digest}"
            after = _changed_line(text, mutated, edit.start)
            found.append(Mutant(where, subject, operator.name, operator.group, source.line(edit.start), before, after, mutated))
    return found


def ordered(mutants: Iterable[Mutant], rotation: int = 0) -> dict[str, list[Mutant]]:
    """By group, operators in turn (from another one with every rotation), each one's mutants in the order of a hash."""
    queues: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for mutant in mutants:
        queues[mutant.group][mutant.operator].append(mutant)
    found = {}
    for group, operators in queues.items():
        names = list(operators)
        names = names[rotation * 3 % len(names) :] + names[: rotation * 3 % len(names)]
        for name in names:
            operators[name].sort(key=lambda mutant: hashlib.sha256(mutant.id.encode()).hexdigest())
        turns = itertools.zip_longest(*(operators[name] for name in names))
        found[group] = [mutant for turn in turns for mutant in turn if mutant is not None]
    return found


def to_build(mutants: Iterable[Mutant], rotation: int = 0, quotas: dict[str, int] = QUOTAS) -> list[Mutant]:
    """What is worth compiling to fill the quotas."""
    return [
        mutant for group, queue in ordered(mutants, rotation).items() for mutant in queue[: SURPLUS * quotas[group]]
    ]


def distinct(
    original: Build, built: Iterable[tuple[Mutant, Build]], gemm: Gemm, source: str, sms: int, quotas: dict[str, int] = QUOTAS
) -> Iterator[tuple[Mutant, Build]]:
    """Those that compile and differ from the original and from one another, up to the quotas.

    The same machine code under the same plan cannot behave otherwise: such mutants are no mutants.
    """
    seen = {fingerprint(original, source, gemm, sms)}
    taken: Counter[str] = Counter()
    for mutant, build in built:
        if build.status in (BuildStatus.FAILED, BuildStatus.TIMED_OUT) or taken[mutant.group] >= quotas[mutant.group]:
            continue
        found = fingerprint(build, mutant.source, gemm, sms)
        if found not in seen:
            seen.add(found)
            taken[mutant.group] += 1
            yield mutant, build


def fingerprint(build: Build, source: str, gemm: Gemm, sms: int) -> str:
    """Machine code and launches: what the device sees of a candidate."""
    try:
        plan = repr(parse_cuda(source).plan(gemm.m, gemm.n, gemm.k, sms))
    except ContractError as error:
        plan = str(error)
    code = Path(build.artifact).read_bytes() if build.artifact else build.reason.encode()
    return hashlib.sha256(plan.encode() + code).hexdigest()


def equivalents() -> dict[str, str]:
    """Why a mutant computes the same: reasons by id, found by reading."""
    entries = tomllib.loads(EQUIVALENT.read_text())
    for where, entry in entries.items():
        if set(entry) != {"reason"} or len(entry["reason"]) < 20:
            raise ValueError(f"{EQUIVALENT.name}: {where} needs a reason and nothing else")
    return {where: entry["reason"] for where, entry in entries.items()}


def _slug(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def _changed_line(text: str, mutated: str, start: int) -> str:
    """The line of the mutant that holds the first difference."""
    first = next((i for i, (x, y) in enumerate(zip(text, mutated, strict=False)) if x != y), start)
    begin, end = mutated.rfind("\n", 0, first) + 1, mutated.find("\n", first)
    return mutated[begin : end if end >= 0 else len(mutated)].strip()
