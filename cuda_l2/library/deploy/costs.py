"""What a call costs the host: torch.mm, the operator, cuda_l2.matmul and the driver's launch alone, on one GPU.

Where a kernel was tuned with weights ahead too, also calls with a weight that is declared constant; and calls that want
a gradient.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from cuda_l2.library.deploy import ahead, dispatch
from cuda_l2.library.deploy.calls import matmul, op
from cuda_l2.library.deploy.entries import AHEAD, Key, key_of
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
    product, linear = torch.ops.cuda_l2.product.default, torch.ops.cuda_l2.linear.default

    def repeated(call: Callable[[], object], *, gradients: bool = False) -> Callable[[], None]:
        def calls() -> None:
            with torch.set_grad_enabled(gradients):
                for _ in range(count):
                    call()

        return calls

    def launches(key: Key) -> Callable[[], object]:
        return lambda: library.bare(key, addresses, stream, count)

    wanted = b.clone().requires_grad_()
    arms: dict[str, Callable[[], object]] = {
        "the driver's launch": launches(key),
        "torch.ops.cuda_l2.product": repeated(lambda: product(a, b)),
        "cuda_l2.matmul": repeated(lambda: matmul(a, b)),
        "cuda_l2.matmul, out=": repeated(lambda: matmul(a, b, out=c)),
        "cuda_l2.matmul, gradients": repeated(lambda: matmul(a, wanted), gradients=True),
        "torch.mm": repeated(lambda: torch.mm(a, b)),
        "torch.mm, gradients": repeated(lambda: torch.mm(a, wanted), gradients=True),
    }

    def us(name: str) -> float:
        torch.cuda.synchronize()
        start = clock()
        arms[name]()
        return (clock() - start) / count * 1e6

    def medians(names: Sequence[str]) -> dict[str, float]:
        sampler = Sampler(us, np.random.default_rng(0))
        for _ in range(SAMPLES):
            sampler.round(names)
        return {name: sampler.samples.median(name) for name in names}

    found = medians([*arms])
    weight, ahead_key = b.t().clone(), key_of(gemm, device, AHEAD)
    if gemm.layout is Layout.TN and ahead.constant(weight):  # from here on a process's calls go through torch.ops
        linear(a, weight)  # asks for the shape
        if library.bare(ahead_key, addresses, stream, 1):
            further = {
                "weights ahead: the driver's launch": launches(ahead_key),
                "weights ahead: torch.ops.cuda_l2.linear": repeated(lambda: linear(a, weight)),
                "weights ahead: cuda_l2.matmul": repeated(lambda: matmul(a, weight.t(), weights_ahead=True)),
                "torch.mm, with weight.t()": repeated(lambda: torch.mm(a, weight.t())),
            }
            arms |= further
            found |= medians([*further])
    return found
