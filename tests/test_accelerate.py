"""Models and torch's own functions on the op, without a GPU: what calls it, what stays as it was, gradients, torch.compile."""

import copy
import io
import itertools
import json

import pytest
import torch
from fake_driver import fake_driver

import cuda_l2
from cuda_l2.commands.tune import expanded, layers
from cuda_l2.library.deploy import calls, dispatch, inductor, tracing
from cuda_l2.library.deploy.accelerate import AcceleratedLinear, recorded
from cuda_l2.library.deploy.choices import Choice
from cuda_l2.library.deploy.entries import AHEAD, TUNED
from cuda_l2.library.deploy.tracing import gemm_of
from cuda_l2.library.deploy.tuning import _recorded
from cuda_l2.records import Gemm
from cuda_l2.system.errors import UserError


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 32, bias=False)
        self.down = torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) @ x.mT


def test_an_accelerated_model_computes_the_same_and_is_still_a_model() -> None:
    model, x = Model(), torch.randn(3, 16)
    expected = model(x)
    assert cuda_l2.accelerate(model) is model
    assert type(model.up) is type(model.down) is AcceleratedLinear
    assert torch.equal(model(x), expected) and torch.equal(copy.deepcopy(model)(x), expected)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    fresh = Model()
    fresh.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    assert torch.equal(fresh(x), expected)


def test_what_is_no_model_is_named() -> None:
    with pytest.raises(UserError, match=r"takes a torch.nn.Module, not None; for other code: with accelerated\(\)"):
        cuda_l2.accelerate(None)


def test_layers_of_others_stay_as_they_are() -> None:
    class Own(torch.nn.Linear):
        pass

    patched = torch.nn.Linear(4, 4)
    patched.forward = lambda x: x
    model = cuda_l2.accelerate(torch.nn.Sequential(Own(4, 4), patched))
    assert type(model[0]) is Own and type(model[1]) is torch.nn.Linear


def test_gradients_of_an_accelerated_model_are_torchs() -> None:
    model, x = Model().double(), torch.randn(3, 16, dtype=torch.double, requires_grad=True)
    other = cuda_l2.accelerate(copy.deepcopy(model))
    grads = [torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()]) for m in (model, other)]
    for plain, ours in zip(*grads, strict=True):
        assert torch.allclose(plain, ours)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        *[((4, 8), (8, 6)), ((8,), (8, 6)), ((8,), (8,)), ((2, 3, 8), (8, 5)), ((2, 3, 8), (2, 8, 5))],
        *[((3, 8), (2, 8, 5)), ((8,), (2, 8, 5)), ((2, 3, 8), (8,)), ((1, 3, 8), (2, 8, 5))],
    ],
)
def test_gradients_of_every_rank_are_right(a, b) -> None:
    operands = [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in (a, b)]
    assert torch.autograd.gradcheck(calls.matmul, operands) and torch.autograd.gradgradcheck(calls.matmul, operands)


def test_a_bias_has_its_gradient() -> None:
    a, b, bias = (torch.randn(s, dtype=torch.double, requires_grad=True) for s in ((3, 4), (4, 5), (5,)))
    assert torch.autograd.gradcheck(lambda *x: calls.matmul(x[0], x[1], bias=x[2]), (a, b, bias))


def test_the_operators_keep_torchs_rules() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 4)
    for name in ("product", "matmul", "linear"):
        assert calls.op()
        assert set(torch.library.opcheck(getattr(torch.ops.cuda_l2, name).default, (a, b)).values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        *[(torch.ones(2, 3), torch.ones(4, 5)), (torch.ones(()), torch.ones(3)), (torch.ones(2, 3), torch.ones(4))],
        *[(torch.ones(2, 3), torch.ones(3, 3).half()), (torch.ones(2, 3, 4), torch.ones(5, 4, 6))],
        *[(torch.ones(2, 3, dtype=torch.int8), torch.ones(3, 3)), (1, 2), (torch.ones(2, 2), None)],
    ],
)
def test_errors_are_torchs(a, b) -> None:
    def said(function) -> tuple[type, str]:
        with pytest.raises(Exception) as caught:  # whatever torch raises
            function(a, b)
        return type(caught.value), str(caught.value)

    assert said(cuda_l2.matmul) == said(torch.matmul)


