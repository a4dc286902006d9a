"""Figures as SVG: drawn by matplotlib, then made to follow the page's colours, light and dark."""

import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from cuda_l2.system.files import imported

WIDTH, HEIGHT = 4.4, 3.3  # inches: a phone's width at its text's size
INK, LINE = "#010203", "#010204"
SERIES = tuple(f"#0102a{number}" for number in range(4))
HEAT = tuple(f"#0102b{number}" for number in range(9))
"""Stand for the page's variables: matplotlib takes colours, not variables."""
LINES, MARKS = ("-", "--", ":", "-."), ("o", "s", "^", "D")
"""Styles of lines, which tell those of one colour from each other, and marks, for who sees no colours."""
BOUNDS = (0.8, 0.9, 0.97, 1.03, 1.1, 1.25, 1.5, 2.0)
"""Speedups between the colours of a heat map."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cuda-l2",
    "font.family": "sans-serif",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "axes.unicode_minus": False,
}


@dataclass(frozen=True)
class Point:
    """One mark: its place, and the shape whose card it opens; empty for one that has none."""

    x: float
    y: float
    shape: str
    said: str


class Canvas:
    """One figure with one pair of axes."""

    def __init__(self, x: str, y: str, width: float = WIDTH, height: float = HEIGHT) -> None:
        self._matplotlib = imported("matplotlib", "a report needs", "report")
        self._points: dict[str, str] = {}
        with self._matplotlib.rc_context(STYLE):
            figure = imported("matplotlib.figure", "a report needs", "report").Figure
            self.figure = figure(figsize=(width, height), layout="constrained")
            self.axes = self.figure.add_subplot(xlabel=x, ylabel=y)

    def log(self, axis: str, base: int, ticks: Sequence[float]) -> None:
        """A logarithmic axis, 'x' or 'y', with plain numbers at these places."""
        ticker = imported("matplotlib.ticker", "a report needs", "report")
        getattr(self.axes, f"set_{axis}scale")("log", base=base)
        one = getattr(self.axes, f"{axis}axis")
        one.set_major_locator(ticker.FixedLocator(list(ticks)))
        one.set_major_formatter(
            ticker.FuncFormatter(lambda value, _: f"{value:g}" if value < 1e6 else f"2^{np.log2(value):g}")
        )
        one.set_minor_locator(ticker.NullLocator())

    def marks(self, points: Sequence[Point], colours: Any = SERIES[0], size: float = 0, marker: str = "o") -> None:
        """Marks that open their shapes' cards, where they name one."""
        xs, ys = [point.x for point in points], [point.y for point in points]
        size = size or (6 if len(points) > 200 else 20)
        drawn = self.axes.scatter(xs, ys, s=size, c=colours, marker=marker, linewidths=0, clip_on=False)
        if points and points[0].shape:
            drawn.set_urls([f"#{point.shape}" for point in points])
            self._points |= {point.shape: point.said for point in points}

    def legend(self, **where: Any) -> None:
        """Names of what is drawn. where: outside of the axes, else where there is room."""
        handles, names = self.axes.get_legend_handles_labels()
        of = self.figure if where else self.axes
        of.legend(handles, names, fontsize=8, frameon=False, labelcolor=INK, **where)

    def svg(self, key: str, title: str) -> str:
        """The figure to stand in a page. key: of the page's figures, unique."""
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        with self._matplotlib.rc_context(STYLE):
            self.figure.savefig(file, format="svg", metadata=nothing, transparent=True)
        return _inline(file.getvalue(), key, title, self._points)


