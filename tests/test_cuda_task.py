"""Tasks on a GPU: arenas, sessions, checks and rounds, with this machine's memory in place of a device's."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
from fake_gpu import Rig, fake_gpu, floats, memory  # noqa: F401 - a fixture

from cuda_l2 import tasks
from cuda_l2.contract import ContractError, plan_cuda
from cuda_l2.contract.cuda import Plan
from cuda_l2.errors import UserError
from cuda_l2.execute.cuda_task_arena import CudaTaskArena, buffer_name
from cuda_l2.execute.device_arena import GUARD_BYTES, NOT_RESTORED, OUTSIDE
from cuda_l2.execute.fills import GUARD_BYTE, POISON_WORDS, POISONS, SCRATCH_BYTE
from cuda_l2.measure.cuda_task_baselines import ARMS, COMPILED_GRAPH, EAGER_GRAPH
from cuda_l2.measure.protocols import CUDA_PROTOCOLS
from cuda_l2.records import Build, BuildStatus, Candidate, Operation, Tensor
from cuda_l2.rigs import cuda_task
from cuda_l2.rigs.cuda_task import CudaTaskBench, needed_bytes, windows
from cuda_l2.tasks.cases import TaskCases

TASK = tasks.parse("rms_norm:rows=10,columns=12")
MIXED = Operation(
    "mixed",
    (("n", 3),),
    inputs=(Tensor("x", "bfloat16", (2, 7)), Tensor("n", "int64", ())),
    weights=(Tensor("record", "float32", (0, 3)),),
    outputs=(Tensor("flags", "bool", (3,)), Tensor("out", "float64", (2,))),
)
SOURCE = """/* cuda-l2
target = "cuda"
arch = "sm_80"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "gain"
shape = ["columns"]
kind = "weight"

[[buffer]]
name = "out"
shape = ["rows", "columns"]
kind = "output"

[[workspace]]
name = "kept"
bytes = "4 * rows * (columns + 1)"

[[workspace]]
name = "calls"
bytes = 4
kind = "persistent"
fill = 7

[[launch]]
kernel = "rms_norm"
grid = ["rows"]
block = [128]
args = ["x", "gain", "out", "kept", "calls", "rows", "columns"]
*/
"""
PROGRAMMATIC = SOURCE.replace("*/", 'edge = "programmatic"\n*/')


class Launch:
    """A launch of the contract above: its tensors as arrays, and the right answer."""

    def __init__(self, pointers: Mapping[str, int], plan: Plan) -> None:
        numbers = [int.from_bytes(bytes.fromhex(a.data), "little") for a in plan.launches[0].arguments if a.data]
        self.rows, self.columns = numbers
        self.pointers = pointers
        self.x, self.out = (floats(pointers[name], self.rows, self.columns) for name in ("x", "out"))
        self.gain = floats(pointers["gain"], self.columns)
        self.kept = floats(pointers["kept"], self.rows * (self.columns + 1))
        self.calls = memory(pointers["calls"], 4).view(np.uint32)

    def answer(self, gain: Any = None) -> np.ndarray:
        scale = 1 / np.sqrt(np.square(self.x).mean(1, keepdims=True, dtype=np.float32) + np.float32(1e-6))
        return (self.x * scale * (self.gain if gain is None else gain)).astype(np.float32)


def kernel(body: Callable[[Launch], None]) -> Callable[[Mapping[str, int], Plan], None]:
    return lambda pointers, plan: body(Launch(pointers, plan))


def honest(launch: Launch) -> None:
    launch.out[:] = launch.answer()


def stray(at: int, where: str = "out") -> Callable[[Launch], None]:
    def body(launch: Launch) -> None:
        honest(launch)
        memory(launch.pointers[where] + at, 1)[:] = 1

    return body


def shown_shape_only(launch: Launch) -> None:
    if launch.columns == 12:
        honest(launch)


def last_row_missing(launch: Launch) -> None:
    launch.out[:-1] = launch.answer()[:-1]


def changes_input(launch: Launch) -> None:
    honest(launch)
    launch.x[0, 0] = 0


def changes_what_does_not_count(launch: Launch) -> None:
    honest(launch)
    launch.x[0, 0] = np.nextafter(launch.x[0, 0], np.float32(0))


def counts(launch: Launch) -> None:
    honest(launch)
    launch.calls[0] += 1


def keeps_weight(launch: Launch) -> None:
    if launch.kept[-1] != 12345:
        launch.kept[: launch.columns] = launch.gain
    launch.out[:] = launch.answer(launch.kept[: launch.columns])
    launch.kept[-1] = 12345


def skips_what_looks_right(launch: Launch) -> None:
    if not np.isfinite(launch.out).all():
        honest(launch)


def in_halves(launch: Launch) -> None:
    scale = 1 / np.sqrt(np.square(launch.x).mean(1, keepdims=True) + 1e-6)
    launch.out[:] = launch.x.astype(np.float16).astype(np.float32) * scale * launch.gain


def adds_noise(launch: Launch) -> None:
    launch.out[:] = launch.answer() * (1 + 1e-7 * np.random.default_rng().integers(2, size=launch.out.shape)).astype(
        np.float32
    )


COLUMNS = 12
BODIES = {
    "honest": (honest, ""),
    "behind": (stray(4 * 10 * COLUMNS), OUTSIDE),
    "before": (stray(-1), OUTSIDE),
    "behind the workspace": (stray(4 * 10 * (COLUMNS + 1), "kept"), OUTSIDE),
    "behind the weight": (stray(4 * COLUMNS, "gain"), f"{OUTSIDE}|changed its inputs or weights"),
    "shape": (shown_shape_only, "unwritten"),
    "row": (last_row_missing, "unwritten"),
    "input": (changes_input, "changed its inputs or weights"),
    "counts": (counts, NOT_RESTORED),
    "weight": (keeps_weight, "it keeps state|gain"),
    "skips": (skips_what_looks_right, "skips work|held before"),
    "halves": (in_halves, "RMS|off by"),
    "noise": (adds_noise, "repeatable"),
}


@pytest.fixture
def judged(fake_gpu: Any, tmp_path: Path) -> Callable[..., Any]:  # noqa: F811 - the fixture
    """judged(name) is the bench, candidate and build of a body above."""

    def opened(name: str, source: str = SOURCE, task: Any = TASK, **bodies: Any) -> tuple[Rig, Any, Candidate, Build]:
        known = {each: kernel(body) for each, (body, _) in BODIES.items()} | bodies
        rig = fake_gpu(known)
        path = tmp_path / "kernel.cubin"
        path.write_text(name)
        candidate = Candidate(source)
        return rig, CudaTaskBench(rig, task, 1), candidate, Build(candidate.id, BuildStatus.BUILT, artifact=str(path))

    return opened


# -- memory


@pytest.fixture
def arena(fake_gpu: Any) -> CudaTaskArena:  # noqa: F811 - the fixture
    return CudaTaskArena([TASK, tasks.parse("rms_norm:rows=3,columns=5")], 4096, windows=3)


def test_every_poison_is_a_word_that_repeats() -> None:
    for dtype, poison in POISONS.items():
        repeated = POISON_WORDS[dtype].to_bytes(4, "little") * 2
        assert repeated[: len(poison)] == poison


def test_windows_have_inputs_of_their_own_and_one_output(arena: CudaTaskArena) -> None:
    x, gain, out = (*TASK.inputs, *TASK.weights, *TASK.outputs)
    plan = plan_cuda(SOURCE, TASK, 132)
    places = [arena.places(plan, window) for window in range(arena.windows)]
    assert len({place["x"] for place in places}) == len({place["gain"] for place in places}) == 3
    assert len({place["out"] for place in places}) == 1
    assert all(place[name].offset % 16 == 0 for place in places for name in ("x", "gain", "out", "kept"))
    for window in range(3):
        arena.tensor(x, window).fill_(window)
        arena.tensor(gain, window).fill_(window + 10)
    assert [float(arena.tensor(x, window).sum()) for window in range(3)] == [0, 120, 240]
    assert arena.damage(plan) == OUTSIDE  # workspaces have no guards yet
    arena.fill_workspaces(plan, persistent=True)
    assert arena.damage(plan) == ""
    gap = arena.tensor(x, 0).numel() * 4 + arena.places(plan, 0)["x"].offset
    arena.buffers[buffer_name(x)].tensor(gap, (1,), torch.uint8).fill_(0)
    assert arena.damage(plan) == OUTSIDE
    assert out.bytes == 480


def test_rotating_windows_have_outputs_of_their_own(fake_gpu: Any) -> None:  # noqa: F811
    arena = CudaTaskArena([TASK], 4096, windows=3, rotates=True)
    (out,) = TASK.outputs
    for window in range(3):
        arena.output(out, window).fill_(window)
    assert [float(arena.output(out, window).mean()) for window in range(3)] == [0, 1, 2]
    assert len({tuple(arena.written(window)[0][:2]) for window in range(3)}) == 3
    assert len(arena.poisons()) == 3


def test_snug_tensors_end_where_their_mapping_ends(arena: CudaTaskArena) -> None:
    arena.select(TASK, snug=True)
    for tensor in (*TASK.inputs, *TASK.weights, *TASK.outputs):
        whole = arena.buffers[buffer_name(tensor)].size
        place = arena.places(plan_cuda(SOURCE, TASK, 132))[tensor.name]
        assert 0 <= whole - (place.offset + tensor.bytes) < 16
        before = arena.buffers[place.buffer].tensor(place.offset - GUARD_BYTES, (GUARD_BYTES,), torch.uint8)
        assert (before == GUARD_BYTE).all()


def test_tensors_of_every_type_and_of_no_elements_are_held(fake_gpu: Any) -> None:  # noqa: F811
    arena = CudaTaskArena([MIXED], 4096)
    given = {"x": torch.ones(2, 7, dtype=torch.bfloat16), "n": torch.tensor(5), "record": torch.empty(0, 3)}
    segments = arena.held(given)
    assert [segment.bytes for segment in segments] == [28, 8]
    for name, tensor in arena.given().items():
        assert tensor.shape == given[name].shape and tensor.dtype == given[name].dtype
    flags, out = MIXED.outputs
    for place, poison in ((flags, POISONS["bool"]), (out, POISONS["float64"])):
        arena.tensor(place).view(torch.uint8).copy_(torch.tensor(list(poison)).repeat(place.elements))
    assert arena.output(flags).dtype == torch.uint8 and arena.output(out).isnan().all()
    arena.tensor(flags).fill_(True)
    assert arena.output(flags).tolist() == [True] * 3
    assert arena.record_stride == 32 and [output[4] for output in arena.written()] == [0, 16]


def test_a_smaller_task_lies_in_the_same_memory(arena: CudaTaskArena) -> None:
    other = tasks.parse("rms_norm:rows=3,columns=5")
    buffers = dict(arena.buffers)
    arena.select(other)
    assert arena.buffers == buffers and arena.windows == 1
    assert tuple(arena.given()["x"].shape) == (3, 5)


# -- verification


@pytest.mark.parametrize("name", BODIES)
def test_a_kernel_is_judged_as_it_behaves(judged: Any, name: str) -> None:
    rig, bench, candidate, build = judged(name)
    verdict = bench.verify(candidate, build)
    reason = BODIES[name][1]
    if not reason:
        assert verdict.status == "correct", (verdict.check, verdict.reason)
        assert verdict.passed == ("five seeds", "other values", "other shapes", "state", "concurrency")
        assert not rig.workers.renewed
    else:
        assert verdict.status != "correct" and any(word in verdict.reason for word in reason.split("|")), verdict
        assert rig.workers.renewed


def test_a_closed_task_leaves_nothing_mapped(judged: Any) -> None:
    rig, bench, candidate, build = judged("honest")
    assert bench.verify(candidate, build).status == "correct" and rig.workers.worker.arena is not None
    bench.close()
    assert rig.workers.worker.arena is None and not rig.workers.worker.process.buffers


def test_full_verification_delays_threads_and_asks_the_sanitizer(judged: Any) -> None:
    rig, bench, candidate, build = judged("honest")
    verdict = bench.verify(candidate, build, full=True)
    assert verdict.status == "correct", verdict.reason
    assert verdict.passed[-2:] == ("stress", "races")
    assert {tool for tool, _ in rig.sanitized} == {"memcheck", "initcheck"}  # no shared memory to race in
    job = rig.sanitized[0][1]
    assert job.task == TASK and not Path(job.given).exists()
    rig.finding = "Invalid __global__ read"
    assert "Invalid __global__ read" in bench.verify(candidate, build, full=True).reason


def test_a_kernel_that_only_delays_show_is_found(judged: Any) -> None:
    launches = iter(range(1 << 30))

    def now_and_then(launch: Launch) -> None:
        honest(launch)
        if next(launches) >= 80:  # long after the checks of a search
            launch.out[3, 4] += 1e-6

    rig, bench, candidate, build = judged("late", late=kernel(now_and_then))
    verdict = bench.verify(candidate, build, full=True)
    assert verdict.check == "stress" and "out[3, 4]" in verdict.reason, verdict
    assert rig.workers.renewed


def test_a_kernel_that_begins_early_is_launched_behind_a_slow_producer(judged: Any) -> None:
    rig, bench, candidate, build = judged("honest", PROGRAMMATIC)
    assert bench.verify(candidate, build).status == "correct"
    assert "after_slow" in rig.workers.worker.calls
    _, bench, candidate, build = judged("honest")
    rig = bench._rig
    bench.verify(candidate, build)
    assert "after_slow" not in rig.workers.worker.calls


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (SOURCE.replace('name = "x"\nshape', 'name = "x"\ndtype = "float16"\nshape'), "float16"),
        (SOURCE.replace('"4 * rows * (columns + 1)"', "1000000000000"), "of workspace for rms_norm"),
        (SOURCE.replace('"columns"]\nkind = "weight"', '12]\nkind = "weight"'), ""),
    ],
)
def test_contracts_that_do_not_fit_are_told_so(judged: Any, source: str, reason: str) -> None:
    _, bench, candidate, build = judged("honest", source)
    verdict = bench.verify(candidate, build)
    if reason:
        assert verdict.status == "unhygienic" and reason in verdict.reason
    else:  # serves its own sizes alone
        assert verdict.status == "correct" and "other shapes" not in verdict.passed


# -- timing


@pytest.mark.parametrize("protocol", ["search", "offline", "rotating"])
def test_a_kernel_is_timed_beside_pytorch(judged: Any, protocol: str) -> None:
    _, bench, candidate, build = judged("honest")
    timing = bench.time(candidate, build, CUDA_PROTOCOLS[protocol])
    assert timing.candidate and timing.speedup, timing.reason
    names = [arm.name for arm in timing.baselines]
    assert names == ([EAGER_GRAPH] if protocol == "search" else list(ARMS))
    if protocol != "search":
        assert timing.conditions["sm_mhz"] == 1500 and timing.max_difference < 1e-5
        assert set(timing.conditions["empty_us"]) == {"baselines", "candidate"}


def test_baselines_are_timed_alone(judged: Any) -> None:
    _, bench, _, _ = judged("honest")
    timing = bench.time_baselines(CUDA_PROTOCOLS["offline"])
    assert timing.candidate and timing.candidate.name == COMPILED_GRAPH
    assert [arm.name for arm in timing.baselines] == list(ARMS[1:])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (skips_what_looks_right, "did not produce its own result"),
        (changes_input, "changed its inputs or weights|did not produce its own result"),
        (changes_what_does_not_count, "changed its inputs or weights"),
        (stray(4 * 10 * COLUMNS), OUTSIDE),
        (counts, NOT_RESTORED),
    ],
)
def test_what_only_timed_launches_do_is_noticed(judged: Any, body: Any, reason: str) -> None:
    rig, bench, candidate, build = judged("late", late=kernel(body))
    timing = bench.time(candidate, build, CUDA_PROTOCOLS["offline"])
    assert timing.status == "wrong-output" and any(words in timing.reason for words in reason.split("|"))
    assert rig.workers.renewed


def test_an_arm_that_fails_or_errs_is_left_out(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(function: Any, mode: str = "", **_: Any) -> Any:
        def wrong(**tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if mode:
                raise RuntimeError("no graphs today\nsecond line")
            return tuple(result + 1 for result in function(**tensors))

        return wrong

    monkeypatch.setattr(torch, "compile", compiled)
    _, bench, candidate, build = judged("honest")
    timing = bench.time(candidate, build, CUDA_PROTOCOLS["offline"])
    left_out = timing.conditions["left out"]
    assert left_out["torch.compile reduce-overhead"] == "RuntimeError: no graphs today"
    assert "out is off" in left_out["torch.compile"] and "out is off" in left_out[COMPILED_GRAPH]
    assert [arm.name for arm in timing.baselines] == [EAGER_GRAPH, "torch eager"]


def test_launches_that_share_outputs_never_meet_the_same_window_twice_running(judged: Any) -> None:
    from cuda_l2.measure.cuda_task_rounds import CudaTaskRounds  # noqa: PLC0415

    _, bench, _, _ = judged("honest")
    for several in (2, 3, 4):
        rounds: Any = CudaTaskRounds.__new__(CudaTaskRounds)
        rounds.arena, rounds.protocol = type("Arena", (), {"windows": several}), CUDA_PROTOCOLS["offline"]
        rounds.rng = np.random.default_rng(several)
        for count in (2, 4, 8, 64):
            found = rounds.windows(count)
            assert len(found) == count and set(found) <= set(range(several))
            assert all(found[i] != found[i - 1] for i in range(count))  # nor from one replay to the next
    bench.close()


def test_redrawn_cases_are_others(judged: Any) -> None:
    _, bench, candidate, build = judged("honest")
    before = bench._cases.drawn("seed 0").tensors["x"].clone()
    bench.redraw(5)
    assert not torch.equal(before, bench._cases.drawn("seed 0").tensors["x"])
    assert bench.verify(candidate, build).status == "correct"
    assert bench.time(candidate, build, CUDA_PROTOCOLS["search"]).speedup


def test_a_contract_that_takes_no_odd_sizes_meets_other_ones_too() -> None:
    source = SOURCE.replace('["rows"]\nblock', '["rows / (1 - min(columns % 8, 1))"]\nblock')
    found = TaskCases(TASK, 3, "cuda").others
    assert len(found) == 4
    large = tasks.parse("rms_norm:rows=64,columns=512")
    served = []
    for other in TaskCases(large, 3, "cuda").others:
        with contextlib.suppress(ContractError):
            plan_cuda(source, other, 132)
            served.append(dict(other.sizes)["columns"])
    assert len(served) == 2 and all(columns % 32 == 0 and columns != 512 for columns in served)


# -- what fits


def test_a_task_too_large_for_the_gpu_says_so() -> None:
    large = tasks.parse("softmax:rows=100000,columns=100000")
    with pytest.raises(UserError, match=r"needs about .* GiB of GPU memory .* choose smaller sizes"):
        cuda_task.require_feasible(large, 50 << 20, 80 << 30)
    cuda_task.require_feasible(tasks.parse("softmax", "cuda"), 50 << 20, 60 << 30)


def test_every_tasks_own_gpu_sizes_fit_a_gpu() -> None:
    from cuda_l2.tasks._base import definitions  # noqa: PLC0415

    for definition in definitions().values():
        for dtype in definition.dtypes:
            task = definition.task(dtype=dtype, target="cuda")
            assert dict(task.sizes) == dict(definition.gpu)
            assert needed_bytes(task, 50 << 20) < 70 << 30, str(task)


def test_windows_fit_the_cache_where_one_does() -> None:
    assert windows(tasks.parse("softmax:rows=64,columns=64"), 50 << 20) == 4
    assert windows(tasks.parse("softmax", "cuda"), 50 << 20) == 2


def test_scratch_is_garbage_before_a_launch(judged: Any) -> None:
    seen: list[bool] = []

    def looks(launch: Launch) -> None:
        honest(launch)
        seen.append(bool((launch.kept.view(np.uint8) == SCRATCH_BYTE).all()) and int(launch.calls[0]) == 7)

    _, bench, candidate, build = judged("late", late=kernel(looks))
    assert bench.verify(candidate, build).status == "correct"
    assert all(seen)
