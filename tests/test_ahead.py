"""Weights ahead, on the driver that records: which launches take an ordinary edge, and which kernels may serve at all."""

import gc
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_driver import STREAM, FakeDriver, fake_driver
from test_library_op import CUBIN, DIRECT
from test_tuning import FakePack, parameter_sizes

import cuda_l2
from cuda_l2 import contract
from cuda_l2.evaluator import Evaluator
from cuda_l2.library.deploy import calls, dispatch, entries, tracing, tuning
from cuda_l2.library.deploy.native import Native
from cuda_l2.library.deploy.recipes import candidate
from cuda_l2.library.table import family_of
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.records import Candidate, Gemm, VerdictStatus

BFLOAT = torch.bfloat16
GEMM = Gemm.parse("3x24x16:tn:bf16")
TEXT = DIRECT.replace("DTYPE", "bfloat16").replace('arch = "sm_90a"', 'arch = "sm_90a"\nconstant = ["b"]')


class Layers:
    """An accelerated model on the recording driver, with a kernel for both of its layers' products."""

    def __init__(self, fake: FakeDriver, library: Native) -> None:
        self.fake, self.library = fake, library
        fake.parameters([8, 8, 8, 4, 4, 4, 8])
        plan = contract.parse_cuda(TEXT).plan(GEMM, 132)
        assert library.put(entries.packed(plan, GEMM, 0, entries.AHEAD), "0123456789abcdef", CUBIN) == ""
        layers = [torch.nn.Linear(16, 24, bias=False, dtype=BFLOAT) for _ in range(2)]
        self.model = cuda_l2.accelerate(torch.nn.ModuleList(layers).requires_grad_(False), weights_ahead=True)
        self.x = torch.ones(3, 16, dtype=BFLOAT)

    @property
    def weight(self) -> torch.nn.Parameter:
        return self.model[0].weight

    def edges(self, *layers: int) -> str:
        """A letter for each call of these layers: a where its launch may begin ahead, o where its edge is ordinary."""
        before = self.fake["launch_count"]
        for layer in layers:
            self.model[layer](self.x)
        return "".join("a" if launch.programmatic else "o" for launch in self.fake.launches[before:])


@pytest.fixture
def layers() -> Iterator[Layers]:
    with fake_driver() as (fake, library):
        yield Layers(fake, library)


def test_a_weight_is_read_ahead_from_its_second_launch_on(layers) -> None:
    assert layers.edges(0, 0, 1, 1, 0) == "oaoaa"
    assert layers.library.counts()["read_ahead"] == 3 and layers.library.counts()["vendor"] == 0


def _optimizer_step(layers: Layers) -> None:
    layers.weight.requires_grad_(True)
    layers.weight.grad = torch.ones_like(layers.weight)
    torch.optim.AdamW([layers.weight]).step()
    layers.weight.requires_grad_(False)


