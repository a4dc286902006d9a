"""Files in KernelBench's format, ours, that imitate the kinds of tasks of its three levels; the loader over all of them.

    PYTHONPATH=. python tests/kernelbench_kinds.py [LEVEL ...]

prints what `cuda-l2 tasks --kernelbench` prints for a checkout of them. Not part of the test suite: it takes some minutes.
"""

import sys
import tempfile
from pathlib import Path

from cuda_l2.kernelbench.opened import Effort, entries, examine_all
from cuda_l2.report.tasks import print_counts, print_examined

HEAD = """import math

import torch
import torch.nn as nn
import torch.nn.functional as F

"""
FILE = """
class Model(nn.Module):
    def __init__(self{parameters}):
        super().__init__()
{made}

    def forward(self, {takes}):
{body}


{sizes}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return [{initial}]
"""

B = "batch_size, dim = 128, 4096"
X = "torch.rand(batch_size, dim)"
IMAGE = "batch_size, channels, height, width = 16, 32, 128, 128"
I = "torch.rand(batch_size, channels, height, width)"  # noqa: E741
CONV = "nn.Conv2d(channels, out_channels, kernel)"
CONV_P, CONV_I = ", channels, out_channels, kernel", "channels, out_channels, kernel"
CONV_S = "batch_size, channels, height, width = 16, 8, 64, 64\nout_channels, kernel = 32, 3"
LIN_P, LIN_I, LIN_S = ", n_in, n_out", "n_in, n_out", "batch_size, n_in, n_out = 1024, 2048, 2048"
LX = "torch.rand(batch_size, n_in)"
VOLUME_S = "batch_size, channels, depth, height, width = 4, 8, 16, 32, 32\nout_channels, kernel = 16, 3"
V = "torch.rand(batch_size, channels, depth, height, width)"


def unary(expression: str, made: str = "") -> tuple[str, ...]:
    return ("", made, "x", f"return {expression}", B, X, "")


