"""C of its own that adds to zeros: filling takes a third of its time, and is nothing but making a tensor.

task: kernelbench/level1/1
expect: measured
"""

import ctypes
import subprocess
import tempfile

import torch
from torch import nn

SOURCE = r"""
void quartic(const float *x, float *out, long count) {
    for (long i = 0; i < count; i++) {
        float square = x[i] * x[i];
        out[i] += square * square - 3 * square + 1;
    }
}
"""


def built():
    folder = tempfile.mkdtemp()
    with open(f"{folder}/quartic.c", "w") as file:
        file.write(SOURCE)
    command = ["gcc", "-O3", "-shared", "-fPIC", "-o", f"{folder}/quartic.so", f"{folder}/quartic.c"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(f"{folder}/quartic.so").quartic


QUARTIC = built()


class ModelNew(nn.Module):
    def forward(self, x):
        given = x.contiguous()
        out = torch.zeros_like(given)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (given, out)]
        QUARTIC(*pointers, ctypes.c_long(given.numel()))
        return out
