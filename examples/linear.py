"""A linear layer on the CPU that calls winners for the numbers of rows that have one, and torch for all others.

python examples/linear.py                  # searches a minute for a layer of 512 x 512 and 64 rows, then compares
python examples/linear.py --budget 10
"""

import argparse
import copy
from collections.abc import Iterable

import torch
from torch import nn

import cuda_l2
from cuda_l2.library.kernel import Kernel, TorchKernel


class FastLinear(nn.Module):
    """A linear layer with a kernel for some numbers of rows, torch's own product for every other input."""

    def __init__(self, linear: nn.Linear, kernels: Iterable[Kernel | TorchKernel]) -> None:
        super().__init__()
        self.linear = linear
        self.kernels = {kernel.gemm.m: kernel for kernel in kernels if not kernel.why_torch}
        for gemm in (kernel.gemm for kernel in self.kernels.values()):
            # the weight lies as N x K, row by row: a column-major B
            if (gemm.n, gemm.k, gemm.layout) != (linear.out_features, linear.in_features, "tn"):
                raise ValueError(f"the layer needs Mx{linear.out_features}x{linear.in_features}:tn, not {gemm}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        kernel = self.kernels.get(rows.shape[0])
        if kernel is None:
            return self.linear(x)
        try:
            y = kernel(rows, self.linear.weight.t())
        except ValueError:  # another type or device, or rows that begin at an odd address
            return self.linear(x)
        if self.linear.bias is not None:
            y = y + self.linear.bias
        return y.view(*x.shape[:-1], y.shape[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=60, help="seconds of search; default 60")
    options = parser.parse_args()
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).half().eval()
    result = cuda_l2.optimize("64x512x512:tn", budget=options.budget, target="cpu")
    print(result)
    fast = copy.deepcopy(model)
    for name, layer in model.named_children():
        if isinstance(layer, nn.Linear):
            setattr(fast, name, FastLinear(layer, [result.kernel]))
    with torch.no_grad():
        for batch in (64, 7):
            x = torch.randn(batch, 512).half()
            print(f"{batch} rows: largest difference from torch {(fast(x) - model(x)).abs().max():.2g}")


if __name__ == "__main__":
    main()
