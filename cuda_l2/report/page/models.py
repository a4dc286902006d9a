"""Products under torch: steps of a model, and single products of layers, without and with tuned kernels."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from cuda_l2.records import Gemm
from cuda_l2.report.page import plots
from cuda_l2.report.page.parts import Cell, Figure, Part, Row, Section, Text, number, percent, table
from cuda_l2.report.page.records import Compared, Origin
from cuda_l2.system.errors import UserError

STEPS = frozenset(("model", "phase", "batch", "arm", "us", "ours_us", "ratio", "ratio_low", "ratio_high"))
PRODUCTS = frozenset(("shape", "kernel", "us", "torch_us", "ratio", "low", "high"))
"""Columns of the tables of `cuda-l2 bench --model` and of `cuda-l2 library bench`."""
NUMBERS = frozenset(("us", "ours_us", "torch_us", "ratio", "ratio_low", "ratio_high", "low", "high"))


def compared(origin: Origin, date: str, rows: Sequence[Mapping[str, str]]) -> Compared:
    """A table's rows. UserError where one has no number where it must."""
    for at, row in enumerate(rows, 1):
        try:
            bad = next((name for name in NUMBERS & row.keys() if not math.isfinite(float(row[name]))), "")
            if "shape" in row:
                Gemm.parse(row["shape"])
        except (TypeError, ValueError) as error:
            raise UserError(f"{origin.file}, row {at}: {error}") from None
        if bad:
            raise UserError(f"{origin.file}, row {at}: {bad} is no number")
    return Compared(origin, date, tuple(map(dict, rows)))


def section(models: Sequence[Compared], products: Sequence[Compared]) -> Section:
    """All benchmarks of models and of their products."""
    parts: list[Part] = []
    for at, each in enumerate(models):
        parts += _steps(each, f"m{at}")
    for at, each in enumerate(products):
        parts += _products(each, f"p{at}")
    for name, found in (("a model (bench --model)", models), ("products under torch (library bench)", products)):
        parts += [] if found else [Text(f"No benchmark of {name} is among the results.")]
    return Section("models", "Models under torch", parts)


def _source(of: Compared) -> str:
    return f"{of.origin.device}; {of.date}; {of.origin.command}; rows of {of.origin.file}."


def _interval(row: Mapping[str, str], name: str, low: str, high: str) -> Cell:
    if not row.get(name):
        return Cell("-")
    value = float(row[name])
    bounds = f" [{float(row[low]):.3f}, {float(row[high]):.3f}]" if row.get(low) and row.get(high) else ""
    return Cell(f"{value:.3f}{bounds}", value)


def bars(key: str, device: str, rows: Iterable[Mapping[str, str]]) -> str:
    """Speedups of a model's steps, by arm, as a figure."""
    steps: dict[str, dict[str, float]] = {}
    for row in rows:
        name = f"{row['model']}, {row['phase']}, batch {row['batch']}"
        steps.setdefault(name, {})[row["arm"]] = float(row["ratio"])
    title = f"Steps of a model: time without over time with tuned kernels, {device}"
    return plots.bars(key, title, list(steps.items()), x="speedup - 1, %")


def _steps(of: Compared, key: str) -> list[Part]:
    rows: list[Row] = []
    for at, row in enumerate(of.rows, 1):
        rows.append(
            (row["model"], row["phase"], number(float(row["batch"]), 0), row.get("cached", ""), row["arm"],
             number(float(row["us"]), 2), number(float(row["ours_us"]), 2),
             _interval(row, "ratio", "ratio_low", "ratio_high"), row.get("bar") or "-",
             _interval(row, "over_bar", "over_bar_low", "over_bar_high"), at)
        )  # fmt: skip
    title, svg = f"Steps of a model: {of.origin.file}", bars(f"{key}bars", of.origin.device, of.rows)
    caption = f"CUDA graphs, interleaved rounds, medians; us a layer, for the head a step. {_source(of)}"
    head = (
        *("model", "phase", "batch", "cached tokens", "arm", "us", "ours, us", "speedup [95 %]"),
        *("fastest compiled arm", "that over ours [95 %]", "row"),
    )
    return [Figure(title, caption, svg), table(f"{key}-steps", title, caption, head, rows)]


def _products(of: Compared, key: str) -> list[Part]:
    points, by_rows, rows = [], dict[int, list[float]](), list[Row]()
    for at, row in enumerate(of.rows, 1):
        gemm, ratio = Gemm.parse(row["shape"]), float(row["ratio"])
        points.append(plots.Point(gemm.m, ratio, "", ""))
        by_rows.setdefault(gemm.m.bit_length() - 1, []).append(ratio)
        rows.append(
            (row["shape"], row["kernel"] or "torch's own", number(float(row["us"])), number(float(row["torch_us"])),
             _interval(row, "ratio", "low", "high"), _interval(row, "again", "again_low", "again_high"),
             _interval(row, "over_cublaslt", "over_cublaslt_low", "over_cublaslt_high"), at)
        )  # fmt: skip
    caption = f"The call of `cuda_l2.matmul` against torch.matmul on the same tensors. {_source(of)}"
    title = f"Products under torch by rows of A: {of.origin.file}"
    figure = Figure(title, caption, plots.scatter(f"{key}rows", title, "M", "speedup", points, log=True))
    sizes: list[Row] = [
        (f"{1 << size} to {(2 << size) - 1}" if size else "1", *_geometric(ratios))
        for size, ratios in sorted(by_rows.items())
    ]
    sizes.append(("all", *_geometric([float(row["ratio"]) for row in of.rows])))
    head = ("shape", "kernel", "us", "torch.matmul, us", "speedup [95 %]", "measured again", "over cuBLASLt", "row")
    return [
        figure,
        table(f"{key}-sizes", f"By rows of A: {of.origin.file}", caption,
              ("M", "shapes", "geometric mean - 1", "lowest"), sizes),
        table(f"{key}-products", f"Products: {of.origin.file}", caption, head, rows),
    ]  # fmt: skip


def _geometric(ratios: Sequence[float]) -> tuple[int, Cell, Cell]:
    return len(ratios), percent(statistics.geometric_mean(ratios) - 1, sign=True), number(min(ratios))
