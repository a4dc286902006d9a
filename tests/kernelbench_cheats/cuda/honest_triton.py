"""A Triton kernel.

task: kernelbench/level1/1
expect: measured
"""

import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def quartic(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    square = value * value
    tl.store(out + at, square * square - 3 * square + 1, mask=at < n)


class ModelNew(nn.Module):
    def forward(self, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        n = x.numel()
        quartic[(triton.cdiv(n, 1024),)](x, out, n, BLOCK=1024)
        return out
