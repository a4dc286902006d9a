"""A benchmark's results as tables for programs: one row a shape and protocol, as CSV and as Parquet.

Every row stands alone: the shape, every arm's time, ratios with their 95 % intervals, what the kernel and the baselines
were, the conditions, and the environment.
"""

import csv
import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuda_l2.measure.rounds import CANDIDATE
from cuda_l2.records import Arm, Timing
from cuda_l2.report import library
from cuda_l2.report.arms import Row, arms_of, cell, fastest, interval_cells, same_layout
from cuda_l2.runs.grid import log2_mnk
from cuda_l2.runs.results import CSV, ENVIRONMENT, PARQUET, RESULTS, Header, Measurement
from cuda_l2.system.files import whole, write_text

OURS = "ours"
KEPT = f"what was measured is kept in {RESULTS}"
ALGORITHM = ("id", "tile", "stages", "split_k", "reduction", "workspace_bytes", "regret")
"""What a row holds of a cuBLASLt algorithm."""
SEARCHED = ("cluster", "custom_option", "swizzle", "inner_shape", "returned", "tried", "valid", "wrong")
"""What it holds further of one that a search among configurations found."""
CONDITIONS = ("sm_mhz", "memory_mhz", "power_w", "temperature_c", "clock_spread_of_arms", "drifted")


def rows(header: Header, measurements: Sequence[Measurement]) -> list[Row]:
    """One row a shape and protocol, small shapes first; all rows have the same columns in the same order."""
    ordered = sorted(measurements, key=lambda m: (m.gemm.flops, m.gemm, m.protocol))
    partial = [_row(measurement) for measurement in ordered]
    environment: Row = {f"env_{name}": cell(value) for name, value in header.environment.items()}
    groups: dict[str, list[str]] = {}  # columns of one arm stay together, whatever row they come from
    for row in partial:
        for name in row:
            names = groups.setdefault(name.split(".")[0], [])
            if name not in names:
                names.append(name)
    columns = [name for names in groups.values() for name in names]
    return [
        {name.replace(".", "_"): row.get(name) for name in columns} | {"machine": header.machine} | environment
        for row in partial
    ]


def write_tables(folder: Path, header: Header, measurements: Sequence[Measurement]) -> str:
    """Write table.csv, environment.json, and table.parquet; what is missing and how to get it, empty if nothing is."""
    table = rows(header, measurements)
    columns = list(table[0]) if table else []
    shared = {"machine": header.machine, "environment": header.environment, "settings": header.settings}
    with whole(folder / CSV, KEPT) as path, path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(table)
    write_text(folder / ENVIRONMENT, json.dumps(shared, indent=1) + "\n", KEPT)
    if not importlib.util.find_spec("pyarrow"):
        return f"{PARQUET} is not written: pip install pyarrow, then run the same command again"
    _write_parquet(folder / PARQUET, table, columns, json.dumps(shared))
    return ""


def load() -> None:
    """Import what Parquet files are written with, where it is installed."""
    if importlib.util.find_spec("pyarrow"):
        from pyarrow import array, parquet  # noqa: F401, PLC0415 - optional

        array([0.0])  # imports pandas, where that is installed


def column(arm: str) -> str:
    """An arm's name as a column's: cublaslt_autotuning_nn."""
    return re.sub(r"[^a-z0-9]+", "_", arm.lower()).strip("_")


def _row(measurement: Measurement) -> Row:
    """The cells of one measurement; a dot in a name separates an arm from what is told of it."""
    gemm, timing, verdict = measurement.gemm, measurement.timing, measurement.verdict
    row: Row = {
        "m": gemm.m,
        "n": gemm.n,
        "k": gemm.k,
        "layout": str(gemm.layout),
        "accumulate": str(gemm.accumulate),
        "dtype": gemm.dtype,
        "log2_mnk": log2_mnk(gemm),
        "protocol": measurement.protocol,
        "status": measurement.status,
        "reason": measurement.reason,
        "kernel": measurement.kernel,
        "family": measurement.family,
        "schedule": " ".join(f"{name}={value}" for name, value in measurement.schedule),
        "proposer": measurement.proposer,
        "verdict": str(verdict.status) if verdict else "",
        "checks_passed": " ".join(verdict.passed) if verdict else "",
    }
    if timing and timing.candidate and timing.speedup:
        ours, arms = timing.candidate.name == CANDIDATE, arms_of(timing)
        row |= _arm(timing.candidate, OURS) if ours else {}
        row |= {
            "strongest": timing.reference if ours else fastest(arms, same_layout(arms, gemm) or arms),
            **interval_cells("speedup", timing.speedup if ours else None),  # over the strongest
            "ratio_to": OURS if ours else timing.candidate.name,  # whose time the arms' ratios are divided by
        }
        for name, arm in arms.items():
            row |= _arm(arm, column(name))
            row |= interval_cells(f"{column(name)}.ratio", dict(timing.speedups).get(name))
            row |= _described(f"{column(name)}.", measurement.arms.get(name, {}))
        for first, second, ratio in timing.among:
            row |= interval_cells(f"{column(first)}.over_{column(second)}", ratio)
        row |= _conditions(timing)
    row |= library.cells(measurement)
    return row | {"measured_at": measurement.created, "seconds": cell(measurement.seconds)}


def _arm(arm: Arm, name: str) -> Row:
    return {
        **interval_cells(f"{name}.us", arm.latency_us),
        f"{name}.rounds": arm.rounds,
        f"{name}.launches": arm.launches,
    }


def _described(prefix: str, described: dict[str, Any]) -> Row:
    """What a baseline ran: cuBLASLt's algorithm, the kernels."""
    names = (*ALGORITHM, *SEARCHED) if "tried" in described else ALGORITHM
    row = {f"{prefix}{name}": cell(described[name]) for name in names if name in described}
    if "kernels" in described:
        row[f"{prefix}kernels"] = " + ".join(described["kernels"])
    return row


def _conditions(timing: Timing) -> Row:
    conditions = timing.conditions
    row: Row = {"empty_call_us": cell(timing.empty_call_us)}
    found = {name: getattr(conditions, name) for name in CONDITIONS}
    row |= {name: cell(value) for name, value in found.items() if value not in (None, "")}
    if conditions.sm_mhz_range:
        row["sm_mhz_low"], row["sm_mhz_high"] = conditions.sm_mhz_range
    if conditions.limited_by is not None:
        row["limited_by"] = " ".join(name.replace(" ", "-") for name in conditions.limited_by)
    for name, empty_us in conditions.empty_us.items():
        row[f"empty_kernel_us_{OURS if name == CANDIDATE else column(name)}"] = cell(empty_us)
    for name, host_us in conditions.host_call_to_done_us.items():
        row[f"{OURS if name == CANDIDATE else column(name)}.host_us"] = cell(host_us)
    return row


def _write_parquet(path: Path, table: Sequence[Row], columns: Sequence[str], shared: str) -> None:
    import pyarrow as pa  # noqa: PLC0415 - optional
    from pyarrow import parquet  # noqa: PLC0415

    arrays = {}
    for name in columns:
        # CSV knows no difference between an empty text and none
        values = [None if row[name] == "" else row[name] for row in table]
        kinds = {type(value) for value in values if value is not None}
        kind = pa.string() if str in kinds else pa.int64() if kinds == {int} else pa.float64()
        arrays[name] = pa.array([str(v) if v is not None and str in kinds else v for v in values], kind)
    with whole(path, KEPT) as partial:
        parquet.write_table(pa.table(arrays).replace_schema_metadata({"cuda_l2": shared}), partial)
