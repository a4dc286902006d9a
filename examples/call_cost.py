"""What a call of a kernel costs beside the kernel, and beside torch's own product.

    python examples/call_cost.py
    python examples/call_cost.py 512x512x512 --threads 2

Times the shape's default kernel in a C loop over its entry point, through every way of calling it from Python, and
torch.mm, each for a few milliseconds in turn, in many rounds. Prints the median and the shortest of the rounds'
means, and how far each lies above the C loop. On a busy machine only the shortest say much.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import torch

from cuda_l2.build import cpu
from cuda_l2.families.cpu_gemm import FAMILY
from cuda_l2.library.kernel import Kernel
from cuda_l2.machine.cpu.target import detect
from cuda_l2.propose._base import FamilySpace
from cuda_l2.records import Gemm
from cuda_l2.system.errors import UserError
from cuda_l2.system.text import counted

ARM_S = 0.002


def default_kernel(gemm: Gemm, threads: int) -> Kernel:
    """The shape's default kernel on this many threads."""
    target = detect()
    values = list(FAMILY.default(gemm, target))
    values[[choice.name for choice in FAMILY.choices].index("THREADS")] = threads
    candidate = FamilySpace(FAMILY, gemm, target).render(tuple(values), "default")
    return Kernel(gemm, candidate, cpu.build(candidate, target), target.machine)


def ways(kernel: Kernel) -> dict[str, Callable[[int], object]]:
    """What is timed, by name: each calls the product this many times."""
    a, b, out = (torch.randn(x.shape).to(x.dtype) for x in (kernel._a, kernel._b, kernel._c))
    if kernel._b.strides[0] == 1:
        b = b.t().contiguous().t()
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, b, out)]
    arguments = ctypes.byref(kernel._arguments)
    kernel(a, b, out)  # starts its threads
    return {
        "kernel alone, C loop": lambda n: kernel._host.product_repeat(arguments, *pointers, ctypes.c_int64(n)),
        "kernel(a, b, out)": lambda n: [kernel(a, b, out) for _ in range(n)],
        "kernel(a, b)": lambda n: [None for _ in range(n) if kernel(a, b) is None],
        "kernel(a, b, out), no extension": lambda n: [kernel._careful_call(a, b, out) for _ in range(n)],
        "torch.mm(a, b, out=out)": lambda n: [torch.mm(a, b, out=out) for _ in range(n)],
    }


def sampled(arms: dict[str, Callable[[int], object]], rounds: int) -> dict[str, list[float]]:
    """Microseconds a call, a mean for each round, by arm."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    counts = dict.fromkeys(arms, 1)
    for number in range(rounds + 3):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm(counts[name])
            mean_s = (time.perf_counter() - start) / counts[name]
            if number < 3:  # finds how many calls fill an arm's time
                counts[name] = max(1, int(ARM_S / mean_s))
            else:
                times[name].append(mean_s * 1e6)
    return times


def table(times: dict[str, list[float]]) -> str:
    """A Markdown table; the first arm is what the others are held against."""
    first = next(iter(times.values()))
    lines = ["| way | median us | shortest us | shortest above the kernel alone, us |", "|---|---|---|---|"]
    for name, means in times.items():
        shortest = min(means)
        lines.append(f"| {name} | {statistics.median(means):.2f} | {shortest:.2f} | {shortest - min(first):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default="64x64x64", help="as in 512x512x512:tn; default 64x64x64")
    parser.add_argument("--threads", type=int, default=1, help="of the kernel and of torch; default 1")
    parser.add_argument("--rounds", type=int, default=200, help="default 200")
    options = parser.parse_args()
    try:
        kernel = default_kernel(Gemm.parse(options.shape), options.threads)
    except UserError as error:
        parser.error(str(error))
    torch.set_num_threads(options.threads)
    times = sampled(ways(kernel), options.rounds)
    print(f"{kernel.gemm} on {counted(options.threads, 'thread')}, {kernel.machine}, torch {torch.__version__}")
    print(table(times))


if __name__ == "__main__":
    main()
