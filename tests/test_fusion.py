"""kernelbench/fusion.py: parts of a module that a kernel could replace, and the module around them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from cuda_l2.kernelbench.fusion import Kind, NotTraceable, plan
from cuda_l2.tasks.tolerance import bounds


class ConvNet(nn.Module):
    """Convolutions with batch norm and in-place activations, a residual, pooling, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.norm2, self.relu = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.relu(self.norm(self.first(x)))
        x = self.relu(self.norm2(self.second(x)) + x)
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Block(nn.Module):
    """A transformer's block, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, x):
        q, k, v = (part.view(2, 10, 4, 4).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 10, 16)
        x = x + self.out(attended)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Forks(nn.Module):
    """x sigmoid(x), a value that is wanted twice, two results, and what stays PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lstm = nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x, out):
        y = self.linear(x)
        y = y * torch.sigmoid(y) + out.exp()
        z = torch.tanh(y).abs()
        sequence, _ = self.lstm(z)
        values, indices = sequence.max(-1)
        return y, torch.softmax(2 * sequence + 1, -1).clamp(0, 0.5), values * 2, indices


MODULES = {
    "convolutions": (ConvNet, (2, 3, 12, 12)),
    "transformer block": (Block, (2, 10, 16)),
    "forks": (Forks, (2, 6, 8), (2, 6, 8)),
}


def example(name: str):
    torch.manual_seed(3)
    make, *shapes = MODULES[name]
    return make().eval(), [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("least", [1, 2])
def test_the_patched_module_computes_what_the_module_did(name, least) -> None:
    module, inputs = example(name)
    wanted = module(*inputs)
    planned = plan(copy.deepcopy(module), inputs, least=least)
    found = planned.module(*inputs)
    for right, result in zip([wanted] if isinstance(wanted, torch.Tensor) else wanted, found, strict=False):
        torch.testing.assert_close(result if isinstance(wanted, tuple) else found, right)
    assert planned.parts and all(len(part.operators) >= least for part in planned.parts)


@pytest.mark.parametrize("name", MODULES)
def test_a_part_can_be_replaced_by_what_computes_the_same(name) -> None:
    module, inputs = example(name)
    planned = plan(module, inputs)
    with torch.no_grad():
        wanted = planned.module(*inputs)
        for part in planned.parts:
            calls = []

            def equivalent(*tensors, part=part, calls=calls):
                names = [tensor.name for tensor in (*part.task.inputs, *part.task.weights)]
                for tensor, declared in zip(tensors, (*part.task.inputs, *part.task.weights), strict=True):
                    assert tuple(tensor.shape) == declared.shape and str(tensor.dtype) == f"torch.{declared.dtype}"
                # another way to the same numbers: in fp64
                result = part.module(*[t.double() if t.dtype.is_floating_point else t for t in tensors])
                calls.append(dict(zip(names, tensors, strict=True)))
                return result.to(getattr(torch, part.task.outputs[0].dtype))

            planned.replace(part.name, equivalent)
            found = planned.module(*inputs)
            assert len(calls) == 1
            for right, result in zip(wanted, found, strict=True):
                torch.testing.assert_close(result, right)
            (limit,) = bounds(lambda part=part, **tensors: (part.module(*tensors.values()),), calls[0])
            assert limit.violation(equivalent(*calls[0].values())) == ""
            planned.replace(part.name, lambda *tensors, part=part: part.module(*tensors) + 1)
            changed = planned.module(*inputs)
            assert any(not torch.allclose(a, b) for a, b in zip(wanted, changed, strict=True)), "it is really called"
            planned.replace(part.name, part.module)


def test_contractions_take_their_epilogue_and_norms_what_surrounds_them() -> None:
    parts = {part.name: (part.kind, part.operators) for part in plan(*example("convolutions")).parts}
    norm = "native_batch_norm_legit_no_training"
    assert list(parts.values()) == [
        (Kind.CONTRACTION, ("conv2d", norm, "relu")),
        (Kind.CONTRACTION, ("conv2d", norm, "add", "relu")),
    ]
    kinds = [(part.kind, part.operators) for part in plan(*example("transformer block")).parts]
    assert (Kind.CONTRACTION, ("linear", "gelu")) in kinds and (Kind.CONTRACTION, ("linear", "add")) in kinds
    kinds = [(part.kind, part.operators) for part in plan(*example("forks")).parts]
    assert (Kind.CONTRACTION, ("linear", "sigmoid", "mul", "exp", "add")) in kinds
    assert (Kind.ELEMENTWISE, ("tanh", "abs")) in kinds
    assert (Kind.NORMALISATION, ("mul", "add", "softmax", "clamp")) in kinds


def test_a_part_is_a_task_with_weights_by_name_and_flops() -> None:
    module, inputs = example("convolutions")
    part = plan(module, inputs, name="kernelbench/level3/1_Net", revision="0123abcd").parts[1].task
    assert str(part) == ("kernelbench/level3/1_Net/part_1-conv2d-native_batch_norm_legit_no_training-add-relu@0123abcd")
    assert {tensor.name for tensor in part.weights} == {
        *("second_weight", "second_bias", "norm2_weight", "norm2_bias", "norm2_running_mean", "norm2_running_var"),
    }
    assert [str(tensor) for tensor in part.outputs] == ["out float32[2, 8, 12, 12]"]
    assert part.flops == 2 * 2 * 8 * 8 * 9 * 12 * 12


def test_state_and_randomness_stay_pytorch() -> None:
    class Training(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.norm(torch.relu(x)).abs()).exp()

    module, x = Training(), torch.randn(6, 8)
    planned = plan(module, [x], least=1)
    inside = {operator for part in planned.parts for operator in part.operators}
    assert inside == {"relu", "abs", "exp"}
    before = module.norm.running_mean.clone()
    torch.manual_seed(1)
    first = planned.module(x)
    assert not torch.equal(first, planned.module(x)), "dropout still drops"
    assert not torch.equal(before, module.norm.running_mean), "statistics still move"


def test_weights_are_the_modules_own() -> None:
    module, inputs = example("transformer block")
    planned = plan(module, inputs)
    before = planned.module(*inputs)
    with torch.no_grad():
        module.up.weight.mul_(2)
    assert not torch.equal(before, planned.module(*inputs))


def test_a_module_whose_way_depends_on_values_is_refused_with_a_reason() -> None:
    class Branches(nn.Module):
        def forward(self, x):
            return x.relu() if x.sum() > 0 else x.exp()

    with pytest.raises(NotTraceable) as error:
        plan(Branches(), [torch.randn(4)])
    assert "\n" not in str(error.value) and len(str(error.value)) > 10


def test_a_part_that_is_not_there_cannot_be_replaced() -> None:
    with pytest.raises(KeyError):
        plan(*example("forks")).replace("part_99", torch.relu)
