"""Settings of runs over many shapes, which are also the options of their commands: read without torch or a GPU."""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from cuda_l2.machine import chosen
from cuda_l2.measure.baselines._base import beginning, product_baselines
from cuda_l2.measure.protocols import CPU_PROTOCOLS, CUDA_PROTOCOLS, OFFLINE
from cuda_l2.records import Accumulate, Gemm, Layout
from cuda_l2.runs import grid as grids
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place
from cuda_l2.system.values import listed, member, seconds

if TYPE_CHECKING:
    from cuda_l2.rigs import Request
    from cuda_l2.settings import Settings

GRID = Parameter(group="Over a grid")
GPU_LIBRARIES = Parameter(group="Libraries on a GPU")
"""How commands take what concerns cuBLASLt."""
PROTOCOLS = {"cpu": CPU_PROTOCOLS, "cuda": CUDA_PROTOCOLS}
NO_SEARCH = ("0", "0s")
"""Budgets of none."""
EAGER, COMPILE, MAX_AUTOTUNE, FORCED = "eager", "compile", "max-autotune", "max-autotune-forced"
COMPILE_AHEAD, FORCED_AHEAD = "compile-ahead", "max-autotune-ahead"
MODEL_ARMS = (EAGER, COMPILE, COMPILE_AHEAD, MAX_AUTOTUNE, FORCED, FORCED_AHEAD)
"""Ways to run a model's layers; docs/deploy.md explains them."""