def test_out_that_wants_a_gradient_is_refused_as_torch_does() -> None:
    out = torch.zeros(3, 5, requires_grad=True)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        cuda_l2.matmul(torch.ones(3, 4), torch.ones(4, 5), out=out)


@pytest.fixture
def tuned(monkeypatch):
    """Shapes for which torch.compile's tracer finds a tuned kernel; without a GPU it would find none."""
    shapes: set[str] = set()

    def found(place, dtype, a_shape, b_shape, b_strides, transposed, ahead) -> bool:
        return str(tracing.product(dtype, a_shape, b_shape, b_strides, transposed=transposed)) in shapes

    found._dynamo_marked_constant = True
    monkeypatch.setattr(tracing, "_tuned", found)
    torch.compiler.reset()
    yield shapes
    torch.compiler.reset()


class Graphs:
    """A backend of torch.compile that runs what was traced, and keeps it."""

    def __init__(self) -> None:
        self.operators: list[set[str]] = []

    def __call__(self, graph, inputs):
        called = {str(node.target) for node in graph.graph.nodes}
        self.operators.append({name for name in called if name.startswith("cuda_l2.")})
        return graph


def whole(*shape: int) -> torch.Tensor:
    """Small whole numbers in bf16, whose sums are exact."""
    return torch.arange(torch.Size(shape).numel()).remainder(3).reshape(shape).to(torch.bfloat16)


def test_under_torch_compile_the_op_serves_what_a_tuned_kernel_wins_and_inductor_the_rest(tuned) -> None:
    tuned |= {"3x32x16:tn:bf16", "3x16x3:bf16"}
    model, x, graphs = cuda_l2.accelerate(Model().to(torch.bfloat16)), whole(3, 16), Graphs()
    compiled = torch.compile(lambda x: cuda_l2.matmul(model(x), x), fullgraph=True, backend=graphs)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x) @ x)
        assert graphs.operators == [{"cuda_l2.linear.default", "cuda_l2.product.default"}]
        tuned.clear()
        torch.compiler.reset()
        assert torch.equal(compiled(x), model(x) @ x)
    assert graphs.operators[1:] == [set()]


