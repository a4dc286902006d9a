"""Which kernel serves which shape on one machine: what was timed there, in one JSON file.

A file belongs to a GPU, driver, toolkit and pack: after an update of any of them nothing is known, and torch serves
until it is tuned again. Files are replaced at once; processes that tune take turns and keep one another's choices.
"""

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cuda_l2.library.table import schedule_of
from cuda_l2.records import Gemm
from cuda_l2.system import paths
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import write_text
from cuda_l2.system.lock import held

FORMAT = "cuda-l2 choices, version 1"
VENDOR = ""
"""The kernel's id where torch's own serves."""
EXACT = ("imported", "cublaslt")
"""Families whose choices serve the shape alone that was tuned: a source of the user's, an algorithm of cuBLASLt."""
REACH = 2
"""Most rows of a tuned shape, in those of the next smaller one, where shapes between the two are served."""
GAIN = 1.05
"""torch's time at either over the kernel's at the larger one, at least, where shapes between are served."""
FILLED = 0.75
"""Least part of a kernel's last tile of rows that such a shape fills. On one H100 kernels took up to 1.6 times the time
of a full tile where less was filled; swapped ones, whose tiles of rows are narrow, at most 1.2."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What serves one shape, and what was measured; times in microseconds."""

    shape: str
    kernel: str = VENDOR
    family: str = ""
    schedule: str = ""  # every choice of the family, those of the launch too
    us: float = 0.0  # of the best kernel, also where torch's is faster
    vendor_us: float = 0.0
    demoted: bool = False  # somebody or a check said so: torch serves, and tuning does not ask again

    def __post_init__(self) -> None:
        Gemm.parse(self.shape)
        times = (self.us, self.vendor_us)
        if not all(isinstance(time, float | int) and 0 <= time < math.inf for time in times):
            raise ValueError(f"{self.shape}: times must be microseconds, not {times}")

    @property
    def gemm(self) -> Gemm:
        return Gemm.parse(self.shape)

    @property
    def served(self) -> bool:
        """Whether a kernel of ours, or an algorithm of cuBLASLt, serves the shape in place of torch's own."""
        return bool(self.kernel) and not self.demoted


@dataclass(frozen=True, slots=True)
class Place:
    """What a time is valid for."""

    gpu: str
    driver: str
    toolkit: str  # of torch, whose libraries are the other side
    pack: str

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]
        return paths.data_dir() / "choices" / f"{digest}.json"


def read(place: Place) -> dict[Gemm, Choice]:
    """The choices of a machine; none where nothing was tuned, UserError where the file is damaged."""
    try:
        text = place.path.read_text()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {place.path}: {error}") from None
    try:
        found: dict[str, Any] = json.loads(text)
        if found["format"] != FORMAT or found["place"] != asdict(place):
            raise ValueError("it belongs to something else")
        choices = [Choice(**{field.name: each[field.name] for field in fields(Choice)}) for each in found["choices"]]
    except (ValueError, KeyError, TypeError, UserError) as error:
        raise UserError(f"{place.path} is damaged: {error}; remove it, and tune again") from None
    return {choice.gemm: choice for choice in choices}


def between(known: Mapping[Gemm, Choice], gemm: Gemm) -> Choice | None:
    """The choice of the next larger tuned shape, which serves a shape that was not tuned; None where torch serves it.

    Its tuned neighbours have the same N, K, layout and types, and fewer and more rows. Kernels must serve both, the
    larger one may have at most REACH times the rows of the smaller one, its kernel must be faster there by GAIN than
    torch is at both, and its last tile must be FILLED, unless its operands are swapped.
    """
    rows = {other.m: choice for other, choice in known.items() if _but_rows(other) == _but_rows(gemm)}
    lower = max((m for m in rows if m < gemm.m), default=0)
    upper = min((m for m in rows if m > gemm.m), default=0)
    if not lower or not upper or upper > REACH * lower:
        return None
    small, large = rows[lower], rows[upper]
    if (
        not (small.served and large.served)
        or large.family in EXACT
        or large.us * GAIN > min(small.vendor_us, large.vendor_us)
    ):
        return None
    schedule = dict(schedule_of(large.schedule))
    last = (gemm.m - 1) % schedule["BM"] + 1
    return large if schedule.get("SWAP") or last >= FILLED * schedule["BM"] else None


def add(place: Place, new: Iterable[Choice]) -> dict[Gemm, Choice]:
    """Keep choices, new ones in place of old ones; all of them. UserError where they cannot be kept."""
    with held(f"choices-{place.path.stem}.lock"):
        kept = {**read(place), **{choice.gemm: choice for choice in new}}
        lines = [asdict(kept[gemm]) for gemm in sorted(kept)]
        text = json.dumps({"format": FORMAT, "place": asdict(place), "choices": lines}, indent=1)
        write_text(place.path, text + "\n", "set CUDA_L2_HOME")
    return kept


@functools.cache
def place_of(device: int, pack: str) -> Place:
    """A CUDA device of this process, with a pack's identity."""
    import torch  # noqa: PLC0415

    properties = torch.cuda.get_device_properties(device)
    gpu = f"{properties.name} {properties.major}.{properties.minor} {properties.multi_processor_count}"
    return Place(gpu, _driver(), f"CUDA {torch.version.cuda}, torch {torch.__version__}", pack)


def _but_rows(gemm: Gemm) -> tuple[object, ...]:
    return gemm.n, gemm.k, gemm.layout, gemm.dtype, gemm.accumulate


def _driver() -> str:
    try:
        lines = Path("/proc/driver/nvidia/version").read_text().splitlines()
        return next(word for word in lines[0].split() if word[:1].isdigit() and "." in word)
    except (OSError, IndexError, StopIteration):
        return "unknown"
