"""The op on a real GPU: results, graphs, streams, threads, tuning. The pack has a few kernels, compiled here."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_decoder import LLAMA
from test_rules_gpu import exact, launched, operands

import cuda_l2
from cuda_l2 import contract
from cuda_l2.library.deploy import calls, choices, dispatch, pack, tuning, vendor
from cuda_l2.library.deploy.choices import Choice
from cuda_l2.library.deploy.costs import host_us
from cuda_l2.library.deploy.recipes import recipes, serving
from cuda_l2.library.table import family_of, schedule_text
from cuda_l2.records import Candidate, Gemm
from cuda_l2.runs.decoder import DECODE, Case, Decoder, config_of, shapes
from cuda_l2.runs.model_bench import compare
from cuda_l2.runs.settings import COMPILE, EAGER

pytestmark = pytest.mark.gpu
TORCHS = {"rtol": 2e-2, "atol": 1.0}
"""Tolerance of torch's own products, which may add partial sums in bf16."""
SHAPES = ("64x512x256", "16x512x2048:tn:bf16", "300x256x1024:tn", "1024x1024x1024:tn:bf16")


@pytest.fixture(scope="module")
def served(gpu, tmp_path_factory):
    """Choices for SHAPES by kernels of a small pack, and for each shape every kernel of it that serves it."""
    if not gpu.target.runs("sm_90a"):
        pytest.skip("the pack is for Hopper GPUs")
    patch = pytest.MonkeyPatch()
    patch.setenv("CUDA_L2_HOME", str(tmp_path_factory.mktemp("home")))
    wanted = recipes()
    gemms = [Gemm.parse(shape) for shape in SHAPES]
    by_shape: dict[Gemm, list[Choice]] = {gemm: [] for gemm in gemms}
    by_id, used, alone = {recipe.id: recipe for recipe in wanted}, {}, {}
    for recipe in wanted:
        for gemm in gemms:
            if (recipe.gemm.dtype, recipe.gemm.layout) != (gemm.dtype, gemm.layout) or len(by_shape[gemm]) >= 8:
                continue
            for made in serving(family_of(recipe.family), dict(recipe.schedule), gemm, gpu.target):
                name = contract.kernel_id(made.source)
                waits = waiting(made, gemm, gpu.target.sms)
                if name not in by_id or waits is None:
                    continue
                used[name] = by_id[name]
                choice = Choice(str(gemm), name, recipe.family, schedule_text(made.schedule), 1.0, 2.0)
                by_shape[gemm].append(choice)
                if not waits:
                    alone.setdefault(gemm, choice)
    made = pack.build(list(used.values()), tmp_path_factory.mktemp("pack"))
    patch.setattr(dispatch, "installed", lambda: made)
    dispatch.pack.cache_clear()
    choices.add(choices.place_of(0, made.identity), alone.values())
    dispatch.known.cache_clear()
    cuda_l2.matmul(torch.ones(8, 8, device="cuda").half(), torch.ones(8, 8, device="cuda").half())
    calls.native().clear()
    yield by_shape
    patch.undo()
    dispatch.forget()


def waiting(made: Candidate, gemm: Gemm, sms: int) -> bool | None:
    """Whether blocks of a kernel wait for one another; None where it does not serve the shape."""
    try:
        return any(launch.coresident for launch in contract.parse_cuda(made.source).plan(gemm, sms).launches)
    except contract.ContractError:
        return None


@pytest.mark.parametrize("shape", SHAPES)
def test_every_kernel_gives_the_exact_product_rounded_once(served, shape) -> None:
    gemm = Gemm.parse(shape)
    a, b = operands(gemm)
    expected = exact(a, b)
    assert served[gemm]
    for choice in served[gemm]:
        assert dispatch.put(choice, 0) == ""
        before = launched()
        for _ in range(3):
            assert torch.equal(cuda_l2.matmul(a, b), expected), choice
        assert launched() == before + 3
    calls.native().clear()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_captured_graph_replays_on_new_values(served, shape) -> None:
    gemm = Gemm.parse(shape)
    a, b = operands(gemm)
    for choice in served[gemm]:
        assert dispatch.put(choice, 0) == ""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # nothing was called before on this stream
            results = [cuda_l2.matmul(a, b) for _ in range(3)]
        for seed in (1, 2):
            for tensor, new in zip((a, b), operands(gemm, seed), strict=True):
                tensor.copy_(new)
            graph.replay()
            assert all(torch.equal(result, exact(a, b)) for result in results), choice
    calls.native().clear()