class _Uncounted(torch.optim.SGD):
    """Writes as fused optimizers do: torch counts nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["params"][0].data.add_(1)


def _uncounted_step(layers: Layers) -> None:
    version = layers.weight._version
    _Uncounted([layers.weight]).step()
    assert layers.weight._version == version


def _load(layers: Layers) -> None:
    file = io.BytesIO()
    torch.save(layers.model.state_dict(), file)
    layers.model.load_state_dict(torch.load(io.BytesIO(file.getvalue())))


def _write_in_inference_mode(layers: Layers) -> None:
    with torch.inference_mode():
        layers.weight.mul_(2)


WRITES: list[Callable[[Layers], object]] = [
    lambda layers: layers.weight.zero_(),
    lambda layers: layers.weight.view(-1)[3:5].fill_(1),
    lambda layers: calls.matmul(torch.ones(24, 8, dtype=BFLOAT), torch.ones(8, 16, dtype=BFLOAT), out=layers.weight),
    lambda layers: layers.model.to(torch.float16).to(BFLOAT),
    _optimizer_step,
    _uncounted_step,
    _load,
    _write_in_inference_mode,
    lambda layers: (layers.weight.data.zero_(), cuda_l2.invalidate(layers.model)),
]


@pytest.mark.parametrize("write", WRITES)
def test_the_first_launch_after_a_write_takes_an_ordinary_edge(layers, write) -> None:
    assert layers.edges(0, 1, 0) == "ooa"
    write(layers)
    assert layers.edges(0, 0) == "oa"


def test_a_product_written_elsewhere_leaves_edges_as_they_are(layers) -> None:
    assert layers.edges(0, 0) == "oa"
    calls.matmul(
        torch.ones(24, 8, dtype=BFLOAT), torch.ones(8, 16, dtype=BFLOAT), out=torch.empty(24, 16, dtype=BFLOAT)
    )
    assert layers.edges(0, 0) == "aa"


def test_a_write_in_between_is_seen_on_every_stream(layers) -> None:
    assert layers.edges(0, 0) == "oa"
    layers.fake.stream(STREAM + 1)
    assert layers.edges(0, 0) == "oa"
    layers.weight.zero_()
    assert layers.edges(0, 0) == "oa"
    layers.fake.stream(STREAM)
    assert layers.edges(0, 0) == "oa"


def test_a_capture_reads_ahead_after_its_first_launch_what_was_met_before_unchanged(layers) -> None:
    assert layers.edges(0, 1) == "oo"
    for capture in (1, 2):
        layers.fake.capture(capture)
        assert layers.edges(0, 1, 0) == "oaa"
    layers.fake.capture(0)
    assert layers.edges(0, 1) == "aa"


def test_a_compiled_layer_reads_ahead_what_was_tuned_so(layers, monkeypatch) -> None:
    def tuned(*product: object) -> bool:
        return product[-1] is True  # where the weight is declared constant, and nowhere else

    tuned._dynamo_marked_constant = True  # type: ignore[attr-defined]
    monkeypatch.setattr(tracing, "_tuned", tuned)
    torch.compiler.reset()
    layers.model.append(torch.compile(layers.model[0], backend="aot_eager"))
    with torch.no_grad():
        assert layers.edges(2, 2, 0) == "oaa"
        layers.weight.zero_()
        assert layers.edges(2, 2) == "oa"
        cuda_l2.accelerate(layers.model)
        assert layers.edges(2) == ""
    torch.compiler.reset()


def test_a_weight_that_a_graph_writes_or_that_is_new_to_it_is_never_read_ahead_in_it(layers) -> None:
    assert layers.edges(1) == "o"
    layers.fake.capture(1)
    assert layers.edges(1, 0, 0) == "ooo"  # the first layer was not met before
    layers.model[1].weight.add_(1)  # as a captured step of an optimizer does
    assert layers.edges(1, 1) == "oo"
    layers.fake.capture(0)
    assert layers.edges(1, 1) == "oa"


def test_a_capture_does_not_count_as_a_launch_on_its_stream(layers) -> None:
    layers.fake.capture(1)
    assert layers.edges(0) == "o"
    layers.fake.capture(0)
    assert layers.edges(0, 0) == "oa"


def test_only_where_somebody_opted_in_a_kernel_that_reads_ahead_serves(layers) -> None:
    weight = layers.weight.detach().clone()
    assert calls.linear(layers.x, weight) is not None and layers.fake["launch_count"] == 0
    for _ in range(2):
        calls.matmul(layers.x, weight.t(), weights_ahead=True)
    assert [launch.programmatic for launch in layers.fake.launches] == [0, 1]
    cuda_l2.accelerate(layers.model)
    assert layers.edges(0) == "" and layers.library.counts()["vendor"] == 2


def test_inference_tensors_are_torchs_and_plain_kernels_alone(layers) -> None:
    with torch.inference_mode():
        weight = torch.ones(24, 16, dtype=BFLOAT)
        calls.matmul(layers.x, weight.t(), weights_ahead=True)
    assert layers.fake["launch_count"] == 0


def test_another_tensor_in_a_dead_ones_place_is_not_taken_for_it(layers) -> None:
    weight = torch.ones(24, 16, dtype=BFLOAT)
    calls.matmul(layers.x, weight.t(), weights_ahead=True)
    identity = weight._cdata
    del weight
    gc.collect()
    others = [torch.ones(24, 16, dtype=BFLOAT) for _ in range(64)]
    for other in others:
        calls.linear(layers.x, other)
    assert layers.fake["launch_count"] == 1, identity in [other._cdata for other in others]


def test_training_computes_by_plain_kernels_and_sees_every_step(layers) -> None:
    layers.model.requires_grad_(True)
    layers.model[0](layers.x).sum().backward()
    assert layers.fake["launch_count"] == 0
    with torch.no_grad():
        assert layers.edges(0, 0) == "oa"


def test_the_packs_kernels_that_read_ahead_are_tuned_and_launched_for_such_weights_alone(monkeypatch) -> None:
    target = compile_only("sm_90a")
    family, gemm = family_of("sm90_ahead"), Gemm.parse("16x512x1024:tn:bf16")
    made = candidate(family, family.named(family.default(gemm, target)), gemm, target)
    kernel = contract.kernel_id(made.source)
    monkeypatch.setattr(dispatch, "target_of", lambda device: target)
    compiled = {name: value for name, value in made.schedule if name in family.compiled}
    monkeypatch.setattr(tuning, "family_schedules", lambda found, gemm: [(family.name, compiled)])
    found = FakePack(kernel)
    assert list(tuning.candidates(gemm, 0, found)) == []
    ways = list(*tuning.candidates(gemm, 0, found, rule=entries.AHEAD))
    assert {arm.kernel for arm in ways} == {kernel}
    with fake_driver() as (fake, _):
        fake.parameters(parameter_sizes(contract.parse_cuda(made.source).plan(gemm, target.sms)))
        assert "callers must allow" in dispatch.launch(made, gemm, 0, kernel, found)
        assert dispatch.launch(made, gemm, 0, kernel, found, entries.AHEAD) == ""
        x, weight = torch.ones(16, 1024, dtype=BFLOAT), torch.ones(512, 1024, dtype=BFLOAT)
        calls.linear(x, weight)
        for _ in range(2):
            calls.matmul(x, weight.t(), weights_ahead=True)
        assert [launch.programmatic for launch in fake.launches] == [0, 1]


def test_a_search_refuses_what_declares_inputs_constant() -> None:
    source = TEXT + 'extern "C" __global__ void gemm() {}'
    assert contract.declares_constant(source)
    evaluator = SimpleNamespace(_weights_ahead=False)
    verdict = Evaluator._verified(evaluator, Candidate(source), None)
    assert verdict.status is VerdictStatus.FORBIDDEN and "--weights-ahead" in verdict.reason
