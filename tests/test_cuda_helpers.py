"""The runtime's own kernels that compare timed results: the same text on the CPU and on a GPU."""

import ctypes
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import HEADER

from cuda_l2.machine.cuda.helpers import MAX_BLOCKS, ROW_THREADS, SOURCE, Helpers, Projection, _Grid, compiled_helpers

ROUNDING, SUMMATION = 2.0**-11, 1e-3
SHAPES = [(1, 1), (5, 8), (33, 77), (64, 520), (300, 256)]
dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
MISSING = """
template <typename T> static inline T max(T x, T y) { return x > y ? x : y; }
static inline float __uint_as_float(unsigned x) { return __int_as_float((int)x); }
static inline unsigned __float_as_uint(float x) { return (unsigned)__float_as_int(x); }
static inline double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }
static inline void atomicMax(unsigned *p, unsigned x) { *p = max(*p, x); }
static inline float widened(unsigned short x, bool bf16) {
  if (bf16) return __uint_as_float((unsigned)x << 16);
  _Float16 y;
  memcpy(&y, &x, 2);
  return (float)y;
}
"""


class OnCpu(Helpers):
    """Launches what looks at rows as a shared library's functions."""

    def __init__(self, folder: Path) -> None:
        text = SOURCE.read_text()
        aligned = next(line for line in text.splitlines() if "bool aligned(" in line)
        of_rows = text[text.index("__device__ float of_warp(") :]
        kernels = "".join(f"KERNEL({name})\n" for name in re.findall(r"__global__ void (\w+)\(", of_rows))
        path = folder / "rows.cpp"
        path.write_text(f'#include "{HEADER}"\n{MISSING}{aligned}\n{of_rows}\n{kernels}')
        command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", str(path), "-o"]
        subprocess.run([*command, str(path.with_suffix(".so"))], check=True)
        self._library = ctypes.CDLL(str(path.with_suffix(".so")))

    def _launch(self, name: str, stream: int, grid: _Grid, values: Sequence[int] = (), table: object = None) -> None:
        words = [ctypes.c_uint64(value) for value in values]
        pointers = (ctypes.c_void_p * len(words))(*[ctypes.addressof(word) for word in words])
        sizes = (ctypes.c_uint * 6)(grid.blocks, grid.rows, 1, grid.threads, 1, 1)
        getattr(self._library, f"run_{name}")(sizes, ctypes.c_uint(1), ctypes.c_size_t(0), pointers)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Helpers:
    return OnCpu(tmp_path_factory.mktemp("rows"))


def require_right(helpers: Helpers, rows: int, columns: int, device: str, dtype: torch.dtype, spoilt: bool) -> None:
    """What is found of random rows, and with a NaN in the last element where they are spoilt."""
    generator = torch.Generator().manual_seed(rows * columns)
    c = torch.randn(rows, columns, generator=generator).to(dtype)
    if spoilt:
        c[-1, -1] = torch.nan
    signs = torch.randint(0, 2, (columns,), generator=generator).float() * 2 - 1
    expected = c.nan_to_num(0).float() @ signs + torch.randn(rows, generator=generator) * 1e-2
    numbers = torch.randperm(rows, generator=generator)[: max(1, rows // 2)]
    reference = c[numbers].float() + torch.randn(len(numbers), columns, generator=generator) * 1e-3
    c, signs, expected, numbers, reference = (x.to(device) for x in (c, signs, expected, numbers, reference))
    found_L4 = torch.zeros(3, 4, device=device)
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    results, wanted = [c.nan_to_num(1), c, 2 * c], [expected, expected, 3 * expected]
    projections = [Projection(signs, each, ROUNDING, SUMMATION) for each in wanted]
    helpers.look_at_rows(stream, results, projections, found_L4)
    helpers.compare_rows(stream, c, numbers, reference, found_L4[1, 2:])
    for result, each, found in zip(results, wanted, found_L4, strict=True):
        wide = result.double()
        off = (wide @ signs.double() - each.double()) / (ROUNDING * wide.norm(dim=1) + SUMMATION)
        right = torch.stack([off.square().sum(), off.abs().max()])
        torch.testing.assert_close(found[:2].double(), right, rtol=1e-3, atol=1e-5, equal_nan=True)
    other = c.double()[numbers] - reference.double()
    right = torch.stack([other.square().sum(), other.abs().max()])
    torch.testing.assert_close(found_L4[1, 2:].double(), right, rtol=1e-3, atol=1e-5, equal_nan=True)


@dtypes
@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_rows_are_looked_at_and_compared(rows, columns, spoilt, dtype, on_cpu) -> None:
    require_right(on_cpu, rows, columns, "cpu", dtype, spoilt)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (4 * MAX_BLOCKS * ROW_THREADS // 32 + 1, 1000)])
def test_a_gpu_looks_at_rows_and_compares_them(rows, columns, spoilt, dtype, gpu) -> None:
    require_right(Helpers(compiled_helpers(gpu.target.arch)), rows, columns, "cuda", dtype, spoilt)
    torch.cuda.synchronize()