@dataclass(frozen=True)
class SweepSettings:
    """How a benchmark measures shapes; also the options of its command."""

    grid: str | None = None
    """Many shapes: paper (its 1,000), a file of shapes, or shapes as in 64x64x64,128x128x128:tn."""
    sample: int | None = None
    """Number of sizes of the grid to take, stratified by size; of the paper's grid unless --grid names another."""
    layout: str = "nn"
    """B's layout in the grid: nn, tn, or both."""
    accumulate: Annotated[str, GRID] = "fp32"
    """The grid's least precision of sums: fp32 or fp16."""
    protocols: Annotated[str, GRID] = OFFLINE.name
    """Under which the grid is reported, as in offline,rotating,server."""
    baselines_only: Annotated[bool, GRID] = False
    """Time the baselines alone over the grid."""
    arms: Annotated[str, GRID] = ""
    """Only baselines whose names begin so, as in 'cuBLASLt-AutoTuning,cuBLAS NN'; all where left out. With --model:
    eager,compile,compile-ahead,max-autotune, to which max-autotune-forced and max-autotune-ahead may be added."""
    compile: Annotated[bool, GRID] = False
    """Time torch.compile's max-autotune too: seconds of tuning a shape."""
    full: Annotated[bool, GRID] = False
    """Verify every reported kernel of the grid also by the checks that are too slow for a search."""
    retune: Annotated[bool, GPU_LIBRARIES] = False
    """Time cuBLASLt's algorithms anew, where an earlier run's choice would be kept."""
    tuning: Annotated[str, GPU_LIBRARIES] = "adaptive"
    """How cuBLASLt's algorithms are timed: adaptive (rounds of back-to-back launches until the best is clear) or paper
    (50 + 100 rounds of single launches, fresh operands each)."""
    library: Annotated[Path | None, GRID] = None
    """A table of kernels by shape, as `cuda-l2 select` writes it: times those over the grid, in both layouts."""
    choices: Annotated[Path | None, GPU_LIBRARIES] = None
    """File of the algorithms that cuBLASLt's autotuning chose: used where it has them, added to when the run ends."""
    brute: Annotated[str | None, GPU_LIBRARIES] = None
    """Time of a search beyond the algorithms that cuBLASLt's heuristic returns, a shape and layout of B of a grid, as
    in 3s: the fastest configuration found is one more baseline, cuBLASLt-brute. Implies --retune."""
    part: Annotated[str, GRID] = "1/1"
    """Measure only this part of the grid, as in 1/2: for several GPUs, each with a folder and CUDA_VISIBLE_DEVICES."""
    workers: Annotated[str, GRID] = ""
    """Several GPUs, a process each: auto for all of this machine, or how many; ray://HOST:PORT for those of a Ray
    cluster, ray for one that is started here (docs/scale.md)."""
    taken: Annotated[Path | None, GRID] = None
    """File, empty at first, in which commands over one grid on one machine note the shapes that they take: each is
    measured by one of them, as with --workers. Each begins with its --part."""
    also: Annotated[tuple[Path, ...], GRID] = ()
    """Folders of other runs with these settings, as of another part: what they measured counts as measured here."""
    fresh: Annotated[bool, GRID] = False
    """Move the results that --out holds aside and begin the grid anew."""
    budget: str | None = None
    """Time of search a shape: 60s, a task 20s, over a grid 0: the best that the archive knows or else the defaults."""
    policy: str = "schedule"
    """Who proposes."""
    seed: int = 0
    """Seed of the searches, and of the grid's sample and order."""
    archive: Place | None = None
    """File that keeps the trials, or postgresql://USER@HOST/DATABASE; by default archive.db in the folder --out, over a
    grid the one that `optimize` keeps."""
    out: Path | None = None
    """Folder for the results: bench-cpu, for tasks bench-tasks, for a grid bench-grid. An interrupted run
    goes on from what it holds."""
    target: str = "auto"
    """Machine to measure on: cpu, cuda, or auto for the GPU where there is one."""

    @property
    def searches(self) -> bool:
        """Whether kernels of a grid are searched for."""
        return self.budget is not None and self.budget.strip() not in NO_SEARCH

    @property
    def budget_s(self) -> float:
        """Seconds of search a shape of a grid, 0 for none; UserError where the text is no time."""
        return seconds(self.budget or "") if self.searches else 0.0

    @property
    def protocol_names(self) -> tuple[str, ...]:
        return listed(self.protocols)

    def require_protocols(self) -> None:
        """UserError where the protocols are none under which the target's figures are reported."""
        known = [each.name for each in PROTOCOLS[chosen(self.target)].values() if not each.selects]
        if not self.protocol_names:
            raise UserError(f"name a protocol to report under: {', '.join(known)}")
        for name in self.protocol_names:
            if name not in known:
                raise UserError(f"there is no protocol {name!r} to report under; choose from {', '.join(known)}")

    def search(self, budget_s: float, **further: Any) -> "Settings":
        """How kernels are searched for. further: what the optimizer takes beyond these, or instead."""
        from cuda_l2.settings import Settings  # noqa: PLC0415 - loads torch

        shared: dict[str, Any] = {name: getattr(self, name) for name in ("policy", "seed", "archive", "target")}
        return Settings(budget_s=budget_s, **shared | further)

    def gemms(self) -> list[Gemm]:
        """The grid's shapes in the order they are measured."""
        layouts = {"nn": [Layout.NN], "tn": [Layout.TN], "both": list(Layout)}.get(self.layout)
        if layouts is None:
            raise UserError(f"there is no layout {self.layout!r}; choose nn, tn or both")
        found = grids.read_grid(self.grid or grids.PAPER, layouts, member(Accumulate, self.accumulate, "accumulator"))
        return grids.chosen(found, self.sample, self.seed)

    def request(self) -> "Request":
        """What is asked of the rig. UserError where the arms begin no baseline's name."""
        from cuda_l2.rigs import Request  # noqa: PLC0415 - options must be read in no time

        known = product_baselines(chosen(self.target))
        brute_s = seconds(self.brute) if self.brute else 0.0
        for text in listed(self.arms):
            if not brute_s and all(each.searched for each in beginning([text], known)):
                raise UserError(f"{text} needs --brute 3s")
        left_out = [each for each in known if (each.compiled and not self.compile) or (each.searched and not brute_s)]
        wanted = [each for each in beginning(listed(self.arms), known) if each not in left_out]
        if not wanted:
            raise UserError(f"no baseline is left to time: choose from {', '.join(each.name for each in known)}")
        if brute_s and not any(each.searched for each in known):
            raise UserError("--brute searches cuBLASLt's configurations: it needs an NVIDIA GPU")
        if brute_s and not any(each.searched for each in wanted):
            raise UserError("--brute makes the arm cuBLASLt-brute: name it in --arms too")
        # a library's kernels meet all baselines once
        in_full = (OFFLINE.name,) if self.library and not self.arms else ()
        retune = self.retune or brute_s > 0  # what is compared is chosen in the same minutes
        return Request(tuple(wanted), in_full, retune, self.tuning, self.choices, brute_s=brute_s)