# parameters, statements of the constructor, forward's parameters, its statements, sizes, inputs, constructor's arguments
LEVEL_1 = {
    "Square_Product": (
        "",
        "",
        "A, B",
        "return torch.matmul(A, B)",
        "N = 2048 * 2",
        "torch.rand(N, N), torch.rand(N, N)",
        "",
    ),
    "Batched_Product": (
        "",
        "",
        "A, B",
        "return torch.bmm(A, B)",
        "batch_size, m, k, n = 128, 512, 1024, 2048",
        "torch.rand(batch_size, m, k), torch.rand(batch_size, k, n)",
        "",
    ),
    "Matrix_Vector": ("", "", "A, B", "return A @ B", "M, K = 2048, 1048576", "torch.rand(M, K), torch.rand(K, 1)", ""),
    "Product_4D": (
        "",
        "",
        "A, B",
        "return torch.einsum('bijl,lk->bijk', A, B)",
        "b, i, j, l, k = 8, 256, 512, 256, 768",
        "torch.rand(b, i, j, l), torch.rand(l, k)",
        "",
    ),
    "Diagonal_Product": (
        "",
        "",
        "A, B",
        "return torch.diag(A) @ B",
        "M, N = 4096, 4096",
        "torch.rand(N), torch.rand(N, M)",
        "",
    ),
    "Symmetric_Product": (
        "",
        "",
        "A, B",
        "return torch.matmul(A, B)",
        "N = 4096\n\n\ndef symmetric():\n    A = torch.rand(N, N)\n    return (A + A.T) / 2",
        "symmetric(), symmetric()",
        "",
    ),
    "Triangular_Product": (
        "",
        "",
        "A, B",
        "return torch.tril(torch.matmul(A, B))",
        "M = 4096",
        "torch.tril(torch.rand(M, M)), torch.tril(torch.rand(M, M))",
        "",
    ),
    "Transposed_Product": (
        "",
        "",
        "A, B",
        "return torch.matmul(A.T, B.T)",
        "M, K, N = 1024, 4096, 2048",
        "torch.rand(K, M), torch.rand(N, K)",
        "",
    ),
    "Matrix_Scalar": ("", "", "A, s", "return A * s", "M, N = 16384, 4096", "torch.rand(M, N), 3.14", ""),
    "ReLU": unary("torch.relu(x)"),
    "LeakyReLU": (
        ", slope: float = 0.01",
        "self.slope = slope",
        "x",
        "return F.leaky_relu(x, negative_slope=self.slope)",
        B,
        X,
        "",
    ),
    "Tanh": unary("torch.tanh(x)"),
    "LogSoftmax": (
        ", dim: int = 1",
        "self.dim = dim",
        "x",
        "return torch.log_softmax(x, dim=self.dim)",
        B.replace("dim", "width"),
        X.replace("dim", "width"),
        "",
    ),
    "Swish": unary("x * torch.sigmoid(x)"),
    "SELU": unary("torch.selu(x)"),
    "HardSigmoid": unary("F.hardsigmoid(x)"),
    "Softsign": unary("x / (1 + torch.abs(x))"),
    "ELU": (", alpha: float = 1.0", "self.alpha = alpha", "x", "return F.elu(x, alpha=self.alpha)", B, X, "1.0"),
    "Tanh_GELU": unary("0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))"),
    "BatchNorm": (
        ", n: int",
        "self.norm = nn.BatchNorm2d(num_features=n)",
        "x",
        "return self.norm(x)",
        IMAGE,
        I,
        "channels",
    ),
    "GroupNorm": (
        ", n: int, groups: int",
        "self.norm = nn.GroupNorm(num_groups=groups, num_channels=n)",
        "x",
        "return self.norm(x)",
        IMAGE + "\nnum_groups = 8",
        I,
        "channels, num_groups",
    ),
    "Frobenius_Norm": ("", "", "x", "return x / torch.norm(x, p='fro')", IMAGE, I, ""),
    "L1_Norm": unary("x / torch.mean(torch.abs(x), dim=1, keepdim=True)"),
    "LayerNorm": (
        ", shape: tuple",
        "self.norm = nn.LayerNorm(normalized_shape=shape)",
        "x",
        "return self.norm(x)",
        IMAGE,
        I,
        "(channels, height, width)",
    ),
    "MaxPool1d": (
        ", k: int, s: int = None, p: int = 0, return_indices: bool = False",
        "self.pool = nn.MaxPool1d(k, s, p, 1, return_indices)",
        "x",
        "return self.pool(x)",
        "batch_size, channels, length = 64, 192, 65536\nkernel, stride, padding = 8, 1, 4",
        "torch.rand(batch_size, channels, length)",
        "kernel, stride, padding, False",
    ),
    "AvgPool3d": (", k: int", "self.pool = nn.AvgPool3d(k)", "x", "return self.pool(x)", VOLUME_S, V, "kernel"),
    "Mean_Over": (
        ", dim: int",
        "self.dim = dim",
        "x",
        "return torch.mean(x, dim=self.dim)",
        "batch_size, dim1, dim2 = 128, 1024, 1024",
        "torch.rand(batch_size, dim1, dim2)",
        "1",
    ),
    "Argmax_Over": (
        ", dim: int",
        "self.dim = dim",
        "x",
        "return torch.argmax(x, dim=self.dim)",
        "batch_size, dim1, dim2 = 128, 1024, 1024",
        "torch.rand(batch_size, dim1, dim2)",
        "1",
    ),
    "Min_Over": (
        ", dim: int",
        "self.dim = dim",
        "x",
        "return torch.min(x, dim=self.dim)[0]",
        "batch_size, dim1, dim2 = 128, 1024, 1024",
        "torch.rand(batch_size, dim1, dim2)",
        "1",
    ),
    "Conv2d": (
        CONV_P + ", bias: bool = False",
        "self.conv = nn.Conv2d(channels, out_channels, (kernel, kernel + 2), bias=bias)",
        "x",
        "return self.conv(x)",
        CONV_S,
        I,
        CONV_I,
    ),
    "ConvTranspose3d": (
        CONV_P,
        "self.conv = nn.ConvTranspose3d(channels, out_channels, kernel, stride=2, padding=1, output_padding=1)",
        "x",
        "return self.conv(x)",
        VOLUME_S,
        V,
        CONV_I,
    ),
    "Depthwise_Separable": (
        CONV_P,
        "self.depthwise = nn.Conv2d(channels, channels, kernel, groups=channels)\nself.pointwise = nn.Conv2d(channels, out_channels, 1)",
        "x",
        "return self.pointwise(self.depthwise(x))",
        CONV_S,
        I,
        CONV_I,
    ),
    "Cumsum_Reverse": (
        ", dim",
        "self.dim = dim",
        "x",
        "return torch.cumsum(x.flip(self.dim), dim=self.dim).flip(self.dim)",
        "batch_size = 128\ninput_shape = (4000,)\ndim = 1",
        "torch.rand(batch_size, *input_shape)",
        "dim",
    ),
    "Cumprod": (
        ", dim",
        "self.dim = dim",
        "x",
        "return torch.cumprod(x, dim=self.dim)",
        "batch_size = 128\ninput_shape = (4000,)\ndim = 1",
        "torch.rand(batch_size, *input_shape)",
        "dim",
    ),
    "Masked_Cumsum": (
        ", dim",
        "self.dim = dim",
        "x, mask",
        "return torch.cumsum(x * mask, dim=self.dim)",
        "batch_size = 128\ninput_shape = (4000,)\ndim = 1",
        "torch.rand(batch_size, *input_shape), torch.randint(0, 2, (batch_size, *input_shape)).bool()",
        "dim",
    ),
    "Huber": (
        "",
        "",
        "predictions, targets",
        "return F.smooth_l1_loss(predictions, targets)",
        "batch_size = 32768\ninput_shape = (1024,)",
        "torch.rand(batch_size, *input_shape) * torch.rand(()), torch.rand(batch_size, *input_shape)",
        "",
    ),
    "Cross_Entropy": (
        "",
        "",
        "predictions, targets",
        "return F.cross_entropy(predictions, targets)",
        "batch_size, classes = 32768, 4096",
        "torch.rand(batch_size, classes), torch.randint(0, classes, (batch_size,))",
        "",
    ),
    "KL_Divergence": (
        "",
        "",
        "predictions, targets",
        "return F.kl_div(torch.log(predictions), targets, reduction='batchmean')",
        "batch_size = 8192\ninput_shape = (1024,)",
        "torch.rand(batch_size, *input_shape).softmax(dim=-1), torch.rand(batch_size, *input_shape).softmax(dim=-1)",
        "",
    ),
    "Triplet": (
        ", margin=1.0",
        "self.loss = nn.TripletMarginLoss(margin=margin)",
        "anchor, positive, negative",
        "return self.loss(anchor, positive, negative)",
        "batch_size, dim = 8192, 1024",
        "torch.rand(batch_size, dim), torch.rand(batch_size, dim), torch.rand(batch_size, dim)",
        "1.0",
    ),
    "Attention": (
        "",
        "",
        "Q, K, V",
        "return F.scaled_dot_product_attention(Q, K, V)",
        "b, h, n, d = 8, 16, 512, 64",
        "torch.rand(b, h, n, d), torch.rand(b, h, n, d), torch.rand(b, h, n, d)",
        "",
    ),
    "Half_Attention": (
        "",
        "",
        "Q, K, V",
        "return F.scaled_dot_product_attention(Q, K, V)",
        "b, h, n, d = 8, 16, 512, 64",
        ", ".join(["torch.rand(b, h, n, d, dtype=torch.float16)"] * 3),
        "",
    ),
}
LEVEL_2 = {
    "Conv_ReLU_Bias": (
        CONV_P + ", shape",
        f"self.conv = {CONV}\nself.bias = nn.Parameter(torch.randn(shape))",
        "x",
        "return torch.relu(self.conv(x)) + self.bias",
        CONV_S + "\nbias_shape = (out_channels, 1, 1)",
        I,
        CONV_I + ", bias_shape",
    ),
    "Transposed_Clamp_Scale": (
        CONV_P + ", scale",
        "self.conv = nn.ConvTranspose2d(channels, out_channels, kernel, stride=2)\nself.scale = scale",
        "x",
        "x = torch.clamp(self.conv(x), min=0.0, max=1.0) * self.scale\nreturn torch.clamp(x, min=0.0, max=1.0) / self.scale",
        CONV_S,
        I,
        CONV_I + ", 2.0",
    ),
    "Conv_Min_Tanh_Tanh": (
        CONV_P,
        f"self.conv = {CONV}",
        "x",
        "x = torch.min(self.conv(x), dim=1, keepdim=True)[0]\nreturn torch.tanh(torch.tanh(x))",
        CONV_S,
        I,
        CONV_I,
    ),
    "Conv3d_GroupNorm_Mean": (
        CONV_P,
        "self.conv = nn.Conv3d(channels, out_channels, kernel)\nself.norm = nn.GroupNorm(4, out_channels)",
        "x",
        "return self.norm(self.conv(x)).mean(dim=[1, 2, 3, 4])",
        VOLUME_S,
        V,
        CONV_I,
    ),
    "Linear_Sigmoid_Sum": (
        LIN_P,
        "self.linear = nn.Linear(n_in, n_out)",
        "x",
        "return torch.sum(torch.sigmoid(self.linear(x)), dim=1, keepdim=True)",
        LIN_S,
        LX,
        LIN_I,
    ),
    "Linear_Swish_Divide": (
        LIN_P,
        "self.matmul = nn.Linear(n_in, n_out)\nself.bn = nn.BatchNorm1d(n_out)\nself.bias = nn.Parameter(torch.randn((1,)))",
        "x",
        "x = self.bn(self.matmul(x)) + self.bias\nreturn x / 2.0 * torch.sigmoid(x)",
        LIN_S,
        LX,
        LIN_I,
    ),
    "Linear_Dropout_Softmax": (
        LIN_P + ", p",
        "self.matmul = nn.Linear(n_in, n_out)\nself.dropout = nn.Dropout(p)",
        "x",
        "return torch.softmax(self.dropout(self.matmul(x)), dim=1)",
        LIN_S,
        LX,
        LIN_I + ", 0.2",
    ),
    "Linear_LogSumExp_GELU": (
        LIN_P,
        "self.linear = nn.Linear(n_in, n_out)",
        "x",
        "x = torch.logsumexp(self.linear(x), dim=1, keepdim=True)\nreturn F.gelu(F.leaky_relu(x))",
        LIN_S,
        LX,
        LIN_I,
    ),
    "Linear_Residual_Detached": (
        LIN_P,
        "self.matmul = nn.Linear(n_in, n_out)",
        "x",
        "x = self.matmul(x)\noriginal_x = x.clone().detach()\nx = x * 0.5\nreturn x + original_x",
        LIN_S,
        LX,
        LIN_I,
    ),
    "Conv_BatchNorm_Scaling": (
        CONV_P,
        f"self.conv = {CONV}\nself.bn = nn.BatchNorm2d(out_channels)",
        "x",
        "return self.bn(self.conv(x)) * 2.0",
        CONV_S,
        I,
        CONV_I,
    ),
    "Conv_InstanceNorm_Divide": (
        CONV_P,
        f"self.conv = {CONV}\nself.norm = nn.InstanceNorm2d(out_channels)",
        "x",
        "return self.norm(self.conv(x)) / 2.0",
        CONV_S,
        I,
        CONV_I,
    ),
    "Conv3d_Softmax_MaxPools": (
        CONV_P,
        "self.conv = nn.Conv3d(channels, out_channels, kernel)\nself.pool = nn.MaxPool3d(2)",
        "x",
        "return self.pool(self.pool(torch.softmax(self.conv(x), dim=1)))",
        VOLUME_S,
        V,
        CONV_I,
    ),
    "Conv_Mish_Mish": (CONV_P, f"self.conv = {CONV}", "x", "return F.mish(F.mish(self.conv(x)))", CONV_S, I, CONV_I),
    "Transposed_Mean_Add_Softmax": (
        CONV_P,
        "self.conv = nn.ConvTranspose3d(channels, out_channels, kernel)\nself.bias = nn.Parameter(torch.randn(1, out_channels, 1, 1, 1))",
        "x",
        "x = self.conv(x).mean(dim=2, keepdim=True) + self.bias\nreturn torch.tanh(torch.softmax(x, dim=1)) * 2.0",
        VOLUME_S,
        V,
        CONV_I,
    ),
    "Linear_Max_Subtract_GELU": (
        LIN_P + ", dim",
        "self.linear = nn.Linear(n_in, n_out)\nself.dim = dim",
        "x",
        "x = torch.max(self.linear(x), dim=self.dim, keepdim=True).values\nreturn F.gelu(x - x.mean(dim=1, keepdim=True))",
        LIN_S,
        LX,
        LIN_I + ", 1",
    ),
    "Add_In_Two": (
        LIN_P,
        "self.linear = nn.Linear(n_in, n_out)\nself.norm = nn.InstanceNorm2d(n_out)",
        "x, y",
        "x = self.norm(self.linear(x).unsqueeze(1).unsqueeze(1)).squeeze(1).squeeze(1)\nreturn (x + y) * y",
        LIN_S,
        LX + ", torch.rand(batch_size, n_out)",
        LIN_I,
    ),
}
HEADS = "batch_size, length, width, heads = 8, 128, 256, 8"
SEQUENCE = "torch.rand(batch_size, length, width)"
LEVEL_3 = {
    "MLP": (
        ", n_in, hidden, n_out",
        "sizes = [n_in, *hidden, n_out]\nlayers = []\nfor a, b in zip(sizes, sizes[1:]):\n    layers += [nn.Linear(a, b), nn.ReLU()]\nself.network = nn.Sequential(*layers[:-1])",
        "x",
        "return self.network(x)",
        "batch_size, n_in, n_out = 128, 2048, 1024\nhidden = [1024, 512]",
        "torch.rand(batch_size, n_in)",
        "n_in, hidden, n_out",
    ),
    "Small_LeNet": (
        ", classes",
        "self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)\nself.fc1, self.fc2 = nn.Linear(256, 84), nn.Linear(84, classes)",
        "x",
        "x = F.max_pool2d(F.relu(self.conv1(x)), 2)\nx = F.max_pool2d(F.relu(self.conv2(x)), 2)\nx = x.view(-1, 256)\nreturn self.fc2(F.relu(self.fc1(x)))",
        "batch_size, classes = 1024, 20",
        "torch.rand(batch_size, 1, 28, 28)",
        "classes",
    ),
    "Bottleneck": (
        ", n, planes",
        "self.a, self.b, self.c = nn.Conv2d(n, planes, 1, bias=False), nn.Conv2d(planes, planes, 3, padding=1, bias=False), nn.Conv2d(planes, n, 1, bias=False)\nself.na, self.nb, self.nc = nn.BatchNorm2d(planes), nn.BatchNorm2d(planes), nn.BatchNorm2d(n)",
        "x",
        "y = F.relu(self.na(self.a(x)))\ny = F.relu(self.nb(self.b(y)))\nreturn F.relu(self.nc(self.c(y)) + x)",
        IMAGE,
        I,
        "channels, 16",
    ),
    "Fire": (
        ", n, squeeze, expand",
        "self.squeeze = nn.Conv2d(n, squeeze, 1)\nself.one, self.three = nn.Conv2d(squeeze, expand, 1), nn.Conv2d(squeeze, expand, 3, padding=1)\nself.activation = nn.ReLU(inplace=True)",
        "x",
        "x = self.activation(self.squeeze(x))\nreturn torch.cat([self.activation(self.one(x)), self.activation(self.three(x))], 1)",
        IMAGE,
        I,
        "channels, 6, 64",
    ),
    "Dense_Block": (
        ", layers, n, growth",
        "self.layers = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(n + i * growth), nn.ReLU(inplace=True), nn.Conv2d(n + i * growth, growth, 3, padding=1, bias=False), nn.Dropout(0.0)) for i in range(layers))",
        "x",
        "features = [x]\nfor layer in self.layers:\n    x = layer(x)\n    features.append(x)\n    x = torch.cat(features, 1)\nreturn x",
        IMAGE,
        I,
        "4, channels, 16",
    ),
    "Inverted_Residual": (
        ", n, expand",
        "hidden = n * expand\nself.conv = nn.Sequential(nn.Conv2d(n, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True), nn.Conv2d(hidden, hidden, 3, 1, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True), nn.Conv2d(hidden, n, 1, bias=False), nn.BatchNorm2d(n))",
        "x",
        "return x + self.conv(x)",
        IMAGE,
        I,
        "channels, 4",
    ),
    "Channel_Shuffle": (
        ", n, groups",
        "self.groups = groups\nself.conv = nn.Conv2d(n, n, 1, groups=groups)",
        "x",
        "b, c, h, w = self.conv(x).size()\nx = self.conv(x).view(b, self.groups, c // self.groups, h, w)\nreturn x.transpose(1, 2).contiguous().view(b, -1, h, w)",
        IMAGE,
        I,
        "channels, 4",
    ),
    "U_Block": (
        ", n",
        "self.down, self.up = nn.Conv2d(n, 2 * n, 3, padding=1), nn.ConvTranspose2d(2 * n, n, 2, stride=2)\nself.last = nn.Conv2d(2 * n, 4, 1)",
        "x",
        "y = F.max_pool2d(torch.softmax(self.down(x), dim=-1), 2)\nreturn self.last(torch.cat([self.up(y), x], dim=1))",
        IMAGE,
        I,
        "channels",
    ),
    "Squeeze_Excite": (
        ", n",
        "self.fc = nn.Sequential(nn.Linear(n, n // 4), nn.SiLU(), nn.Linear(n // 4, n), nn.Sigmoid())",
        "x",
        "weights = self.fc(F.adaptive_avg_pool2d(x, (1, 1)).flatten(1))\nreturn x * weights[:, :, None, None]",
        IMAGE,
        I,
        "channels",
    ),
    "LSTM": (
        ", n_in, hidden, layers",
        "self.lstm = nn.LSTM(n_in, hidden, layers, batch_first=True, dropout=0.0)\nself.fc = nn.Linear(hidden, 10)",
        "x, h0, c0",
        "out, _ = self.lstm(x, (h0, c0))\nreturn self.fc(out[:, -1, :])",
        "batch_size, length, n_in, hidden, layers = 10, 128, 64, 64, 3",
        "torch.rand(batch_size, length, n_in), torch.rand(layers, batch_size, hidden), torch.rand(layers, batch_size, hidden)",
        "n_in, hidden, layers",
    ),
    "LSTM_Random_State": (
        ", n_in, hidden",
        "self.lstm = nn.LSTM(n_in, hidden, batch_first=True)\nself.hidden = hidden",
        "x",
        "h0, c0 = torch.randn(1, x.size(0), self.hidden), torch.randn(1, x.size(0), self.hidden)\nreturn self.lstm(x, (h0, c0))[0]",
        "batch_size, length, n_in, hidden = 10, 128, 64, 64",
        "torch.rand(batch_size, length, n_in)",
        "n_in, hidden",
    ),
    "GRU_Both_Ways": (
        ", n_in, hidden",
        "self.gru = nn.GRU(n_in, hidden, 2, True, False, bidirectional=True)\nself.h0 = torch.randn((4, 10, hidden))",
        "x, h0",
        "out, h = self.gru(x, h0)\nreturn h",
        "batch_size, length, n_in, hidden = 10, 128, 64, 64",
        "torch.rand(length, batch_size, n_in), torch.rand(4, batch_size, hidden)",
        "n_in, hidden",
    ),
    "Causal_Attention": (
        ", width, heads, length",
        "self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads\nself.register_buffer('mask', torch.tril(torch.ones(length, length)).view(1, 1, length, length))",
        "x",
        "B, T, C = x.size()\nq, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.qkv(x).split(C, dim=2))\natt = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))\natt = F.softmax(att.masked_fill(self.mask[:, :, :T, :T] == 0, float('-inf')), dim=-1)\nreturn self.out((att @ v).transpose(1, 2).contiguous().view(B, T, C))",
        HEADS,
        SEQUENCE,
        "width, heads, length",
    ),
    "ReLU_Attention": (
        ", width, heads, length",
        "self.qkv, self.heads = nn.Linear(width, 3 * width), heads\nself.register_buffer('bias', torch.tril(torch.ones(length, length)))",
        "x",
        "B, T, C = x.size()\nq, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.qkv(x).split(C, dim=2))\natt = (q @ k.transpose(-2, -1)).masked_fill(self.bias[:T, :T] == 0, float('-inf'))\nreturn (F.relu(att) @ v).transpose(1, 2).reshape(B, T, C)",
        HEADS,
        SEQUENCE,
        "width, heads, length",
    ),
    "Encoder_Layer": (
        ", width, heads, length",
        "self.layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0)\nself.token = nn.Parameter(torch.zeros(1, 1, width))",
        "x",
        "x = torch.cat((self.token.expand(x.size(0), -1, -1), x), dim=1)\nreturn self.layer(x)[:, 0]",
        HEADS,
        SEQUENCE,
        "width, heads, length",
    ),
    "Patches": (
        ", width",
        "self.patch, self.position = nn.Linear(3 * 64, width), nn.Parameter(torch.randn(1, 64, width))\nself.norm = nn.LayerNorm(width)",
        "x",
        "x = x.unfold(2, 8, 8).unfold(3, 8, 8).reshape(x.shape[0], -1, 3 * 64)\nreturn self.norm(self.patch(x) + self.position).mean(dim=1)",
        "batch_size, width = 8, 128",
        "torch.rand(batch_size, 3, 64, 64)",
        "width",
    ),
    "Scan": (
        ", width",
        "self.A, self.B = nn.Parameter(torch.randn(4, width)), nn.Parameter(torch.randn(4, width))",
        "x",
        "cumulative = torch.cumsum(x * self.A[0], dim=1)\ndecay = torch.exp(-F.softplus(cumulative))\nreturn torch.einsum('blw,nw->bln', decay * x, self.B)",
        HEADS,
        SEQUENCE,
        "width",
    ),
    "Clusters": (
        ", clusters, width",
        "self.clusters = nn.Parameter((1 / math.sqrt(width)) * torch.randn(width, clusters))\nself.bn = nn.BatchNorm1d(clusters)",
        "x, mask=None",
        "B, T, W = x.shape\na = F.softmax(self.bn(x.reshape(-1, W) @ self.clusters), dim=1).view(B, T, -1)\nv = torch.matmul(a.transpose(1, 2), x)\nreturn F.normalize(v, p=2, dim=2).reshape(B, -1)",
        HEADS,
        SEQUENCE,
        "32, width",
    ),
}
LEVELS = (LEVEL_1, LEVEL_2, LEVEL_3)


def write(folder: Path, levels: tuple[int, ...] = (1, 2, 3)) -> int:
    """A checkout of these files; how many."""
    count = 0
    for level in levels:
        place = folder / "KernelBench" / f"level{level}"
        place.mkdir(parents=True)
        for number, (name, parts) in enumerate(LEVELS[level - 1].items(), 1):
            parameters, made, takes, body, sizes, inputs, initial = parts
            made, body = ("\n".join("        " + line for line in text.splitlines()) for text in (made, body))
            fields = {"parameters": parameters, "made": made, "takes": takes, "body": body}
            text = HEAD + FILE.format(**fields, sizes=sizes, inputs=inputs, initial=initial)
            (place / f"{number}_{name}.py").write_text(text)
            count += 1
    return count


def main() -> None:
    levels = tuple(int(argument) for argument in sys.argv[1:]) or (1, 2, 3)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), levels)
        found = []
        for examined in examine_all(entries(Path(folder), levels), Effort(), parts=(3,)):
            found.append(examined)
            print_examined(examined)
    print_counts(found)


if __name__ == "__main__":
    main()