def test_under_torch_compile_a_bias_is_added_to_a_tuned_kernels_product(tuned) -> None:
    tuned |= {"3x32x16:tn:bf16"}
    layer, x, graphs = cuda_l2.accelerate(torch.nn.Linear(16, 32).to(torch.bfloat16)), whole(3, 16), Graphs()
    with torch.no_grad():
        layer.weight.copy_(whole(32, 16))
        layer.bias.copy_(whole(32))
        compiled = torch.compile(layer, fullgraph=True, backend=graphs)
        assert torch.equal(compiled(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
        tuned.clear()
        torch.compiler.reset()
        assert torch.equal(compiled(x), layer(x))
    assert graphs.operators == [{"cuda_l2.linear.default"}, set()]
    trained = torch.compile(lambda x: cuda_l2.accelerate(layer)(x).sum(), backend="aot_eager")
    trained(x).backward()
    assert torch.equal(layer.bias.grad, torch.full((32,), 3.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("first", [(), ("3x8x16:bf16",)])
def test_a_choice_that_changes_after_compilation_is_only_an_old_one(tuned, first) -> None:
    w, graphs = whole(16, 8), Graphs()
    compiled = torch.compile(lambda x: cuda_l2.matmul(x, w) + 1, fullgraph=True, backend=graphs)
    with torch.no_grad():
        for shapes in (first, ("3x8x16:bf16",), ()):
            tuned.clear()
            tuned |= set(shapes)
            for x in (whole(3, 16), whole(3, 16) + 1):
                assert torch.equal(compiled(x), x @ w + 1)
    assert graphs.operators == [{"cuda_l2.product.default"} if first else set()]


def test_sizes_that_the_tracer_keeps_symbolic_are_left_to_inductor(tuned) -> None:
    tuned |= {f"{rows}x8x16:bf16" for rows in range(2, 9)}
    w, graphs = whole(16, 8), Graphs()
    compiled = torch.compile(lambda x: cuda_l2.matmul(x, w), fullgraph=True, backend=graphs, dynamic=True)
    with torch.no_grad():
        for rows in (3, 5, 8):
            assert torch.equal(compiled(whole(rows, 16)), whole(rows, 16) @ w)
    assert graphs.operators == [set()]


def test_within_accelerated_compiled_code_is_served_too(tuned) -> None:
    tuned |= {"3x8x16:bf16"}
    w, graphs = whole(16, 8), Graphs()
    compiled = torch.compile(lambda x: x @ w, fullgraph=True, backend=graphs)
    with torch.no_grad(), cuda_l2.accelerated():
        assert torch.equal(compiled(whole(3, 16)), whole(3, 16) @ w)
    assert graphs.operators == [{"cuda_l2.product.default"}]


def test_gradients_flow_through_compiled_code(tuned) -> None:
    tuned |= {"3x4x16:bf16"}
    trained = torch.compile(lambda x, w: cuda_l2.matmul(x, w).sum(), fullgraph=True, backend="aot_eager")
    x, w = whole(3, 16), whole(16, 4).requires_grad_()
    trained(x, w).backward()
    assert torch.equal(w.grad, x.sum(0)[:, None].expand(16, 4))


def test_the_tracer_finds_what_was_tuned_on_the_tensors_device_and_for_declared_weights(monkeypatch) -> None:
    served, lost = Choice("3x8x16:tn:bf16", "0" * 16, "family"), Choice("4x8x16:tn:bf16")
    ahead = Choice("4x8x16:tn:bf16", "1" * 16, "family")
    known = {(1, TUNED): [served, lost], (1, AHEAD): [ahead]}
    monkeypatch.setattr(dispatch, "known", lambda *key: {choice.gemm: choice for choice in known.get(key, [])})

    def tuned(place: str, rows: int, declared: bool = False) -> bool:
        return tracing._tuned(torch.device(place), torch.bfloat16, (rows, 16), (8, 16), (16, 1), True, declared)

    assert tuned("cuda:1", 3) and tuned("cuda:1", 3, declared=True) and tuned("cuda:1", 4, declared=True)
    assert not tuned("cuda:0", 3) and not tuned("cuda:1", 4) and not tuned("cuda:1", 5) and not tuned("cpu", 3)


def test_under_max_autotune_a_tuned_kernel_is_a_candidate_named_by_what_is_tuned(monkeypatch) -> None:
    known = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "known", lambda device: known)

    def candidate():
        with torch._inductor.config.patch(cuda_l2.max_autotune()):
            assert torch._inductor.config.max_autotune and not torch._inductor.config.fx_graph_cache
            (found,) = torch._inductor.config.external_matmul
        return found

    before = candidate()
    assert candidate() is before
    known[Gemm.parse("3x8x16")] = Choice("3x8x16", "0" * 16, "family")
    assert candidate().__name__ != before.__name__
    out = torch.empty(3, 8)
    before(torch.ones(3, 16), torch.ones(16, 8), out=out)
    assert torch.equal(out, torch.full((3, 8), 16.0))
    monkeypatch.setattr(inductor, "READY", False)
    assert "external_matmul" not in cuda_l2.max_autotune()


def test_under_autocast_torch_serves() -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        c = cuda_l2.matmul(a, b)
    c.sum().backward()
    assert c.dtype == torch.bfloat16 and a.grad is not None


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "a",
    [
        *[torch.eye(3).to_sparse(), torch.eye(3, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(3, 3))],
        *[torch.ones(3, 3).as_subclass(Subclass), torch.ones(3, 3, device="meta"), torch.ones(3, 3, dtype=torch.int8)],
        *[torch.ones(3), torch.ones(0, 3), torch.ones(3, 3).t()],
    ],
    ids=["sparse", "conjugate", "negative", "subclass", "meta", "int8", "vector", "empty", "transposed"],
)
def test_tensors_of_every_kind_are_multiplied_as_torch_does(a) -> None:
    b = torch.ones(3, 4, dtype=a.dtype, device=a.device)
    ours, theirs = cuda_l2.matmul(a, b), torch.matmul(a, b)
    assert type(ours) is type(theirs) and ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert a.is_meta or torch.equal(ours, theirs)


def test_within_accelerated_torchs_functions_call_the_op() -> None:
    a, w = torch.randn(3, 4), torch.randn(5, 4)
    with fake_driver() as (_, library):
        with cuda_l2.accelerated():
            results = a @ w.t(), torch.matmul(a, w.t()), torch.mm(a, w.t()), a.mm(w.t())
            linear = torch.nn.functional.linear(a, w)
            with pytest.raises(RuntimeError):
                torch.mm(a, torch.ones(4))
            calls_inside = library.counts()["vendor"]
        a @ w.t()
        assert calls_inside == 5 == library.counts()["vendor"]
    assert all(torch.equal(result, linear) for result in results)


def test_a_models_shapes_are_recorded_as_the_op_sees_them() -> None:
    model = cuda_l2.accelerate(Model().to(torch.bfloat16))
    x = torch.randn(2, 3, 16, dtype=torch.bfloat16)
    assert [str(gemm) for gemm in _recorded(model, ((x,),), {})] == ["6x32x16:tn:bf16", "6x16x32:tn:bf16"]
    with recorded() as seen:
        torch.matmul(x[0], torch.ones(16, 8, dtype=torch.bfloat16))
        torch.matmul(x[0].half(), torch.ones(16, 8).half())
    assert [str(gemm) for gemm in seen.shapes] == ["3x8x16:bf16", "3x8x16"]
    with pytest.raises(UserError, match="is the model in bf16"):
        _recorded(Model(), (x.float(),), {})


def test_what_a_kernel_cannot_serve_has_no_shape() -> None:
    half = torch.ones(8, 8, dtype=torch.float16)
    for a, b in ((half.t(), half), (half[:, ::2], half[:4]), (half, half[:, ::2]), (half.float(), half.float())):
        assert gemm_of(a, b) is None
    assert str(gemm_of(half[:3], half.t())) == "3x8x8:tn" and str(gemm_of(half, half, transposed=True)) == "8x8x8:tn"


def test_a_range_of_rows_is_powers_of_two_the_ends_of_tiles_and_its_ends() -> None:
    assert [*expanded("3-20x8x8:tn")] == ["3x8x8:tn", "4x8x8:tn", "8x8x8:tn", "16x8x8:tn", "20x8x8:tn"]
    assert [*expanded("64x8x8")] == ["64x8x8"]
    rows = [int(shape.split("x")[0]) for shape in expanded("1-4096x8x8")]
    assert len(rows) == 26 and rows[:10] == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256] and rows[-2:] == [3584, 4096]
    assert all(upper <= 2 * lower for lower, upper in itertools.pairwise(rows))
    assert [*expanded("100-300x8x8")] == [f"{m}x8x8" for m in (100, 128, 192, 256, 300)]
    with pytest.raises(UserError, match="range of rows"):
        [*expanded("8-4x8x8")]


def test_a_decoders_layers_are_read_from_its_config(tmp_path) -> None:
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
    file.write_text(json.dumps({**sizes, "vocab_size": 128256, "torch_dtype": "bfloat16"}))
    expected = ["4096x4096", "1024x4096", "14336x4096", "4096x14336", "128256x4096"]
    assert layers(file) == [f"{size}:tn:bf16" for size in expected]
    for text in ("[]", "{}", json.dumps({**sizes, "vocab_size": 1, "dtype": "float32"})):
        file.write_text(text)
        with pytest.raises(UserError, match=r"no config\.json of a decoder"):
            layers(file)
