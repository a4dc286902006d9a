"""The sections of one study: Tables 1 to 3, Figures 1, 3 and 4, roofline and heat map."""

from collections.abc import Callable, Sequence

from cuda_l2.records import Gemm, Interval
from cuda_l2.report.page import patterns, plots, published
from cuda_l2.report.page.parts import Cell, Figure, Part, Row, Section, Text, number, percent, table
from cuda_l2.report.page.records import Case
from cuda_l2.report.page.studies import Ratios, Spread, Study, by_size, comparisons, headline, label, ratios, spread
from cuda_l2.report.tables import PROTOCOLS
from cuda_l2.system.text import counted

LARGEST_SIDE, LARGEST_GRIDS = 20, 16
"""A heat map's most sizes of M and of N, and most sizes of K."""
FAR = 10
"""Mean speedup from which on a bar would leave no room for the others."""
STATISTICS = (
    "baseline",
    "shapes",
    "mean speedup - 1",
    "median - 1",
    "standard deviation",
    "win rate",
    "95 % above 1",
    "below 1",
)


def of(study: Study, at: int) -> list[Section]:
    """All sections of a study. at: its place among the studies."""
    name, key = f"{study.device}, {study.kind}", f"s{at}"
    return [
        Section(f"{key}-tables", f"{name}: speedups", _tables(study, key)),
        Section(f"{key}-sizes", f"{name}: by shape", _by_shape(study, key)),
        Section(f"{key}-rules", f"{name}: what the best schedules choose", _rules(study, key)),
    ]


def in_short(study: Study) -> str:
    """A study in one sentence; empty where no baseline was timed."""
    against, pairs = headline(study.main)
    if not pairs:
        return ""
    of = spread([ratio for _, ratio in pairs])
    if of.shapes == 1:
        ((case, ratio),) = pairs
        return f"{case.task}, {study.device}, {case.protocol}: {_interval(ratio).text}x as fast as {against}."
    said = (
        f"{study.device}, {study.kind}, {study.main[0].protocol}: {of.mean - 1:+.1%} mean speedup over {against},"
        f" {counted(of.shapes, 'shape')}"
    )
    if of.certain < of.shapes:
        return f"{said}."
    sure = f"faster at {of.certain_wins:.0%} of them, slower at {of.certain_losses:.0%}"
    return f"{said}; {sure}, undecided at the rest (95 % intervals)."


def source(cases: Sequence[Case]) -> str:
    """Protocol, device, dates, command and file."""
    first, dates = cases[0], sorted(case.measured_at[:10] for case in cases if case.measured_at)
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "date unknown"
    words = f" ({PROTOCOLS[first.protocol]})" if first.protocol in PROTOCOLS else ""
    protocol = f"Protocol {first.protocol}{words}"
    return f"{protocol}; {first.origin.device}; {when}; {first.origin.command}; rows of {first.origin.file}."


def _launches(cases: Sequence[Case]) -> str:
    """How the kernels that count were launched."""
    early = sum(bool(case.best and case.best.name.endswith("dependent")) for case in cases)
    if not early:
        return "Plain launches."
    return f"{early} of {len(cases)} kernels were launched as dependents of the launch before, the others plainly."


def _tables(study: Study, key: str) -> list[Part]:
    parts: list[Part] = []
    means: dict[str, dict[str, float]] = {}
    every = [case for cases in study.modes.values() for case in cases]
    alone = len(every) == len(study.modes) and len({str(case.task) for case in every}) == 1
    for mode, cases in study.modes.items():
        found = [(kind, way, ratios(cases, kind, way)) for kind, way in comparisons(cases)]
        found = [each for each in found if each[2]]
        if not found:
            parts.append(Text(f"{mode}: no baseline was timed beside our kernels."))
            continue
        for kind, way, pairs in found:
            means.setdefault(label(kind, way), {})[mode] = spread([ratio for _, ratio in pairs]).mean
        if not alone:
            parts += [_table_1(study, key, mode, cases, found), _table_2(study, key, mode, cases, found)]
    if means:
        parts.insert(0, _figure_1(study, key, means))
    parts.append(_one_shape(study, key) if alone else _table_3(study, key))
    if study.others:
        parts.append(_others(study, key))
    if study.gpu:
        parts.append(Text(f"{published.PROTOCOL} {published.WIN_RATES}"))
        claims: list[Row] = [
            (gpu, Cell(f"+{a:.1f} %", a / 100), Cell(f"+{b:.1f} %", b / 100)) for gpu, a, b in published.ELSEWHERE
        ]
        parts.append(
            table(
                *(f"{key}-elsewhere", "Published by CUDA-L2's repository over cuBLASLt-AutoTuning"),
                "Their claims of mean speedup - 1, on their GPUs and by their protocol; not measured by us.",
                *(("GPU", "offline", "server"), claims),
            )
        )
    return parts


