"""The shapes of a benchmark: the paper's 1,000, a file's or a list's, and samples of them stratified by size."""

import csv
import itertools
import os
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from cuda_l2.records import SHORT_DTYPES, Accumulate, Gemm, Layout
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import read_text

PAPER = "paper"
PAPER_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384)
"""M, N and K of the paper's section 3 each take all of these."""
BUCKET_WIDTH = 3
LARGEST_BUCKET = 39
"""The paper's last bucket ends with its largest shape, 2^42; larger shapes join it."""
LEAST_OF_BUCKET = 10
MOST_DRAWN, MOST_DRAWN_MNK = 1 << 14, 1 << 36
"""Limits of shapes drawn at random: an axis, and M N K."""

Size = tuple[int, int, int]


def drawn_shapes(count: int, seed: int) -> list[Gemm]:
    """Shapes whose M, N and K are log-uniform from 1 to 16384 and multiples of nothing, with M N K up to 2^36.

    fp16 and bf16, B row-major and column-major, by turns of the same seed.
    """
    drawn, found = random.Random(seed), list[Gemm]()
    while len(found) < count:
        m, n, k = (round(MOST_DRAWN ** drawn.random()) for _ in range(3))
        if m * n * k <= MOST_DRAWN_MNK:
            dtype, layout = drawn.choice(list(SHORT_DTYPES)), drawn.choice(list(Layout))
            found.append(Gemm(m, n, k, layout, dtype=dtype))
    return found


def log2_mnk(gemm: Gemm) -> int:
    """floor(log2(M N K)), by which shapes are grouped."""
    return (gemm.m * gemm.n * gemm.k).bit_length() - 1


