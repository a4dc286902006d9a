"""Rows of a benchmark's table and trials as cases."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cuda_l2 import contract
from cuda_l2.measure.baselines._base import all_baselines
from cuda_l2.records import Accumulate, Gemm, Interval, Layout, Trial, to_json
from cuda_l2.report.grid import OURS, column
from cuda_l2.report.page.records import Case, Kernel, Origin, Rival
from cuda_l2.report.tables import launches_early
from cuda_l2.system.errors import UserError

NEEDED = frozenset(("m", "n", "k", "layout", "protocol", "status"))
"""Columns without which a table is not one of a benchmark."""
LIBRARY_KERNEL = re.compile(r"(nn|tn)_(plain|dependent)_us")


def cases(origin: Origin, table: Sequence[Mapping[str, Any]]) -> list[Case]:
    """A case for each row, in their order."""
    names = dict.fromkeys(name.replace(".", "_") for row in table for name in row)
    arms = [name.removesuffix("_rounds") for name in names if name.endswith("_rounds") and name != f"{OURS}_rounds"]
    named = [match[0].removesuffix("_us") for name in names if (match := LIBRARY_KERNEL.fullmatch(name))]
    written = {column(name): name for name in all_baselines()}
    known = [rival_name(written.get(arm, arm)) for arm in arms]
    found = []
    for number, raw in enumerate(table, 1):
        row = {name.replace(".", "_"): value for name, value in raw.items()}
        try:
            gemm = _gemm(row)
        except (UserError, ValueError, TypeError) as error:
            raise UserError(f"{origin.file}, row {number}: {error}") from None
        rivals = tuple(
            Rival(*name, us, _interval(row, f"{arm}_ratio"))
            for arm, name in zip(arms, known, strict=True)
            if (us := _interval(row, f"{arm}_us"))
        )
        kernels = _kernels(row, named, gemm)
        first = kernels[0].name if kernels else ""
        found.append(
            Case(
                *(origin, number, str(gemm), gemm, _text(row, "protocol"), _text(row, "status"), _text(row, "reason")),
                kernels=kernels,
                rivals=rivals,
                ours_us=_number(row.get(f"{OURS}_us")) or math.nan,
                plain=_text(row, "plain_kernel") or first,
                any_launch=_text(row, "any_launch_kernel") or first,
                proposer=_text(row, "proposer"),
                verdict=_text(row, "verdict"),
                checks=_text(row, "checks_passed"),
                measured_at=_text(row, "measured_at"),
            )
        )
    return found


def of_trial(origin: Origin, number: int, trial: Trial) -> Case:
    """The case of a measured trial."""
    gemm = trial.task if isinstance(trial.task, Gemm) else None
    plain = json.loads(to_json(trial), parse_constant=lambda name: None)
    source = trial.candidate.source
    early = contract.states_contract(source) and launches_early(trial.candidate)
    return trial_case(origin, number, str(trial.task), plain, gemm, early=early)


def trial_case(
    origin: Origin, number: int, task: str, trial: Mapping[str, Any], gemm: Gemm | None = None, *, early: bool = False
) -> Case:
    """The case of a trial as JSON has it. KeyError, TypeError and ValueError where it is none.

    early: whether the kernel is launched as a dependent, where its schedule does not say it.
    """
    if gemm is None and re.match(r"\d+x\d+x\d+", task):
        gemm = Gemm.parse(task)
    timing, candidate, verdict = trial["timing"], trial["candidate"], trial.get("verdict") or {}
    ratios = {name: _stored(value) for name, value in timing["speedups"]}
    schedule = " ".join(f"{name}={value}" for name, value in candidate.get("schedule", ()))
    kernel = Kernel(
        *(_name(gemm, schedule, early) if gemm else OURS, str(gemm.layout) if gemm else ""),
        _stored(timing["candidate"]["latency_us"]),
        *(candidate.get("family", ""), schedule, trial["build"].get("candidate_id", "")),
    )
    rivals = tuple(
        Rival(*rival_name(arm["name"]), _stored(arm["latency_us"]), ratios.get(arm["name"]))
        for arm in timing["baselines"]
    )
    return Case(
        *(origin, number, task, gemm, str(trial["protocol"]), timing["status"]),
        kernels=(kernel,),
        rivals=rivals,
        ours_us=kernel.us.estimate,
        plain=kernel.name,
        any_launch=kernel.name,
        proposer=candidate.get("proposer", ""),
        verdict=verdict.get("status", ""),
        checks="; ".join(verdict.get("passed", ())),
        measured_at=trial.get("created", ""),
        source=candidate.get("source", ""),
    )


def rival_name(name: str) -> tuple[str, str, str]:
    """A baseline's name, kind and layout; of one that this version does not have, as far as its name tells."""
    baseline = all_baselines().get(name)
    if baseline:
        return name, baseline.kind, str(baseline.layout or "")
    layout = name[-2:].lower() if re.search(r"[ _](nn|tn)$", name, re.I) else ""
    return name, name[:-3] if layout else name, layout


def _kernels(row: Mapping[str, Any], names: Iterable[str], gemm: Gemm) -> tuple[Kernel, ...]:
    """Those that a library has for the shape, or the one that a search found."""
    found = [
        Kernel(
            *(name.replace("_", " "), name[:2], us, _text(row, f"{name}_family"), _text(row, f"{name}_schedule")),
            id=_text(row, f"{name}_kernel"),
            tuned=_interval(row, f"{name}_speedup"),
            tuned_alike=_interval(row, f"{name}_speedup_same_layout"),
        )
        for name in names
        if (us := _interval(row, f"{name}_us"))
    ]
    if not found and (us := _interval(row, f"{OURS}_us")):
        words = _text(row, "family"), _text(row, "schedule"), _text(row, "kernel")
        found = [Kernel(_name(gemm, words[1]), str(gemm.layout), us, *words)]
    return tuple(found)


def _name(gemm: Gemm, schedule: str, early: bool = False) -> str:
    """Layout and launch of a kernel that is alone in its row."""
    return f"{gemm.layout} {'dependent' if early or 'EDGE=1' in schedule.split() else 'plain'}"


def _gemm(row: Mapping[str, Any]) -> Gemm:
    """The product of a row; tables of earlier versions have no column dtype."""
    layout, accumulate = Layout(_text(row, "layout")), Accumulate(_text(row, "accumulate") or "fp32")
    return Gemm(int(row["m"]), int(row["n"]), int(row["k"]), layout, accumulate, _text(row, "dtype") or "float16")


def _text(row: Mapping[str, Any], name: str) -> str:
    return str(row.get(name) or "")


def _interval(row: Mapping[str, Any], name: str) -> Interval | None:
    estimate = _number(row.get(name))
    if estimate is None:
        return None
    low, high = _number(row.get(f"{name}_low")), _number(row.get(f"{name}_high"))
    return Interval(estimate, -math.inf if low is None else low, math.inf if high is None else high)


def _number(value: Any) -> float | None:
    if value is None or value == "":
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _stored(value: Mapping[str, Any]) -> Interval:
    """An interval as JSON has it: no number stands for an infinite one."""
    low, high = value.get("low"), value.get("high")
    return Interval(float(value["estimate"]), -math.inf if low is None else low, math.inf if high is None else high)