@dataclass(frozen=True)
class DecoderSettings:
    """Which steps of a decoder are timed; also options of the command."""

    model: str | None = None
    """Time the layers of a decoder with torch's products and with tuned kernels: llama-8b, qwen-1.5b, or a config.json
    of a model that transformers has."""
    batch: str = "1,16,64,256"
    """Sequences in a decoding step, each with one new token."""
    context: int = 512
    """Tokens of a sequence in a decoding step, the new one included."""
    prefill: int = 2048
    """Tokens of the sequence that is prefilled; 0 for no prefill."""
    layers: int = 4
    """Number of layers, at most the model's; times are of one layer."""
    merged: bool = False
    """Make one product of query, key and value, and one of gate and up, without and with tuned kernels."""

    def __post_init__(self) -> None:
        texts = listed(self.batch)
        if not texts or not all(text.isdecimal() and int(text) for text in texts):
            raise UserError(f"--batch takes whole numbers of at least 1, as in 1,16,64, not {self.batch!r}")
        if self.context < 1 or self.layers < 1 or self.prefill < 0:
            raise UserError("--context and --layers must be at least 1, --prefill at least 0")

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(map(int, listed(self.batch)))


@dataclass(frozen=True)
class SurveySettings:
    """What to choose for, and from what; also options of the command."""

    grid: str = "paper"
    """The shapes: paper (its 1,000), a file of shapes, or shapes as in 64x64x64,128x128x128."""
    accumulate: str = "fp32"
    """Precision of sums: fp32, fp16, or both as in fp32,fp16; then the fp16 class also tries the best of the other."""
    layouts: str = "nn,tn"
    """B's layouts."""
    state: Literal["warm", "cold"] = "warm"
    """warm: launches back to back, plain and as dependents; cold: single ones with nothing cached, for servers."""
    table: Path | None = None
    """Dispatch table whose kernels are the pool; all that serve a shape are timed on it. Its rows stay where nothing is
    0.5 % faster than they are."""
    near: int = 0
    """Kernels to add for each of --table's that differ from it in one choice. On a shape only what differs so from the
    table's row for it is tried."""
    reports: int = 0
    """Time as a report does, beside cuBLASLt: what --table names for a shape and layout, and this number of
    others that it names for the shapes most like it. For large shapes, whose order in shorter times depends on how hot
    the chip is."""
    choices: Path | None = None
    """With --reports the file of the algorithms that cuBLASLt's autotuning chose, as `cuda-l2 bench` takes it; what it
    lacks is tuned."""
    pool: Path | None = None
    """CSV file of the kernels to choose from: layout, family, schedule. By default those the families rank first."""
    known: Path | None = None
    """CSV file of times to rank the pool by: the columns of a table, any number of schedules a shape; may be .gz."""
    budget: str | None = None
    """Time for timing, as in 400s; the next run goes on where it ended."""
    seed: int = 0
    """Seed of the order of shapes and kernels."""
    out: Path = Path("selection")
    """Folder for every stage's result. An interrupted run goes on from its pool and times."""

    def __post_init__(self) -> None:
        if self.table and (self.pool or self.known):
            raise UserError("--table takes the place of --pool and --known")
        if self.near < 0 or (self.near and not self.table):
            raise UserError("--near takes a number of kernels near each one of --table")
        if self.reports < 0 or (self.reports and not self.table):
            raise UserError("--reports takes a number of kernels of --table")
        if self.reports and self.near:
            raise UserError("--reports times kernels that --table has: it does not go with --near")
        if self.choices and not self.reports:
            raise UserError("--choices goes with --reports")

    @property
    def cold(self) -> bool:
        return self.state == "cold"

    @property
    def budget_s(self) -> float:
        """Seconds of timing; infinite where it may take as long as it takes."""
        return seconds(self.budget) if self.budget else math.inf

    def gemms(self) -> tuple[Gemm, ...]:
        """The grid's shapes in all layouts and classes, in random order of size."""
        layouts = [member(Layout, text, "layout") for text in self.layouts.split(",")]
        classes = [member(Accumulate, text, "accumulator") for text in self.accumulate.split(",")]
        found = itertools.chain.from_iterable(grids.read_grid(self.grid, layouts, each) for each in classes)
        return tuple(dict.fromkeys(grids.shuffled(found, self.seed)))