def _one_shape(study: Study, key: str) -> Part:
    """Times of the only shape, in place of statistics over shapes."""
    rows: list[Row] = []
    for (case,) in study.modes.values():
        kernels = [(f"ours, {kernel.name}", kernel.us, None) for kernel in case.kernels]
        for name, us, ratio in (*kernels, *((rival.name, rival.us, rival.ratio) for rival in case.rivals)):
            rows.append((name, case.protocol, _interval(us), _interval(ratio) if ratio else Cell("-"), case.where))
    caption = " ".join(source(cases) for cases in study.modes.values())
    head = ("kernel", "protocol", "us [95 %]", "our speedup over it [95 %]", "row")
    return table(f"{key}-one", f"Times of {study.main[0].task}", f"{_launches(study.main)} {caption}", head, rows)


def _interval(of: Interval) -> Cell:
    """Four digits, without a power of ten."""
    rounded = Interval(*(float(f"{value:.4g}") for value in (of.estimate, of.low, of.high)))
    return Cell(rounded.text(",.15g"), of.estimate)


def _table_1(study: Study, key: str, mode: str, cases: list[Case], found: list[tuple[str, str, Ratios]]) -> Part:
    rows: list[Row] = []
    for kind, way, pairs in found:
        theirs = published.SPEEDUPS.get((kind, way, mode))
        rows.append((label(kind, way), *_cells(spread([ratio for _, ratio in pairs])), *_theirs(study, theirs)))
    layouts = (
        "NN and TN: kernel and baseline read B alike; max: our faster layout, fixed by an earlier run, against the"
        " baseline's faster one; no layout: our faster one. A row with fewer shapes is of those alone whose kernel, as"
        " selected, reads B so. "
    )
    note = (
        f"{layouts if any(way for _, way, _ in found) else ''}{_launches(cases)} A ratio is of paired rounds where the"
        " row has one, else of the two medians; 95 % intervals are counted where every shape has one."
    )
    return table(
        f"{key}-t1-{mode}", f"Table 1, {mode}: speedup over each baseline", f"{note} {source(cases)}",
        (*STATISTICS, *_head(study)), rows,
    )  # fmt: skip


def _table_2(study: Study, key: str, mode: str, cases: list[Case], found: list[tuple[str, str, Ratios]]) -> Part:
    rows: list[Row] = []
    for kind, way, pairs in found:
        alone, choice = (spread([ratio for _, ratio in pairs], floor) for floor in (0, 1))
        theirs = _theirs(study, published.CHOICE.get((kind, way, mode)))
        cells = (percent(alone.mean - 1, sign=True), percent(choice.mean - 1, sign=True))
        rows.append((label(kind, way), choice.shapes, *cells, *theirs))
    note = "The mean of max(1, speedup) over shapes: the faster of the two is used, chosen by the run that is shown."
    return table(
        f"{key}-t2-{mode}", f"Table 2, {mode}: max(ours, baseline) against the baseline", f"{note} {source(cases)}",
        ("baseline", "shapes", "ours alone, mean - 1", "max(ours, baseline), mean - 1", *_head(study)), rows,
    )  # fmt: skip


def _table_3(study: Study, key: str) -> Part:
    against, pairs = headline(study.main)
    rows: list[Row] = []
    for first, name, found in by_size(pairs):
        theirs = published.BY_SIZE.get(first, "not given") if study.gpu else ""
        rows.append((name, *_cells(spread(found)), *([theirs] if study.gpu else [])))
    if pairs:
        rows.append(("all", *_cells(spread([ratio for _, ratio in pairs])), *([""] if study.gpu else [])))
    head = ("log2(MNK)", *STATISTICS[1:], *([f"{published.PAPER}, in words"] if study.gpu else []))
    caption = f"{_launches(study.main)} Our faster layout against {against}. {source(study.main)}"
    return table(f"{key}-t3", f"Table 3, {study.main[0].protocol}: speedup by size", caption, head, rows)


