"""The runtime's own kernels that look at timed results or unmask inputs: the same text on the CPU and on a GPU."""

import ctypes
import mmap
import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_on_cpu import HEADER

from cuda_l2.kernelbench import masks, runner
from cuda_l2.machine.cuda.helpers import MAX_BLOCKS, ROW_THREADS, SOURCE, Helpers, Projection, compiled_helpers

ROUNDING, SUMMATION = 2.0**-11, 1e-3
SHAPES = [(1, 1), (5, 8), (33, 77), (64, 520), (300, 256)]
MISSING = """
template <typename T> static inline T max(T x, T y) { return x > y ? x : y; }
static inline float __uint_as_float(unsigned x) { return __int_as_float((int)x); }
static inline unsigned __float_as_uint(float x) { return (unsigned)__float_as_int(x); }
static inline double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }
static inline void atomicMax(unsigned *p, unsigned x) { *p = max(*p, x); }
static inline float widened(unsigned short x) { _Float16 y; memcpy(&y, &x, 2); return (float)y; }
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

    def _launch(self, name: str, stream: int, blocks: int, threads: int, values: object, **_: object) -> None:
        words = [ctypes.c_uint64(value) for value in values]  # type: ignore[attr-defined]
        pointers = (ctypes.c_void_p * len(words))(*[ctypes.addressof(word) for word in words])
        sizes = (ctypes.c_uint * 6)(blocks, 1, 1, threads, 1, 1)
        getattr(self._library, f"run_{name}")(sizes, ctypes.c_uint(1), ctypes.c_size_t(0), pointers)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Helpers:
    return OnCpu(tmp_path_factory.mktemp("rows"))


def require_right(
    helpers: Helpers, rows: int, columns: int, device: str, spoil: Callable[[torch.Tensor], None]
) -> None:
    generator = torch.Generator().manual_seed(rows * columns)
    c = torch.randn(rows, columns, generator=generator).half()
    spoil(c)
    signs = torch.randint(0, 2, (columns,), generator=generator).float() * 2 - 1
    expected = c.nan_to_num(0).float() @ signs + torch.randn(rows, generator=generator) * 1e-2
    numbers = torch.randperm(rows, generator=generator)[: max(1, rows // 2)]
    reference = c[numbers].float() + torch.randn(len(numbers), columns, generator=generator) * 1e-3
    c, signs, expected, numbers, reference = (x.to(device) for x in (c, signs, expected, numbers, reference))
    found = torch.zeros(4, device=device)
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    helpers.look_at_rows(stream, c, Projection(signs, expected, ROUNDING, SUMMATION), found[:2])
    helpers.compare_rows(stream, c, numbers, reference, found[2:])
    wide = c.double()
    off = (wide @ signs.double() - expected.double()) / (ROUNDING * wide.norm(dim=1) + SUMMATION)
    other = wide[numbers] - reference.double()
    right = torch.stack([off.square().sum(), off.abs().max(), other.square().sum(), other.abs().max()])
    torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=1e-5, equal_nan=True)


def nothing(c: torch.Tensor) -> None: ...


def not_a_number(c: torch.Tensor) -> None:
    c[-1, -1] = torch.nan


@pytest.mark.parametrize("spoil", [nothing, not_a_number])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_rows_are_looked_at_and_compared(
    rows: int, columns: int, spoil: Callable[[torch.Tensor], None], on_cpu
) -> None:
    require_right(on_cpu, rows, columns, "cpu", spoil)


@pytest.mark.gpu
@pytest.mark.parametrize("spoil", [nothing, not_a_number])
@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (4 * MAX_BLOCKS * ROW_THREADS // 32 + 1, 1000)])
def test_a_gpu_looks_at_rows_and_compares_them(
    rows: int, columns: int, spoil: Callable[[torch.Tensor], None], gpu
) -> None:
    helpers = Helpers(compiled_helpers(gpu.target.arch))
    require_right(helpers, rows, columns, "cuda", spoil)
    torch.cuda.synchronize()


def test_the_stream_is_splitmix64() -> None:
    """Its outputs from state 0, as published with the generator."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert masks.stream(0, 0, 4).tolist() == published
    assert masks.stream(0, 2, 2).tolist() == published[2:]