def test_streams_and_threads_do_not_disturb_one_another(served) -> None:
    gemm = Gemm.parse(SHAPES[1])

    def agrees(seed: int) -> bool:
        a, b = operands(gemm, seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            expected = exact(a, b)
            return all(torch.equal(cuda_l2.matmul(a, b), expected) for _ in range(100))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(agrees, range(4)))


def test_torch_compile_and_gradients(served) -> None:
    gemm = Gemm.parse(SHAPES[3])
    a, b = operands(gemm)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: cuda_l2.matmul(x, b) + 1, fullgraph=True)
    with torch.no_grad():
        for rows in (gemm.m, gemm.m - 24, gemm.m - 56):  # the last two in one graph for all sizes
            before, serves = launched(), rows == gemm.m
            result, expected = compiled(a[:rows]), exact(a[:rows], b) + 1
            assert torch.equal(result, expected) if serves else torch.allclose(result, expected, **TORCHS)
            assert launched() == before + serves
    trained = a.clone().requires_grad_()
    cuda_l2.matmul(trained, b).sum().backward()
    assert torch.equal(trained.grad, exact(torch.ones(gemm.m, gemm.n, device="cuda", dtype=a.dtype), b.t()))


def test_inductor_times_tuned_kernels_among_its_candidates(served) -> None:
    a, b = operands(Gemm.parse(SHAPES[3]))
    torch.compiler.reset()
    compiled = torch.compile(lambda x: torch.relu(x @ b), fullgraph=True, options=cuda_l2.max_autotune())
    before, fresh_cache = launched(), pytest.importorskip("torch._inductor.utils").fresh_cache
    with torch.no_grad(), fresh_cache():  # which holds no times of an earlier run
        assert torch.allclose(compiled(a), torch.relu(exact(a, b)), **TORCHS)
    assert launched() > before


def test_tuning_keeps_choices_that_serve(served) -> None:
    found = tuning.tune(SHAPES[:2])
    assert [choice.shape for choice in found] == list(SHAPES[:2])
    assert all(choice.us > 0 and choice.vendor_us > 0 for choice in found)
    for shape, choice in zip(SHAPES, found, strict=False):
        a, b = operands(Gemm.parse(shape))
        before = launched()
        assert torch.equal(cuda_l2.matmul(a, b), exact(a, b)) or not choice.served
        assert launched() - before == choice.served


@pytest.mark.parametrize("shape", SHAPES)
def test_every_algorithm_of_cublaslt_serves_its_shape_also_in_a_graph(served, shape) -> None:
    gemm = Gemm.parse(shape)
    (a, b), found = operands(gemm), vendor.candidates(gemm, 0, rounded=False)
    assert found
    for made in found:
        assert vendor.put(dict(made.schedule), gemm, 0) == ""
        before, graph = launched(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = cuda_l2.matmul(a, b)
        graph.replay()
        assert torch.equal(result, exact(a, b)) and launched() == before + 1
    calls.native().clear()


def test_an_accelerated_model_is_tuned_by_running_it(served) -> None:
    model = cuda_l2.accelerate(torch.nn.Sequential(torch.nn.Linear(2048, 512, bias=False)).cuda().bfloat16())
    x = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16)
    assert [choice.shape for choice in cuda_l2.tune(model, x)] == [SHAPES[1]]
    with torch.no_grad():
        assert torch.allclose(model(x), torch.nn.functional.linear(x, model[0].weight), atol=1e-2, rtol=1e-2)


def test_a_models_layers_are_timed_with_tuned_kernels_in_their_graphs(served, tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "hidden_size": 1024, "intermediate_size": 2048}))
    decoder, case, arms = Decoder(config_of(str(file), 2), "cuda"), Case(DECODE, 1024, cached=1), [EAGER, COMPILE]
    assert SHAPES[3] in map(str, shapes(decoder, [case]))
    for arm in arms:
        before = launched()
        (found,) = compare(decoder, case, [arm])
        assert launched() - before == 3 * 2 * decoder.layers  # two calls and a capture; the products of q and of o
        assert found.difference < 0.05 and min(found.us, found.ours_us) > 0


def test_what_a_call_costs_the_host_is_said(served) -> None:
    found = host_us(Gemm.parse(SHAPES[0]), 10)
    names = ("the driver's launch", "torch.ops.cuda_l2.product", "cuda_l2.matmul", "cuda_l2.matmul, out=", "torch.mm")
    assert {*names} < {*found} and all(us > 0 for us in found.values())