def _figure_1(study: Study, key: str, means: dict[str, dict[str, float]]) -> Part:
    theirs = {f"{label(kind, way)} {mode}": value for (kind, way, mode), value in published.SPEEDUPS.items()}
    title = f"Figure 1: mean speedup over each baseline, {study.device}"
    modes = list(study.modes)[:2]
    shown = {name: {mode: of[mode] for mode in modes if of.get(mode, FAR) < FAR} for name, of in means.items()}
    rows = [(name, of) for name, of in shown.items() if of] or list(means.items())
    left = [name for name in means if name not in dict(rows)]
    beyond = f" Left out, for ours are more than {FAR}x as fast: {', '.join(left)}." if left else ""
    svg = plots.bars(f"{key}f1", title, rows, theirs if study.gpu else {})
    caption = " ".join(source(study.modes[mode]) for mode in modes)
    means_of = "The means of Table 1." if len(study.main) > 1 else ""
    diamonds = f" Diamonds: {published.PAPER}, by its own protocol." if study.gpu else ""
    return Figure(title, f"{means_of}{beyond}{diamonds} {caption}".strip(), svg)


def _others(study: Study, key: str) -> Part:
    rows: list[Row] = []
    for cases in study.others:
        against, pairs = headline(cases)
        if not pairs:
            continue
        stats = _cells(spread([ratio for _, ratio in pairs]))
        rows.append((cases[0].origin.file, cases[0].protocol, against, *stats))
    return table(
        f"{key}-others", "Other measurements of the same products", "Files with fewer shapes.",
        ("file", "protocol", "against", *STATISTICS[1:]), rows,
    )  # fmt: skip


def _by_shape(study: Study, key: str) -> list[Part]:
    against, pairs = headline(study.main)
    caption = source(study.main)
    if not pairs:
        return [Text("No baseline was timed beside our kernels, so there is no speedup by shape.")]
    parts: list[Part] = []
    sizes: tuple[tuple[str, Callable[[Gemm], float], bool], ...] = (
        ("log2(MNK)", lambda g: (g.m * g.n * g.k).bit_length() - 1, False),
        ("mean of M, N and K", lambda g: (g.m + g.n + g.k) / 3, True),
        ("largest of M, N and K", lambda g: max(g.m, g.n, g.k), True),
    )
    gemms = [(case.task, case.gemm, ratio.estimate) for case, ratio in pairs if case.gemm]
    if len(gemms) < 2:
        parts.append(Text("No Figure 3: there is one shape alone."))
    for at, (name, size, log) in enumerate(sizes if len(gemms) > 1 else ()):
        points = [plots.Point(size(gemm), value, task, f"{task}: {value:.3f}x") for task, gemm, value in gemms]
        title = f"Figure 3: speedup against {name}"
        svg = plots.scatter(f"{key}f3{at}", title, name, "speedup", points, log=log)
        parts.append(
            Figure(title, f"{_launches(study.main)} Over {against}; a mark opens its shape's card. {caption}", svg)
        )
    return [*parts, *_roofline(study, key, caption), *_heat(gemms, key, against, caption)]


def _roofline(study: Study, key: str, caption: str) -> list[Part]:
    environment = study.main[0].origin.environment
    names = ("peak_tflops", "memory_gbytes_per_s", "TFLOP/s", 1e-6) if study.gpu else (
        "peak_gflops", "read_gbytes_per_s", "GFLOP/s", 1e-3)  # fmt: skip
    peak, gbytes = (float(environment.get(name) or 0) for name in names[:2])
    if not peak or not gbytes:
        return [Text("No roofline: the results do not say the machine's measured peak and memory bandwidth.")]
    points = []
    for case in study.main:
        if case.gemm and case.best:
            reached = case.gemm.flops / case.best.us.estimate * names[3]
            said = f"{case.task}: {reached:.4g} {names[2]}"
            points.append(plots.Point(case.gemm.flops / case.gemm.bytes, reached, case.task, said))
    title = f"Roofline: {counted(len(points), 'shape')} below {peak:.4g} {names[2]} and {gbytes:.4g} GB/s"
    svg = plots.roofline(f"{key}roof", title, points, peak, gbytes, names[2])
    note = (
        f"{_launches(study.main)} Our faster layout. Marks above the slope are of operands that stay in the cache. Both"
        " ceilings were measured on this machine."
    )
    return [Figure(title, f"{note} {caption}", svg)]