def masked_and_right(size: int, key: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes as they come to a GPU, in whole words, and as they are to be."""
    values = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    place = np.full(-(-size // 8) * 8, 0xEE, dtype=np.uint8)
    masks.mask(place, values, key, first)
    return torch.from_numpy(place), values


@pytest.mark.parametrize(("size", "first"), [(1, 0), (8, 3), (1000, 0), (3_000_001, 1 << 40)])
def test_what_was_masked_is_unmasked(size: int, first: int, on_cpu: Helpers) -> None:
    key = masks.new_key()
    masked, values = masked_and_right(size, key, first)
    assert size < 100 or (masked[:size] == values).float().mean() < 0.05
    target = torch.zeros_like(masked)
    on_cpu.unmask(0, target.data_ptr(), masked.data_ptr(), len(masked) // 8, key, first)
    assert torch.equal(target[:size], values)
    on_cpu.unmask(0, target.data_ptr(), masked.data_ptr(), len(masked) // 8, key ^ 1, first)
    assert not torch.equal(target[:size], values)


SUM = """
class ModelNew:
    def __call__(self, x, y, scale):
        return (x.sum() + y.sum()).reshape(1) * scale
"""


def test_a_modules_masked_inputs_are_put_in_place_in_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: Helpers
) -> None:
    """What the runner does on a GPU, with the kernel's text on the CPU."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "module.py").write_text(SUM)
    x, y, key = torch.rand(3), torch.rand(4, 5, dtype=torch.float64), masks.new_key()
    file = os.memfd_create("arena")
    os.ftruncate(file, 4096)
    shared = np.frombuffer(mmap.mmap(file, 4096), dtype=np.uint8)
    masks.mask(shared[256:272], x, key, 0)
    masks.mask(shared[320:480], y, key, 2)
    counters = shared[: runner.COUNTERS_BYTES].view(np.int64)
    counters[[runner.SHOWN, runner.KEY]] = 1, key
    judge, theirs = socket.socketpair()
    settings = {"device": "cpu", "threads": 1, "arena_fd": file, "arena_bytes": 4096}
    with judge, theirs:
        running = runner.Runner(theirs, settings)
        running._helpers = on_cpu
        running.load({"file": "module.py", "class": "ModelNew"})
        running.make({"seed": 0, "initial": [], "compile": False})
        inputs = [
            {"offset": 256, "dtype": "float32", "shape": [3]},
            {"offset": 320, "dtype": "float64", "shape": [4, 5]},
            {"number": 2},
        ]
        call = {"inputs": inputs, "outputs": [{"offset": 512, "dtype": "float64", "shape": [1]}], "weights": {}}
        running.prepare({"calls": [call], "weights": {}, "static": False, "masked": True})
        running.take_turns([0], empty=False)
        assert judge.recv(1) == b"C"
    assert shared[512:520].view(np.float64)[0] == pytest.approx(2 * float(x.sum() + y.sum()))


@pytest.mark.gpu
def test_a_gpu_unmasks() -> None:
    from cuda_l2.machine.cuda.target import detect  # noqa: PLC0415

    torch.zeros(1, device="cuda")
    helpers, key = Helpers(compiled_helpers(detect().arch)), masks.new_key()
    for size, first in ((1, 0), (1000, 5), (64 << 20, 0)):
        masked, values = masked_and_right(size, key, first)
        on_gpu, target = masked.cuda(), torch.zeros_like(masked).cuda()
        helpers.unmask(0, target.data_ptr(), on_gpu.data_ptr(), len(masked) // 8, key, first)
        assert torch.equal(target[:size].cpu(), values)
