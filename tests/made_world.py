"""Worlds made by a formula: no machine, no clock."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cuda_l2.families._base import Schedule
from cuda_l2.machine.cpu.target import CpuTarget
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Gemm, Task
from cuda_l2.runs.recording import pool, schedules_for
from cuda_l2.worlds.rows import Row
from cuda_l2.worlds.world import Head, World, space_of, target_fields, write

TARGET = CpuTarget("Made", 4, 512, (32768, 1 << 20, 32 << 20), "cc", "cc 1.0")
SHAPES = (
    "64x64x64",
    "128x64x64",
    "64x128x256",
    "256x128x64",
    "256x256x256",
    "512x128x128",
    "128x512x128",
    "32x256x512",
)
BASE_US = 100.0


def made_us(schedule: Schedule) -> float:
    """Fast where the tile's area suits the shape and all threads work; a little noise that is always the same."""
    gemm, chosen = schedule.task, schedule.named
    if schedule.family.name != "cpu_gemm":
        return 100 + zlib.crc32(f"{gemm} {schedule.values}".encode()) % 1000
    wanted = math.log2(gemm.m * gemm.n) / 4
    tile = math.log2(chosen["MR"] * chosen["NV"])
    slow = 0.3 * abs(tile - wanted) + 0.2 * abs(math.log2(chosen["KC"] / gemm.k)) + 0.5 * (4 - chosen["THREADS"])
    noise = zlib.crc32(f"{gemm} {schedule.values}".encode()) / 2**32
    return gemm.m * gemm.n * gemm.k / 2**18 * (BASE_US * (1 + slow) + 5 * noise)


def made_row(schedule: Schedule, number: int) -> Row:
    """Every 17th schedule is incorrect."""
    gemm = schedule.task
    row = Row(str(gemm), schedule.family.name, schedule.values, f"{number:016x}", 1000, "verify", "incorrect", "wrong")
    if number % 17 == 16:
        return row
    latency, reference = made_us(schedule), gemm.m * gemm.n * gemm.k / 2**18 * BASE_US * 1.5
    speedup = reference / latency
    figures = {"latency_us": latency, "latency_low": latency, "latency_high": latency, "rounds": 6, "launches": 60}
    ratio = {"speedup": speedup, "speedup_low": speedup, "speedup_high": speedup, "max_difference": 0.01}
    return replace(
        row,
        stage="measure",
        status="measured",
        reason="",
        reference="torch",
        reference_us=reference,
        **figures,
        **ratio,
    )


def made_world(shapes: Sequence[str] = SHAPES, schedules: int = 60, target: CpuTarget | CudaTarget = TARGET) -> World:
    tasks: list[Task] = [Gemm.parse(shape) for shape in shapes]
    entries = pool(tasks, target, schedules, 0)
    found = [each for task in tasks for each in schedules_for(task, target, entries)]
    rows = tuple(made_row(each, number) for number, each in enumerate(found))
    families = {each.family.name: each.family for each in found}
    spaces = {name: space_of(family) for name, family in families.items()}
    head = Head(target.name, target.machine, target_fields(target), {"cpu": "Made"}, "search", spaces)
    return World(head, rows)


def written(path: Path, **made: object) -> Path:
    write(made_world(**made), path)  # type: ignore[arg-type]
    return path
