"""Rows between tuned ones, deterministic and batch-invariant products on a real GPU. The pack is compiled here."""

import functools
from dataclasses import replace

import made_pack
import pytest
import torch

import cuda_l2
from cuda_l2 import contract
from cuda_l2.commands import library
from cuda_l2.library.deploy import batches, calls, choices, dispatch, pack
from cuda_l2.library.deploy.choices import Choice
from cuda_l2.library.deploy.invariant import ROWS, differing
from cuda_l2.library.deploy.recipes import candidate
from cuda_l2.library.table import family_of, schedule_text
from cuda_l2.records import Gemm, Layout

pytestmark = pytest.mark.gpu
TABLE = (
    *("512,2048,4096,tn,fp32,programmatic", "64,1024,1024,nn,fp32,programmatic", "64,1024,512,tn,fp32,cold"),
    *("512,4096,64,tn,fp32,programmatic", "128,12288,8192,tn,fp32,plain", "128,16384,512,tn,fp32,programmatic"),
    *("4096,16384,1024,tn,fp32,cold", "128,12288,512,nn,fp32,cold", "128,16384,1024,nn,fp32,plain"),
)
SHAPES = ("1x4096x4096:tn:bf16", "1x1536x8960:tn:bf16", "1x1024x2048:tn", "1x3072x1024:bf16")


@pytest.fixture(scope="module")
def served(gpu, tmp_path_factory):
    """The recipes of TABLE's rows, which are the pack's kernels."""
    if not gpu.target.runs("sm_90a"):
        pytest.skip("the pack is for Hopper GPUs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_L2_HOME", str(tmp_path_factory.mktemp("home")))
        wanted = made_pack.recipes_of(tmp_path_factory.mktemp("recipes"), *TABLE)
        made = pack.build(wanted, tmp_path_factory.mktemp("pack"))
        patch.setattr(dispatch, "installed", lambda: made)
        patch.setattr(pack, "installed", lambda: made)
        cuda_l2.matmul(torch.ones(8, 8, device="cuda").half(), torch.ones(8, 8, device="cuda").half())
        dispatch.forget()
        yield wanted
    dispatch.forget()