def _inline(text: str, key: str, title: str, said: Mapping[str, str]) -> str:
    """An SVG file's text as an element: no addresses, ids of its own, the page's colours, short numbers."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.S)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"| version="1.1"| (?:width|height)="[\d.]+pt"', "", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d+\.\d)\d+", r"\1", tag[0]), text)
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'<use xlink:href="#([^"]+)"', text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{key}-{m[1]}"' if m[1] in used else "", text)
    text = text.replace("url(#", f"url(#{key}-").replace('<use xlink:href="#', f'<use href="#{key}-')

    def link(match: re.Match[str]) -> str:
        shape = match[1]
        return f'<a href="#{escape(shape)}" tabindex="-1"><title>{escape(said.get(shape, shape))}</title>'

    text = re.sub(r'<a xlink:href="#([^"]*)"[^>]*>', link, text)
    text = text.replace(INK, "currentColor").replace(LINE, "var(--line)")
    for number, colour in enumerate(SERIES):
        text = text.replace(colour, f"var(--s{number})")
    for number, colour in enumerate(HEAT):
        text = text.replace(colour, f"var(--h{number})")
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    while (
        bare := re.sub(r"<g>((?:(?!<g[ >]|</g>).)*)</g>", r"\1", text, flags=re.S)
    ) != text:  # groups that group nothing
        text = bare
    styles = Counter(re.findall(r' style="([^"]*)"', text))
    often = [style for style, count in styles.items() if count > 9]
    for number, style in enumerate(often):
        text = text.replace(f' style="{style}"', f' class="{key}-{number}"')
    rules = "".join(f".{key}-{number}{{{style}}}" for number, style in enumerate(often))
    text = re.sub(r"(<svg[^>]*>)", lambda m: f"{m[1]}<style>{rules}</style>", text, count=1) if rules else text
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def bars(
    key: str,
    title: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    theirs: Mapping[str, float] = {},
    x: str = "mean speedup - 1, %",
) -> str:
    """Speedups - 1 in percent by name and mode, and what the paper gives for the same as diamonds.

    theirs: by label and mode, as in 'cuBLAS NN offline'.
    """
    modes = list(dict.fromkeys(mode for _, values in rows for mode in values))
    canvas = Canvas(x, "", height=0.9 + 0.2 * len(rows) * (len(modes) + 0.5))
    axes, thick = canvas.axes, 0.8 / max(1, len(modes))
    paper: list[tuple[float, float]] = []
    for number, mode in enumerate(modes):
        at = [row + (number - (len(modes) - 1) / 2) * thick for row in range(len(rows))]
        pairs = [(y, values[mode]) for y, (_, values) in zip(at, rows, strict=True) if mode in values]
        axes.barh([y for y, _ in pairs], [100 * (x - 1) for _, x in pairs], thick, color=SERIES[number], label=mode)
        paper += [
            (theirs[f"{name} {mode}"], y) for y, (name, _) in zip(at, rows, strict=True) if f"{name} {mode}" in theirs
        ]
    if paper:
        style = {"marker": "D", "facecolors": "none", "edgecolors": INK, "linewidths": 0.9}
        axes.scatter(*zip(*paper, strict=True), s=16, label="paper, A100", zorder=3, **style)
    axes.set_yticks(range(len(rows)), [_text(name) for name, _ in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    canvas.legend(loc="outside lower center", ncols=4)
    return canvas.svg(key, title)


def scatter(key: str, title: str, x: str, y: str, points: Sequence[Point], *, log: bool, height: float = HEIGHT) -> str:
    """Speedups against a size with the mean of every octave. height: in inches."""
    canvas = Canvas(x, y, height=height)
    canvas.axes.axhline(1, color=INK, linewidth=0.8)
    canvas.marks(points)
    octaves: dict[int, list[Point]] = {}
    for point in points:
        octaves.setdefault(int(np.log2(point.x) if log else point.x), []).append(point)
    means = [
        (np.mean([point.x for point in group]), np.mean([point.y for point in group]))
        for _, group in sorted(octaves.items())
    ]
    canvas.axes.plot(*zip(*means, strict=True), color=SERIES[1], linewidth=1.6, label="mean of an octave")
    if log:
        canvas.log("x", 2, _octaves([point.x for point in points]))
    canvas.legend()
    return canvas.svg(key, title)


def roofline(key: str, title: str, points: Sequence[Point], peak: float, gbytes_per_s: float, unit: str) -> str:
    """Throughput over FLOP a byte below the ceilings. peak in the unit, as a thousandth of gbytes_per_s scales it."""
    canvas = Canvas("FLOP a byte of A, B and C", unit)
    per_byte = gbytes_per_s / (1000 if unit == "TFLOP/s" else 1)
    xs = [point.x for point in points]
    ridge = peak / per_byte
    line = sorted({min([*xs, ridge]) * 0.8, ridge, max([*xs, ridge]) * 1.2})
    canvas.axes.plot(line, [min(peak, x * per_byte) for x in line], color=SERIES[1], linewidth=1.4)
    canvas.marks(points)
    canvas.log("x", 2, _octaves(xs, 2))
    ys = [peak, *(point.y for point in points)]
    decades = range(int(np.floor(np.log10(min(ys)))), int(np.ceil(np.log10(max(ys)))) + 1)
    if len(decades) > 3:
        canvas.log("y", 10, [10.0**power for power in decades])
    else:
        canvas.log("y", 2, _octaves(ys))
        canvas.axes.set_ylim(_octaves(ys)[0], 1.1 * max(ys))
    return canvas.svg(key, title)


def heat(key: str, title: str, points: Sequence[tuple[int, int, float, str]]) -> str:
    """One K of a grid: M down, N across, coloured by speedup. points: m, n, speedup, shape."""
    ms, ns = sorted({m for m, _, _, _ in points}), sorted({n for _, n, _, _ in points})
    canvas = Canvas("N", "M", 2.6, 2.5)
    cells = [Point(ns.index(n), ms.index(m), shape, f"{shape}: {value:.3f}x") for m, n, value, shape in points]
    classes = np.searchsorted(BOUNDS, [value for _, _, value, _ in points], side="right")
    size = (1.75 * 72 / max(len(ms), len(ns))) ** 2 * 0.8
    canvas.marks(cells, [HEAT[number] for number in classes], size, "s")
    canvas.axes.set_xticks(range(len(ns)), ns, rotation=90, fontsize=7)
    canvas.axes.set_yticks(range(len(ms)), ms, fontsize=7)
    canvas.axes.set_xlim(-0.6, len(ns) - 0.4)
    canvas.axes.set_ylim(len(ms) - 0.4, -0.6)
    canvas.axes.grid(visible=False)
    return canvas.svg(key, title)


def bubbles(key: str, title: str, x: str, y: str, pairs: Sequence[tuple[float, float]]) -> str:
    """How often each pair occurs, and the mean of y for each x; both axes in octaves."""
    places, counts = np.unique(np.asarray(pairs, float), axis=0, return_counts=True)
    canvas = Canvas(x, y)
    canvas.axes.scatter(places[:, 0], places[:, 1], s=160 * counts / counts.max(), c=SERIES[0], linewidths=0)
    xs = np.unique(places[:, 0])
    means = [np.mean([b for a, b in pairs if a == at]) for at in xs]
    canvas.axes.plot(xs, means, color=SERIES[1], marker="o", markersize=3, linewidth=1.4, label="mean")
    for axis, column in (("x", 0), ("y", 1)):
        canvas.log(axis, 2, _octaves(places[:, column].tolist()))
    canvas.axes.margins(0.12)
    canvas.legend()
    return canvas.svg(key, title)


def boxes(key: str, title: str, x: str, y: str, groups: Mapping[str, Sequence[float]]) -> str:
    """Sizes for every value of a choice: median, quartiles, whiskers to 1.5 times the distance of the quartiles."""
    canvas = Canvas(x, y)
    ink = {"color": INK, "linewidth": 0.9}
    canvas.axes.boxplot(
        list(groups.values()), patch_artist=True, flierprops={"marker": ".", "markersize": 2, "markerfacecolor": INK},
        boxprops={"facecolor": SERIES[0], "edgecolor": INK, "linewidth": 0.9},
        medianprops={"color": SERIES[1], "linewidth": 1.8}, whiskerprops=ink, capprops=ink,
    )  # fmt: skip
    canvas.axes.set_xticks(range(1, len(groups) + 1), [f"{name}\n{len(values)}" for name, values in groups.items()])
    canvas.axes.tick_params(axis="x", labelsize=8)
    canvas.log("y", 2, _octaves([value for values in groups.values() for value in values]))
    canvas.axes.grid(visible=False, axis="x")
    return canvas.svg(key, title)


def curves(
    key: str,
    title: str,
    x: str,
    y: str,
    series: Sequence[tuple[str, Sequence[float]]],
    start: int = 1,
    joined: bool = True,
) -> str:
    """Lines over their positions, by name; lines of one name share a colour.

    start: position of the first value. joined: else marks, for values that do not follow from one another.
    """
    canvas = Canvas(x, y)
    names = list(dict.fromkeys(name for name, _ in series))
    for name, values in series:
        number = names.index(name)
        first = not any(line.get_label() == name for line in canvas.axes.lines)
        style: dict[str, Any] = {
            "color": SERIES[number % 4],
            "linestyle": LINES[number // 4 % 4 if len(names) > 4 else number % 4],
        }
        style = style if joined else {"color": SERIES[0], "linestyle": "", "marker": ".", "markersize": 4}
        at, shown = range(start, start + len(values)), _text(name) if first else "_"
        canvas.axes.plot(at, values, linewidth=1.3, label=shown, **style)
    _whole_numbers(canvas)
    if len(names) > 1:
        canvas.legend()
    return canvas.svg(key, title)


def regrets(key: str, title: str, counts: Sequence[int], series: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Regrets by searcher after these numbers of measurements, as shares above 0; both axes are logarithmic."""
    canvas = Canvas("measurements", "median regret, %", height=HEIGHT + 0.17 * len(series))
    for number, (name, values) in enumerate(series):
        style = {"color": SERIES[number % 4], "linestyle": LINES[number // 4 % 4], "marker": MARKS[number % 4]}
        shares = [100 * value for value in values]
        canvas.axes.plot(counts, shares, linewidth=1.3, markersize=3, label=_text(name), **style)
    lowest, highest = (100 * of(value for _, values in series for value in values) for of in (min, max))
    canvas.log("x", 2, [count for count in counts if not count & (count - 1)])
    decades = range(int(np.floor(np.log10(lowest))), int(np.ceil(np.log10(highest))) + 1)
    canvas.log("y", 10, [10.0**power for power in decades])
    canvas.legend(loc="outside lower center", ncols=2)
    return canvas.svg(key, title)


def search(key: str, title: str, speedups: Sequence[float], start: int = 1) -> str:
    """Speedups of candidates in the order tried as marks, 0 left out, and the best so far as a line.

    start: number of the first.
    """
    canvas, best = Canvas("candidate", "speedup"), np.maximum.accumulate(np.asarray(speedups, float))
    at = range(start, start + len(speedups))
    canvas.axes.step(at, best, where="post", color=SERIES[0], linewidth=1.6, label="best so far")
    marks = [value or np.nan for value in speedups]
    canvas.axes.scatter(at, marks, s=7, c=SERIES[1], linewidths=0, label="correct and timed", zorder=3)
    canvas.axes.set_xlim(start - 0.5, start + len(speedups) - 0.5)
    canvas.axes.set_ylim(bottom=0)
    _whole_numbers(canvas)
    canvas.legend()
    return canvas.svg(key, title)


def counts(key: str, title: str, x: str, series: Mapping[str, Mapping[str, int]]) -> str:
    """Bars of counts by name, one colour a series."""
    names = list(dict.fromkeys(name for values in series.values() for name in values))
    canvas = Canvas(x, "", height=0.9 + 0.17 * len(names) * max(1, len(series)))
    thick = 0.8 / max(1, len(series))
    for number, (kind, values) in enumerate(series.items()):
        at = [row + (number - (len(series) - 1) / 2) * thick for row in range(len(names))]
        drawn = canvas.axes.barh(at, [values.get(name, 0) for name in names], thick, color=SERIES[number], label=kind)
        canvas.axes.bar_label(drawn, [str(values.get(name) or "") for name in names], fontsize=7, padding=2, color=INK)
    canvas.axes.set_yticks(range(len(names)), [_text(name) for name in names])
    canvas.axes.invert_yaxis()
    canvas.axes.grid(visible=False, axis="y")
    if len(series) > 1:
        canvas.legend()
    return canvas.svg(key, title)


def _whole_numbers(canvas: Canvas) -> None:
    """Ticks of x."""
    ticker = imported("matplotlib.ticker", "a report needs", "report")
    canvas.axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))


def _octaves(values: Sequence[float], step: int = 1) -> list[float]:
    """Powers of two that span positive values, at most eight of them."""
    low, high = int(np.floor(np.log2(min(values)))), int(np.ceil(np.log2(max(values))))
    step = max(step, -(-(high - low + 1) // 8))
    return [2.0**power for power in range(low, high + 1, step)]


def _text(name: str) -> str:
    """A name that matplotlib shall not read as mathematics."""
    return name.replace("$", r"\$")