def bucket(gemm: Gemm) -> int:
    """The first log2 of a shape's bucket: 18 for 18-20."""
    return min(log2_mnk(gemm) // BUCKET_WIDTH * BUCKET_WIDTH, LARGEST_BUCKET)


def bucket_name(first: int) -> str:
    return f"{first}+" if first == LARGEST_BUCKET else f"{first}-{first + BUCKET_WIDTH - 1}"


def read_grid(
    text: str, layouts: Sequence[Layout] = (Layout.NN,), accumulate: Accumulate = Accumulate.FP32
) -> list[Gemm]:
    """The shapes of `paper`, of a file, or of a list such as `64x64x64,128x128x128:tn`; each once.

    layouts, accumulate: of shapes that do not say their own. A file has one shape a line (`64x128x256` or
    `64,128,256`; # begins a comment), or is a CSV file with columns m, n, k and perhaps layout, accumulate and dtype.
    """
    if text == PAPER:
        sizes = itertools.product(PAPER_SIZES, PAPER_SIZES, PAPER_SIZES)
        return [Gemm(m, n, k, layout, accumulate) for m, n, k in sizes for layout in layouts]
    path = Path(text)
    if re.match(r"\s*\d+x\d+x\d", text) and not os.path.exists(text):  # noqa: PTH110 - long lists are no paths
        shapes = [(shape, "") for shape in text.split(",") if shape.strip()]
    elif path.is_file():
        shapes = _file_shapes(path)
    else:
        raise UserError(
            f"--grid {text!r}: there is no such file; it may also be {PAPER}, or shapes as in 64x64x64,128x128x128:tn"
        )
    gemms: dict[Gemm, None] = {}
    for shape, where in shapes:
        try:
            gemms.update(dict.fromkeys(_expanded(shape, layouts, accumulate)))
        except UserError as error:
            raise UserError(f"{where}{error}") from None
    if not gemms:
        raise UserError(f"{path} holds no shape; write one a line, as in 512x512x512")
    return list(gemms)


def sample(gemms: Iterable[Gemm], count: int, seed: int) -> list[Gemm]:
    """`count` of the sizes M x N x K, in every layout they come in; the same ones for the same seed and shapes.

    Every bucket gets the least of its size and ten where the count allows, the rest in proportion to what is left.
    """
    if count < 1:
        raise UserError(f"a sample has at least 1 shape, not {count}")
    members = defaultdict(list)
    for gemm in gemms:
        members[_size(gemm)].append(gemm)
    sizes: dict[int, list[Size]] = defaultdict(list)
    for size in sorted(members):
        sizes[bucket(members[size][0])].append(size)
    chosen: set[Size] = set()
    for first, share in _shares({first: len(sizes[first]) for first in sorted(sizes)}, count, seed).items():
        random.Random(f"{seed}/{first}").shuffle(sizes[first])
        chosen.update(sizes[first][:share])
    return [gemm for size, found in members.items() if size in chosen for gemm in found]


def chosen(gemms: Iterable[Gemm], count: int | None, seed: int) -> list[Gemm]:
    """A sample of so many sizes, or all, in random order."""
    return shuffled(gemms if count is None else sample(gemms, count, seed), seed)


def shuffled(gemms: Iterable[Gemm], seed: int) -> list[Gemm]:
    """In random order, layouts of one size together: then what an interrupted run has is a fair sample."""
    groups = defaultdict(list)
    for gemm in gemms:
        groups[_size(gemm)].append(gemm)
    order = sorted(groups)
    random.Random(seed).shuffle(order)
    return [gemm for size in order for gemm in groups[size]]


def _size(gemm: Gemm) -> Size:
    return gemm.m, gemm.n, gemm.k


def _file_shapes(path: Path) -> list[tuple[str, str]]:
    """Shapes as text, each with the place it was read from."""
    lines = read_text(path).splitlines()
    numbered = [(number, re.sub(r"(^|\s)#.*", "", line).strip()) for number, line in enumerate(lines, 1)]
    numbered = [(number, line) for number, line in numbered if line]
    if numbered and {"m", "n", "k"} <= {name.strip().lower() for name in numbered[0][1].split(",")}:
        rows = csv.DictReader([line.lower() for _, line in numbered], skipinitialspace=True)
        return [
            (_row_shape(row), f"{path}, line {number}: ")
            for (number, _), row in zip(numbered[1:], rows, strict=False)  # a missing row is met as an unreadable one
        ]
    return [
        (re.sub(r"^(\d+)[\s,;]+(\d+)[\s,;]+(\d+)$", r"\1x\2x\3", line), f"{path}, line {number}: ")
        for number, line in numbered
    ]


def _row_shape(row: dict[str, str]) -> str:
    """A CSV row as `Gemm.parse` reads it."""
    size = "x".join((row[name] or "").strip() for name in ("m", "n", "k"))
    options = [(row.get(name) or "").strip() for name in ("layout", "accumulate", "dtype")]
    options = [SHORT_DTYPES.get(option, option) for option in options if option != "float16"]
    return ":".join([size, *(option for option in options if option)])


def _expanded(shape: str, layouts: Sequence[Layout], accumulate: Accumulate) -> list[Gemm]:
    """A shape in the layouts asked for, unless it says its own layout; the accumulator likewise."""
    gemm = Gemm.parse(shape)
    said = shape.strip().lower().split(":")[1:]
    if not set(said) & set(Accumulate):
        gemm = replace(gemm, accumulate=accumulate)
    return [gemm] if set(said) & set(Layout) else [replace(gemm, layout=layout) for layout in layouts]


def _shares(sizes: dict[int, int], count: int, seed: int) -> dict[int, int]:
    """How many of `count` come from each bucket of these sizes."""
    shares = dict.fromkeys(sizes, 0)
    left = min(count, sum(sizes.values()))
    order = sorted(sizes)
    random.Random(seed).shuffle(order)  # who goes first matters only where the count is too small for the least
    for _ in range(LEAST_OF_BUCKET):
        for first in order:
            if left and shares[first] < sizes[first]:
                shares[first] += 1
                left -= 1
    rest = {first: size - shares[first] for first, size in sizes.items()}
    total = sum(rest.values())
    if left:
        exact = {first: left * open_ / total for first, open_ in rest.items()}
        for first in sizes:
            shares[first] += int(exact[first])
            left -= int(exact[first])
        for first in sorted(sizes, key=lambda first: int(exact[first]) - exact[first])[:left]:
            shares[first] += 1
    return shares