def _heat(gemms: Sequence[tuple[str, Gemm, float]], key: str, against: str, caption: str) -> list[Part]:
    cells: dict[int, list[tuple[int, int, float, str]]] = {}
    for task, gemm, value in gemms:
        cells.setdefault(gemm.k, []).append((gemm.m, gemm.n, value, task))
    sides = [len({cell[at] for group in cells.values() for cell in group}) for at in (0, 1)]
    if len(gemms) < 2 or len(cells) > LARGEST_GRIDS or max(sides) > LARGEST_SIDE or len(gemms) < 3 * len(cells):
        return [Text('No heat map: the shapes form no grid of M, N and K. "All rows" has them all.')]
    parts: list[Part] = [
        Text(f"Heat map of speedups over {against}, a panel for each K; a cell opens its shape's card. {caption}")
    ]
    for k, group in sorted(cells.items()):
        title = f"K = {k}"
        parts.append(Figure(title, caption, plots.heat(f"{key}k{k}", title, group), kind="heat"))
    return parts


def _rules(study: Study, key: str) -> list[Part]:
    found = patterns.choices(study.main)
    if len(found) < patterns.LEAST:
        return [Text(f"No Figure 4: {len(found)} of the best kernels have schedules with tiles BM and BN, and stages.")]
    caption = f"The best kernels of {len(found)} shapes. {_launches(study.main)} {source(study.main)}"
    rows: list[Row] = []
    for rule in patterns.rules(found):
        claim = rule.claim
        theirs = number(claim.rho) if claim.rho else Cell("not given")
        ranks = rule.ours, rule.ours_by_rank
        ours = [Cell(rho.text(".3f"), rho.estimate) if rho else Cell("-") for rho in ranks]
        rows.append((claim.figure, claim.words, claim.theirs, theirs, *ours, rule.evidence, rule.verdict))
    paper = "the paper, A100", "its rho"
    head = ("figure", "rule of section 6", *paper, "our rho [95 %]", "by rank", "our evidence", "for or against")
    note = (
        "rho is Pearson's coefficient of the values, by rank Spearman's; the paper does not say which it gives."
        f" {patterns.JUDGED}"
    )
    parts: list[Part] = [table(f"{key}-t4", "The paper's rules and our evidence", f"{note} {caption}", head, rows)]
    for letter, x, y, pairs in (
        ("a", "M", "BM", [(c.gemm.m, c.bm) for c in found]),
        ("b", "N", "BN", [(c.gemm.n, c.bn) for c in found]),
        ("c", "K", "BK", [(c.gemm.k, c.bk) for c in found]),
        ("d", "BM", "BN", [(c.bm, c.bn) for c in found]),
    ):
        title = f"Figure 4{letter}: {y} against {x}"
        svg = plots.bubbles(f"{key}f4{letter}", title, x, y, pairs)
        parts.append(Figure(title, f"Areas are numbers of shapes. {caption}", svg))
    stages = {str(s): [c.gemm.k for c in found if c.stages == s] for s in sorted({c.stages for c in found})}
    svg = plots.boxes(f"{key}f4e", "Figure 4e: stages against K", "stages, and number of shapes", "K", stages)
    parts.append(Figure("Figure 4e: stages against K", caption, svg))
    walked = [choice for choice in found if choice.swizzle is not None]
    widths = {
        str(w or "none"): [c.gemm.m * c.gemm.n * c.gemm.k for c in walked if c.swizzle == w]
        for w in sorted({c.swizzle or 0 for c in walked})
    }
    title = "Figure 4f: block swizzle against size"
    svg = plots.boxes(f"{key}f4f", title, "tiles across a band, box or strip; number of shapes", "M N K", widths)
    parts.append(Figure(title, caption, svg))
    return [*parts, *([Text(said)] if (said := patterns.hopper(found)) else [])]


def _head(study: Study) -> tuple[str, ...]:
    return (published.PAPER,) if study.gpu else ()


def _theirs(study: Study, value: float | None) -> tuple[Cell, ...]:
    if not study.gpu:
        return ()
    return (Cell("not in its text") if value is None else Cell(f"+{value:.1f} %", value / 100),)


def _cells(of: Spread) -> tuple[int | Cell, ...]:
    known = of.certain == of.shapes
    intervals = (percent(of.certain_wins), percent(of.certain_losses)) if known else (Cell("-"), Cell("-"))
    mean, median = percent(of.mean - 1, sign=True), percent(of.median - 1, sign=True)
    return of.shapes, mean, median, number(of.deviation), percent(of.wins), *intervals
