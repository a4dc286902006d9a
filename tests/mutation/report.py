"""What judging the corpus and the mutants gave: figures with intervals, and tables as text."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from cuda_cheats import ACCEPTED, Cheat

from mutation.operators import GROUPS, OPERATORS

NORMAL_QUANTILE = 1.959964


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of one candidate."""

    kind: str  # cheat, original, mutant
    id: str
    source_id: str  # hash of the text that was judged
    shape: str
    status: str
    check: str  # that failed
    reason: str
    seconds: float  # of verification and timing
    group: str = ""
    operator: str = ""
    line: int = 0
    before: str = ""
    after: str = ""

    @property
    def accepted(self) -> bool:
        return self.status == ACCEPTED


@dataclass(frozen=True, slots=True)
class Tally:
    """Mutants of one operator, of one group, or of all."""

    judged: int
    killed: int
    equivalent: int

    @property
    def survived(self) -> int:
        return self.judged - self.killed - self.equivalent

    @property
    def rate(self) -> float:
        """Killed, of those that could be."""
        return self.killed / max(1, self.judged - self.equivalent)

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.killed, self.judged - self.equivalent)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a proportion; (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    z, p = NORMAL_QUANTILE, successes / trials
    middle = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return max(0.0, middle - half), min(1.0, middle + half)


def tally(mutants: Iterable[Judged], equivalent: Iterable[str]) -> Tally:
    """A mutant that was rejected is killed, also where it stands among the equivalent ones."""
    known, found = frozenset(equivalent), list(mutants)
    survivors = [mutant for mutant in found if mutant.accepted]
    return Tally(len(found), len(found) - len(survivors), sum(mutant.id in known for mutant in survivors))


def cheat_table(judged: Sequence[Judged], cheats: Sequence[Cheat]) -> str:
    """Every cheat and control: what was expected, what was found, and by which check."""
    by_name = {cheat.name: cheat for cheat in cheats}
    rows = [("candidate", "expected", "found", "check", "")]
    for item in judged:
        cheat = by_name[item.id]
        right = cheat.accepts(item.status, item.reason)
        rows.append((item.id, " ".join(sorted(cheat.expect)), item.status, item.check, "" if right else "UNEXPECTED"))
    return _table(rows)


def operator_table(judged: Sequence[Judged], equivalent: Iterable[str]) -> str:
    """Mutants by operator and by group: judged, killed, survived, equivalent, kill rate with its interval."""
    known = frozenset(equivalent)
    rows = [("operator", "judged", "killed", "survived", "equivalent", "kill rate", "95 % interval")]

    def add(name: str, mutants: list[Judged]) -> None:
        t = tally(mutants, known)
        low, high = t.interval
        counts = (str(t.judged), str(t.killed), str(t.survived), str(t.equivalent))
        rows.append((name, *counts, f"{t.rate:.1%}", f"{low:.1%} .. {high:.1%}"))

    for group in GROUPS:
        mutants = [item for item in judged if item.group == group]
        if mutants:
            for operator in OPERATORS:
                own = [item for item in mutants if item.operator == operator.name and operator.group == group]
                if own:
                    add(f"  {operator.name}", own)
            add(group, mutants)
    add("all", list(judged))
    return _table(rows)


def survivors(judged: Iterable[Judged], equivalent: Iterable[str]) -> str:
    """Mutants that were accepted and are not known to be equivalent: where to look."""
    known = frozenset(equivalent)
    lines = []
    for item in judged:
        if item.accepted and item.id not in known:
            lines += [item.id, f"  line {item.line}: {item.before}", f"        now: {item.after}"]
    return "\n".join(lines)


def summary(judged: Sequence[Judged], cheats: Sequence[Cheat], equivalent: Iterable[str]) -> dict[str, object]:
    """The figures that docs/verification.md states."""
    known = frozenset(equivalent)
    by_name = {cheat.name: cheat for cheat in cheats}
    corpus = [item for item in judged if item.kind == "cheat" and item.id in by_name]
    mutants = [item for item in judged if item.kind == "mutant"]
    bad = [item for item in corpus if not by_name[item.id].honest]
    controls = [item for item in corpus if by_name[item.id].honest]
    originals = [item for item in judged if item.kind == "original"]
    found: dict[str, object] = {
        "cheats": len(bad),
        "cheats_rejected": sum(not item.accepted for item in bad),
        "cheats_rejected_as_expected": sum(by_name[item.id].accepts(item.status, item.reason) for item in bad),
        "controls": len(controls),
        "controls_accepted": sum(item.accepted for item in controls),
        "originals": len(originals),
        "originals_accepted": sum(item.accepted for item in originals),
        "cheats_by_check": dict(Counter(item.check or item.status for item in bad).most_common()),
        "mutants_by_check": dict(
            Counter(item.check or item.status for item in mutants if not item.accepted).most_common()
        ),
    }
    for group in ("", *GROUPS):
        t = tally((item for item in mutants if group in ("", item.group)), known)
        low, high = t.interval
        rate = {"survived": t.survived, "kill_rate": t.rate, "kill_rate_low": low, "kill_rate_high": high}
        found[f"mutants_{group}" if group else "mutants"] = asdict(t) | rate
    return found


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
