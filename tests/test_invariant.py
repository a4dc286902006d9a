"""Batch-invariant products without a GPU: one kernel for every number of rows, what is refused, and the check."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import made_pack
import pytest
import torch
from fake_driver import FakeDriver, fake_driver
from made_pack import TARGET, ListedPack, parameter_sizes, recipes_of

import cuda_l2
from cuda_l2 import contract
from cuda_l2.library.deploy import calls, dispatch, invariant, rules
from cuda_l2.library.deploy.entries import DETERMINISTIC
from cuda_l2.library.deploy.invariant import ROWS, differing
from cuda_l2.library.deploy.native import Native
from cuda_l2.records import Gemm
from cuda_l2.system.errors import UserError

SEVERAL = tuple(
    f"{shape},fp32,{edge},sm90_persistent"
    for shape in ("512,4096,64,tn", "128,12288,8192,tn", "128,16384,512,tn", "4096,16384,4096,tn")
    for edge in ("plain", "programmatic", "cold")
)
GEMM = Gemm.parse("1x1024x512:tn:bf16")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> ListedPack:
    return ListedPack(recipes_of(tmp_path_factory.mktemp("pack"), *SEVERAL))


@pytest.fixture
def driver(found, tmp_path, monkeypatch) -> Iterator[tuple[FakeDriver, Native]]:
    """Device 0 with the pack's kernels, for tensors of this machine's memory."""
    monkeypatch.setenv("CUDA_L2_HOME", str(tmp_path))
    made_pack.install(found, monkeypatch)
    monkeypatch.setattr(invariant, "_why_not", lambda a, b: "")
    made = rules.invariant(GEMM, TARGET, found)
    assert made
    with fake_driver() as (fake, library):
        fake.parameters(parameter_sizes(contract.parse_cuda(made.source).plan(GEMM, TARGET.sms)))
        library.on_miss(dispatch.serve)
        yield fake, library
    made_pack.forget()


def operands(m: int, n: int = GEMM.n, k: int = GEMM.k) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(m, k, dtype=torch.bfloat16), torch.ones(n, k, dtype=torch.bfloat16).t()


def test_one_kernel_with_one_schedule_serves_every_number_of_rows(driver, found) -> None:
    fake, library = driver
    for m in ROWS:
        a, b = operands(m)
        assert calls.matmul(a, b, batch_invariant=True).shape == (m, GEMM.n)
    launches = fake.launches
    assert len(launches) == len(ROWS) and fake["module_count"] == 1 and library.counts()["vendor"] == 0
    assert [launch.words[3] for launch in launches] == list(ROWS)
    assert len({(launch.function, *launch.block, *launch.cluster, launch.shared) for launch in launches}) == 1
    assert len({tuple(launch.words[6:9]) for launch in launches}) == 1  # the order of tiles
    assert launches[0].grid[0] < launches[-1].grid[0] <= TARGET.sms


def test_a_tuned_shape_and_its_batch_invariant_kernel_are_kept_apart(driver) -> None:
    fake, library = driver
    a, b = operands(64)
    for _ in range(2):
        assert torch.equal(calls.matmul(a, b), a @ b)
        calls.matmul(a, b, batch_invariant=True)
    assert fake["launch_count"] == 2 and library.counts()["vendor"] == 2 and library.counts()["resolved"] == 2


@pytest.mark.parametrize("m", [1, 63, 64, 65, 4097, 1_000_000])
def test_the_contract_of_the_one_kernel_accepts_every_number_of_rows(found, m) -> None:
    made = rules.invariant(replace(GEMM, m=m), TARGET, found)
    assert made is rules.invariant(GEMM, TARGET, found) and made.family == "sm90_persistent"
    plan = contract.parse_cuda(made.source).plan(replace(GEMM, m=m), TARGET.sms)
    assert not plan.workspaces and len(plan.launches) == 1 and not plan.launches[0].coresident


def test_the_choice_follows_the_model_and_not_the_order_of_the_pack(found) -> None:
    turned = ListedPack([])
    turned.kernels = dict(reversed(found.kernels.items()))
    for shape in ("1x1024x512:tn:bf16", "1x28672x4096:tn", "1x4096x14336:tn:bf16"):
        first, second = (rules.invariant(Gemm.parse(shape), TARGET, each) for each in (found, turned))
        assert first and second and first.schedule == second.schedule


@pytest.mark.parametrize(("n", "k"), [(1024, 100), (1024, 520), (12, 512), (1020, 512)])
def test_what_no_kernel_serves_for_every_m_raises(driver, n, k) -> None:
    fake, library = driver
    with pytest.raises(UserError, match=f"no kernel serves N={n} and K={k} for every M"):
        calls.matmul(*operands(16, n, k), batch_invariant=True)
    assert fake["launch_count"] == 0 == library.counts()["vendor"]


def test_rows_that_are_apart_are_copied(driver) -> None:
    fake, _ = driver
    _, b = operands(16)
    wide = torch.ones(16, 2 * GEMM.k, dtype=torch.bfloat16)
    odd = torch.ones(16 * GEMM.k + 1, dtype=torch.bfloat16)[1:].view(16, GEMM.k)
    for a in (wide[:, : GEMM.k], odd, wide.view(2 * GEMM.k, 16)[: GEMM.k].t()):
        assert calls.matmul(a, b, batch_invariant=True).shape == (16, GEMM.n)
    assert fake["launch_count"] == 3


def test_ranks_biases_and_layers_are_served(driver) -> None:
    fake, _ = driver
    a, b = operands(6)
    bias = torch.full((GEMM.n,), 2.0, dtype=torch.bfloat16)
    assert calls.matmul(a.view(2, 3, -1), b, batch_invariant=True).shape == (2, 3, GEMM.n)
    assert calls.matmul(a[0], b, batch_invariant=True).shape == (GEMM.n,)
    assert calls.linear(a, b.t(), bias, batch_invariant=True).shape == (6, GEMM.n)
    layer = torch.nn.Linear(GEMM.k, GEMM.n, dtype=torch.bfloat16)
    cuda_l2.accelerate(torch.nn.Sequential(layer), batch_invariant=True)
    with torch.no_grad():
        layer(a)
    assert fake["launch_count"] == 4
    cuda_l2.accelerate(layer)
    with torch.no_grad():
        assert torch.equal(layer(a), torch.nn.functional.linear(a, layer.weight, layer.bias))
    assert fake["launch_count"] == 4


def test_gradients_are_those_of_torch(driver) -> None:
    fake, _ = driver
    a, b = (tensor.requires_grad_() for tensor in operands(16))
    calls.matmul(a, b, batch_invariant=True).backward(torch.ones(16, GEMM.n, dtype=torch.bfloat16))
    assert fake["launch_count"] == 1
    assert torch.equal(a.grad, torch.full_like(a, GEMM.n)) and torch.equal(b.grad, torch.full_like(b, 16))


def test_without_a_gpu_or_for_another_type_the_call_says_why() -> None:
    half = torch.ones(8, 64, dtype=torch.float16)
    for a, b, says in (
        *((half, half.t(), "one CUDA device"), (half, half.view(64, 8, 1), "one CUDA device")),
        *((half.float(), half.float().t(), "one CUDA device"), (half, half.t().float(), "one CUDA device")),
    ):
        with pytest.raises(UserError, match=says):
            calls.matmul(a, b, batch_invariant=True)
    with pytest.raises(UserError, match="out cannot be given"):
        calls.matmul(half, half.t(), out=torch.empty(8, 8).half(), batch_invariant=True)


def test_what_torch_refuses_and_what_has_no_rows_is_torchs() -> None:
    half = torch.ones(8, 64, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        calls.matmul(half, half, batch_invariant=True)
    with pytest.raises(TypeError):
        calls.matmul(half, None, batch_invariant=True)
    assert calls.matmul(half[:0], half.t(), batch_invariant=True).shape == (0, 8)


def rows_and_weights(rows: int = 600) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(-2, 3, shape, generator=generator).half() for shape in ((rows, 8), (8, 8)))


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.float() @ b.float()).half()


def test_the_check_passes_an_exact_product() -> None:
    assert not list(differing(exact, *rows_and_weights()))


@pytest.mark.parametrize(
    ("wrong", "finds"),
    [
        (lambda a, b: exact(a, b) + (a.shape[0] < 65), "64 rows from row 0 on"),
        (lambda a, b: exact(a, b) + (torch.arange(a.shape[0]) >= 64).half()[:, None], "65 rows from row 535 on"),
        (
            lambda a, b: exact(a, b) + torch.nn.functional.pad(torch.ones(1, 8).half(), (0, 0, 0, a.shape[0] - 1)),
            "16 rows in another order",
        ),
        (lambda a, b: exact(a, b) * (-1 if a.shape[0] == 511 else 1), "511 rows from row 44 on"),
    ],
    ids=["few rows", "place", "first row", "one size"],
)
def test_the_check_finds_a_product_whose_bits_depend_on_the_batch(wrong, finds) -> None:
    assert finds in list(differing(wrong, *rows_and_weights()))


def test_the_operator_keeps_torchs_rules() -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4)
    by_rule = torch.ops.cuda_l2.product_by.default
    assert set(torch.library.opcheck(by_rule, (a, b, DETERMINISTIC)).values()) == {"SUCCESS"}
    operands = [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in ((2, 3, 8), (8, 5))]
    deterministic = functools.partial(calls.matmul, deterministic=True)
    assert torch.autograd.gradcheck(deterministic, operands) and torch.autograd.gradgradcheck(deterministic, operands)
    compiled = torch.compile(deterministic, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), a @ b)
