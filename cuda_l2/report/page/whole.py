"""The whole page: its sections in order, the rows behind them, and the HTML that holds both."""

import base64
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuda_l2.families._base import all_families
from cuda_l2.report.page import models, plots, searchers, sections
from cuda_l2.report.page.parts import Cell, Figure, Row, Section, Text, number, percent, table
from cuda_l2.report.page.records import Case, Found, Search, Training, Verification
from cuda_l2.report.page.studies import studies
from cuda_l2.report.page.templates import HERE, template
from cuda_l2.runs.results import MEASURED
from cuda_l2.system.text import counted
from cuda_l2.version import __version__

MOST_SOURCES_BYTES = 500_000
"""Kernels' texts that a page holds at most; beyond, the cards say the command that prints them."""
KNOWN_CHEATS = (
    "cheats were rejected. They are those that the project has written down, which says nothing of cheats that nobody"
    " has thought of yet: docs/verification.md lists what got through."
)
"""What the figure of cheats means."""
SEARCHES_SHOWN = 12
SMOOTHED = 8
"""Groups of a training run whose mean is one point of its curve."""


def html(found: Found, command: str, endings: Sequence[str] = ()) -> str:
    """The page of all that was read. UserError where a package is missing.

    command: what the user called. endings: how each search ended, of a page of these searches alone.
    """
    compared = studies(found.cases)
    parts = [
        *(section for at, study in enumerate(compared) for section in sections.of(study, at)),
        models.section(found.models, found.products),
        _searches(found),
        searchers.section(found.contests),
        _verification(found.verifications),
        _training(found.trainings),
        *_others(found),
    ]
    missing = [part for section in parts if section.empty for part in section.parts]
    parts = [section for section in parts if not section.empty]
    parts += [Section("missing", "Not among these results", missing)] if missing and not endings else []
    script = (HERE / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text: str = template("page.html").render(
        sections=parts,
        script=script,
        style=(HERE / "page.css").read_text(),
        digest=digest,
        data=_in_script(_data(found)),
        command=command,
        version=__version__,
        short=[*endings, *(said for study in compared if (said := sections.in_short(study)))],
        notes=found.notes,
        devices=list(dict.fromkeys(origin.device for origin in found.origins)),
        bounds=_legend(),
        rows=" and ".join(_counts(found)),
    )
    return text


def _counts(found: Found) -> list[str]:
    """What a page is made from, as in 12 rows; of archives also the trials of their searches."""
    rows = len(found.cases) + sum(len(each.rows) for each in (*found.models, *found.products))
    rows += sum(len(each.curves) * len(each.counts) for each in found.contests)
    trials = sum(len(each.rewards) for each in found.searches)
    counts = (counted(rows, "row") if rows or not trials else "", counted(trials, "trial") if trials else "")
    return [each for each in counts if each]


def _legend() -> list[tuple[int, str]]:
    """The colours of a heat map in words."""
    bounds = plots.BOUNDS
    words = [f"below {bounds[0]:g}", *(f"{a:g} to {b:g}" for a, b in itertools.pairwise(bounds))]
    return list(enumerate([*words, f"{bounds[-1]:g} and more"]))


def _data(found: Found) -> dict[str, Any]:
    """The rows behind the page, by file and protocol, and what its cards say besides."""
    groups: dict[tuple[str, str, str], list[Case]] = {}
    for case in found.cases:
        groups.setdefault((case.origin.file, case.origin.machine, case.protocol), []).append(case)
    families = {kernel.family for case in found.cases for kernel in case.kernels}
    helps = {f.name: {choice.name: choice.help for choice in f.choices} for f in all_families() if f.name in families}
    ids = {kernel.id for case in found.cases for kernel in case.kernels}
    proofs = {i: [p.where, p.verdict, p.checks, p.shapes] for i, p in found.proofs.items() if i in ids}
    texts = {case.task: case.source for case in found.cases if case.source}
    kept = texts if sum(map(len, texts.values())) <= MOST_SOURCES_BYTES else {}
    rejected = [[s.task, s.origin.file, s.origin.device, len(s.rewards), s.rejected] for s in found.searches]
    sets = [_set(cases) for cases in groups.values()]
    return {"sets": sets, "helps": helps, "proofs": proofs, "sources": kept, "searches": rejected}


def _set(cases: Sequence[Case]) -> dict[str, Any]:
    """Rows of one file and protocol, column by column; texts by their place in a list."""
    texts: dict[str, list[str]] = {}
    numbers: dict[str, list[float | None]] = {}
    rivals = list(dict.fromkeys(rival.name for case in cases for rival in case.rivals))
    for at, case in enumerate(cases):
        numbers.setdefault("row", []).append(case.row)
        words = {name: getattr(case, name) for name in ("task", "status", "reason", "proposer", "verdict", "checks")}
        words |= {"measured at": case.measured_at}
        for use, name in (("plain", case.plain), ("any launch", case.any_launch)):
            kernel = case.kernel(name)
            words |= {use: name}
            for field in ("family", "schedule", "id"):
                words[f"{use} {field}"] = str(getattr(kernel, field)) if kernel else ""
            for field in ("estimate", "low", "high"):
                for what, interval in (("us", kernel and kernel.us), ("speedup", kernel and kernel.tuned)):
                    column = f"{use} {what}" + ("" if field == "estimate" else f" {field}")
                    numbers.setdefault(column, []).append(_short(getattr(interval, field)) if interval else None)
        beside = {rival.name: rival for rival in case.rivals}
        timed = case.best is not None and case.best.us.estimate == case.ours_us  # whose ratios the row has
        for name in rivals:
            rival = beside.get(name)
            numbers.setdefault(f"{name} us", []).append(_short(rival.us.estimate) if rival else None)
            ratio = rival.ratio if rival and timed else None
            numbers.setdefault(f"{name} speedup", []).append(_short(ratio.estimate) if ratio else None)
        for name, word in words.items():
            texts.setdefault(name, [""] * at).append(word)
    columns: list[dict[str, Any]] = []
    for name, written in texts.items():
        known = {text: place for place, text in enumerate(dict.fromkeys(written))}
        if known.keys() != {""}:
            columns.append({"n": name, "t": list(known), "c": [known[text] for text in written]})
    columns += [{"n": name, "v": values} for name, values in numbers.items() if any(v is not None for v in values)]
    origin = cases[0].origin
    said = {"file": origin.file, "device": origin.device, "protocol": cases[0].protocol, "command": origin.command}
    return {**said, "source": sections.source(cases), "columns": columns}


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _in_script(data: Any) -> str:
    """JSON that may stand in a script element: nothing in it ends the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028")


def _searches(found: Found) -> Section:
    """How searches went: the best so far, and what was rejected by which check."""
    section = Section("searches", "Searches")
    if not found.searches:
        said = "No archive is among the results, so neither curves of searches nor rejected candidates are shown."
        section.parts.append(Text(said))
        return section
    longest = sorted(found.searches, key=lambda search: -len(search.rewards))[:SEARCHES_SHOWN]
    for at, search in enumerate(longest):
        title = f"Best speedup so far: {search.task}"
        svg = plots.search(f"search{at}", title, [reward or 0.0 for reward in search.rewards])
        section.parts.append(Figure(title, f"{_search_source(search)} Proposed by {', '.join(search.proposers)}.", svg))
    reasons: Counter[str] = Counter()
    for search in found.searches:
        reasons.update(search.rejected)
    if reasons:
        title = "Candidates rejected, by status and check"
        svg = plots.counts("rejected", title, "candidates", {"rejected": dict(reasons.most_common(20))})
        section.parts.append(Figure(title, f"Of all searches in {_files(found.searches)}; protocol search.", svg))
    rows: list[Row] = [
        (search.task, search.origin.device, len(search.rewards), sum(1 for reward in search.rewards if reward),
         number(max((reward or 0.0 for reward in search.rewards), default=0.0)),
         sum(search.rejected.values()),
         ", ".join(search.proposers), search.origin.file)
        for search in found.searches
    ]  # fmt: skip
    head = ("task", "device", "tried", "correct and timed", "best, as the search saw it", "rejected", "by", "file")
    caption = "Times by which a search chooses; reports of winners come from other runs."
    section.parts.append(table("searches-table", "Searches", caption, head, rows))
    rejected: list[Row] = [
        (reason, count, search.task, search.origin.device, search.origin.file)
        for search in found.searches
        for reason, count in search.rejected.items()
    ]
    if rejected:
        columns = ("reason", "candidates", "task", "device", "file")
        section.parts.append(table("rejected-table", "Rejected by reason", "The same searches.", columns, rejected))
    return section


def _search_source(search: Search) -> str:
    when = " to ".join(dict.fromkeys((search.first[:10], search.last[:10])))
    return f"Protocol search; {search.origin.device}; {when}; {search.origin.command}; trials of {search.origin.file}."


def _files(records: Sequence[Search]) -> str:
    return ", ".join(dict.fromkeys(record.origin.file for record in records))


def _verification(found: Sequence[Verification]) -> Section:
    section = Section("verification", "Cheats and mutants by check")
    if not found:
        section.parts.append(Text("No verification.json is among the results, so cheats and mutants are not shown."))
    for at, each in enumerate(found):
        by_check = {
            kind: each.figures[f"{kind}_by_check"]
            for kind in ("cheats", "mutants")
            if each.figures.get(f"{kind}_by_check")
        }
        device = each.environment.get("gpu") or each.environment.get("cpu") or "unknown machine"
        date = each.environment.get("date", "date unknown")
        caption = (
            f"Verification of the verifier; {device}; {date}; tests/verify_the_verifier.py; figures of {each.file}."
        )
        if by_check:
            title = "Cheats and mutants, by the check that rejected them"
            section.parts.append(Figure(title, caption, plots.counts(f"cheats{at}", title, "rejected", by_check)))
        rows: list[Row] = []
        for name, group in each.figures.items():
            if isinstance(group, dict) and "kill_rate" in group:
                low, high = (percent(float(group[f"kill_rate_{end}"])) for end in ("low", "high"))
                counts = (int(group[each]) for each in ("judged", "killed", "equivalent", "survived"))
                rows.append((name.replace("_", ": "), *counts, percent(float(group["kill_rate"])), low, high))
        head = ("group", "judged", "killed", "equivalent", "survived", "kill rate", "95 % low", "high")
        section.parts.append(table(f"mutants{at}", "Mutants killed", caption, head, rows))
        if "cheats" in each.figures:
            rejected, cheats = each.figures.get("cheats_rejected"), each.figures["cheats"]
            section.parts.append(Text(f"{rejected} of {cheats} {KNOWN_CHEATS} {caption}"))
    return section


def _training(found: Sequence[Training]) -> Section:
    """Learning curves: runs that differ in their seeds together."""
    section = Section("training", "Learning curves")
    if not found:
        section.parts.append(Text("No training run (the .jsonl of `cuda-l2 train`) is among the results."))
    groups: dict[str, list[Training]] = {}
    for run in found:
        groups.setdefault(re.sub(r"/seed-\d+(?=/)", "", run.file.rpartition("/")[0] + "/").rstrip("/"), []).append(run)
    for at, (folder, runs) in enumerate(groups.items()):
        for what, name in (("rewards", "mean speedup, failures as 0"), ("correct", "share of correct kernels")):
            lines = [(Path(run.file).stem, _smoothed(getattr(run, what))) for run in runs]
            title = f"{folder}: {name}"
            svg = plots.curves(f"train{at}{what}", title, f"{SMOOTHED} groups", name, lines)
            stages, about = (
                ", ".join(dict.fromkeys(getattr(run, each) for run in runs)) for each in ("title", "about")
            )
            caption = (
                f"Means of {SMOOTHED} groups of sampled kernels, a line a run. Protocol search; {about}; cuda-l2 train,"
                f" stage {stages}; groups of {', '.join(run.file for run in runs)}."
            )
            section.parts.append(Figure(title, caption, svg))
    return section


def _smoothed(values: Sequence[float]) -> list[float]:
    parts = [values[first : first + SMOOTHED] for first in range(0, len(values), SMOOTHED)]
    return [sum(part) / len(part) for part in parts]


def _others(found: Found) -> list[Section]:
    """Tasks that are no products, and what is not among the results."""
    section = Section("tasks", "Other tasks")
    rest = [case for case in found.cases if not case.gemm and case.best]
    if rest:
        rows: list[Row] = []
        for case in rest:
            best, rival = case.best, min(case.rivals, key=lambda rival: rival.us.estimate, default=None)
            against = (rival.name, number(rival.us.estimate), number(rival.us.estimate / best.us.estimate)) if (
                rival and best) else ("-", Cell("-"), Cell("-"))  # fmt: skip
            rows.append((case.task, case.protocol, number(best.us.estimate if best else None), *against, case.where))
        head = ("task", "protocol", "ours, us", "fastest baseline", "its us", "speedup", "row")
        section.parts.append(
            table("other-tasks", "Tasks that are no matrix products", sections.source(rest), head, rows)
        )
    for at, sheet in enumerate(found.sheets):
        cells: list[Row] = [tuple(_read(text) for text in row) for row in sheet.rows]
        section.parts.append(table(f"sheet{at}", "Other tasks", f"As in {sheet.file}.", sheet.columns, cells))
    if not section.parts:
        section.parts.append(Text("No tasks other than matrix products are among the results."))
    missing = [case for case in found.cases if case.status != MEASURED]
    if not missing:
        return [section]
    failed: list[Row] = [(case.task, case.protocol, case.status, case.reason, case.where) for case in missing]
    columns = ("task", "protocol", "status", "reason", "row")
    without = table("without", "Rows without figures", "As their files say.", columns, failed)
    return [section, Section("failed", "Rows without figures", [without])]


def _read(text: str) -> Cell:
    try:
        value = float(text)
    except ValueError:
        return Cell(text)
    return Cell(f"{value:.4g}", value) if math.isfinite(value) else Cell(text)
