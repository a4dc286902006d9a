"""What a call costs the host: torch.mm, the operator, cuda_l2.matmul and the driver's launch alone, on one GPU."""

import time
from collections.abc import Callable

import numpy as np
import torch

from cuda_l2.library.deploy import dispatch
from cuda_l2.library.deploy.calls import matmul, op
from cuda_l2.library.deploy.entries import key_of
from cuda_l2.measure.sampler import Sampler
from cuda_l2.records import Gemm, Layout
from cuda_l2.system.errors import UserError

SAMPLES = 9


def host_us(gemm: Gemm, count: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Microseconds of host time a call by its name: the median of samples of `count` calls, behind an empty queue.

    UserError where no kernel serves the shape, or its kernel has a workspace: it cannot be launched alone.
    """
    library = op()
    if library is None or not torch.cuda.is_available():
        raise UserError("this needs an NVIDIA GPU; `cuda-l2 doctor` says what is missing")
    device = torch.cuda.current_device()
    dtype, place = getattr(torch, gemm.dtype), torch.device("cuda", device)
    a = torch.randn(gemm.m, gemm.k, dtype=dtype, device=place)
    b = torch.randn(gemm.n, gemm.k, dtype=dtype, device=place).t()
    if gemm.layout is Layout.NN:
        b = b.contiguous()
    c, key, stream = matmul(a, b), key_of(gemm, device), torch.cuda.current_stream().cuda_stream
    addresses = [tensor.data_ptr() for tensor in (a, b, c)]
    if not library.bare(key, addresses, stream, 1):
        served = dispatch.known(device).get(gemm)
        why = "its kernel needs a workspace" if served and served.served else f"run `cuda-l2 tune {gemm}` first"
        raise UserError(f"no kernel's launch can be timed alone for {gemm}: {why}")
    product = torch.ops.cuda_l2.product.default

    def repeated(call: Callable[[], object]) -> Callable[[], None]:
        def calls() -> None:
            for _ in range(count):
                call()

        return calls

    arms: dict[str, Callable[[], object]] = {
        "the driver's launch": lambda: library.bare(key, addresses, stream, count),
        "torch.ops.cuda_l2.product": repeated(lambda: product(a, b)),
        "cuda_l2.matmul": repeated(lambda: matmul(a, b)),
        "cuda_l2.matmul, out=": repeated(lambda: matmul(a, b, out=c)),
        "torch.mm": repeated(lambda: torch.mm(a, b)),
    }

    def us(name: str) -> float:
        torch.cuda.synchronize()
        start = clock()
        arms[name]()
        return (clock() - start) / count * 1e6

    sampler = Sampler(us, np.random.default_rng(0))
    with torch.no_grad():
        for _ in range(SAMPLES):
            sampler.round([*arms])
    return {name: sampler.samples.median(name) for name in arms}