def operands(gemm: Gemm, seed: int = 0, whole: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """whole: numbers whose sums fp32 holds exactly."""
    generator, dtype = torch.Generator("cuda").manual_seed(seed), getattr(torch, gemm.dtype)

    def drawn(*shape: int) -> torch.Tensor:
        if whole:
            return torch.randint(-2, 3, shape, generator=generator, device="cuda").to(dtype)
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    tn = gemm.layout is Layout.TN
    return drawn(gemm.m, gemm.k), drawn(gemm.n, gemm.k).t() if tn else drawn(gemm.k, gemm.n)


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product, rounded once."""
    return (a.float() @ b.float()).to(a.dtype)


def launched() -> int:
    return calls.native().counts()["launched"]


def chosen(wanted, row: int, gemm: Gemm) -> Choice:
    """A choice for a shape by the schedule of a row of TABLE."""
    m, n, k, layout, *_ = TABLE[row].split(",")
    recipe = next(
        recipe
        for recipe in wanted
        if str(recipe.gemm).startswith(f"{m}x{n}x{k}:tn" if layout == "tn" else f"{m}x{n}x{k}")
    )
    made = candidate(family_of(recipe.family), dict(recipe.candidate.schedule), gemm, dispatch.target_of(0))
    assert made
    return Choice(str(gemm), contract.kernel_id(made.source), recipe.family, schedule_text(made.schedule), 1.0, 2.0)


@pytest.mark.parametrize(
    ("row", "shape", "lower", "rows"),
    [
        (0, "256x4096x4096:tn:bf16", 128, (129, 192, 200, 255)),
        (1, "64x1024x1024", 32, (33, 40, 63)),
        (6, "4096x16384x1024:tn", 2048, (2049, 3000, 4095)),
    ],
)
def test_rows_between_tuned_ones_are_computed_by_the_larger_ones_schedule(served, row, shape, lower, rows) -> None:
    upper = Gemm.parse(shape)
    choice, place = chosen(served, row, upper), choices.place_of(0, dispatch.pack().identity)
    choices.add(place, [choice, replace(choice, shape=str(replace(upper, m=lower)))])
    dispatch.forget()
    known = dispatch.known(0)
    served = [m for m in rows if choices.between(known, replace(upper, m=m))]
    assert served
    for m in served:
        a, b = operands(replace(upper, m=m))
        before = launched()
        assert torch.equal(cuda_l2.matmul(a, b), exact(a, b)), m
        assert launched() == before + 1, m
    before = launched()
    cuda_l2.matmul(*operands(replace(upper, m=lower - 1)))
    assert launched() == before


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_every_batch_and_place(served, shape) -> None:
    a, b = operands(replace(Gemm.parse(shape), m=ROWS[-1]), whole=False)
    before = launched()
    assert not list(differing(functools.partial(cuda_l2.matmul, batch_invariant=True), a, b))
    assert launched() > before + 3 * len(ROWS)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_invariant_product_is_exact_and_rounded_once(served, shape) -> None:
    for m in ROWS:
        a, b = operands(replace(Gemm.parse(shape), m=m), seed=m)
        assert torch.equal(cuda_l2.matmul(a, b, batch_invariant=True), exact(a, b)), m


def test_a_batch_invariant_model_keeps_a_rows_bits_also_in_a_graph_and_compiled(served) -> None:
    layers = torch.nn.Linear(1024, 1536), torch.nn.GELU(), torch.nn.Linear(1536, 1024, bias=False)
    model = cuda_l2.accelerate(torch.nn.Sequential(*layers).cuda().bfloat16(), batch_invariant=True)
    x = torch.randn(300, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        whole, few = model(x), model(x[7:12])
        assert torch.equal(few, whole[7:12])
        assert torch.allclose(whole, layers[2](torch.nn.functional.gelu(layers[0](x))))
        compiled = torch.compile(lambda x, b: cuda_l2.matmul(x, b, batch_invariant=True) + 1, fullgraph=True)
        weight = layers[2].weight.t()
        assert torch.equal(
            compiled(torch.ones(5, 1536, device="cuda").bfloat16(), weight)[0],
            compiled(torch.ones(90, 1536, device="cuda").bfloat16(), weight)[77],
        )
        graph, taken = torch.cuda.CUDAGraph(), x[:9].clone()
        with torch.cuda.graph(graph):
            result = model(taken)
        taken.copy_(x[40:49])
        graph.replay()
        assert torch.equal(result, whole[40:49])


def test_what_no_kernel_serves_for_every_m_raises(served) -> None:
    a, b = operands(Gemm.parse("16x1024x520:tn:bf16"))
    with pytest.raises(cuda_l2.UserError, match="no kernel serves N=1024 and K=520 for every M"):
        cuda_l2.matmul(a, b, batch_invariant=True)
    with pytest.raises(cuda_l2.UserError, match="both be fp16 or both be bf16"):
        cuda_l2.matmul(a.float(), b.float(), batch_invariant=True)
    with pytest.raises(cuda_l2.UserError, match="of rank 2"):
        cuda_l2.matmul(a[None], torch.ones(1, 520, 1024, device="cuda").bfloat16(), batch_invariant=True)


def test_a_deterministic_product_does_not_depend_on_what_was_tuned(served) -> None:
    gemm = Gemm.parse("64x1024x512:tn:bf16")
    a, b = operands(gemm, whole=False)
    place = choices.place_of(0, dispatch.pack().identity)
    results = []
    for choice in (Choice(str(gemm)), chosen(served, 2, gemm)):
        choices.add(place, [choice])
        dispatch.forget()
        before = launched()
        results += [cuda_l2.matmul(a, b, deterministic=True) for _ in range(3)]
        assert launched() == before + 3
    assert all(torch.equal(result, results[0]) for result in results)
    other, weight = operands(Gemm.parse("65x1024x512:tn:bf16"), whole=False)
    assert torch.equal(cuda_l2.matmul(other, weight, deterministic=True), torch.matmul(other, weight))


def test_the_command_prints_what_the_same_bits_cost(served, capsys) -> None:
    library.invariant("1-64x4096x4096:tn:bf16")
    first, head, *lines = capsys.readouterr().out.splitlines()
    assert first == "rows have the same bits in every batch" and all(name in head for name in batches.COLUMNS)
    assert len(lines) == 7 and all(line.count(" us") == 3 for line in lines)
