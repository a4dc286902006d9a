"""Tasks on a GPU: arenas, sessions, checks and rounds, with this machine's memory in place of a device's."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
from fake_gpu import RMS_NORM, Helpers, Rig, WorkerProcess, fake_gpu, floats, memory  # noqa: F401 - a fixture

from cuda_l2 import tasks
from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cuda.arena import NOT_RESTORED, OUTSIDE
from cuda_l2.machine.cuda.windows import Sharing
from cuda_l2.machine.fills import POISON_WORDS, SCRATCH_BYTE
from cuda_l2.measure.baselines import torch_compile, torch_eager
from cuda_l2.measure.baselines._base import TorchTask, baselines_of
from cuda_l2.measure.protocols import CUDA_PROTOCOLS
from cuda_l2.records import Build, BuildStatus, Candidate
from cuda_l2.rigs.cuda import CudaBench
from cuda_l2.verify import concurrency
from cuda_l2.verify._base import CheckFailed
from cuda_l2.verify._cuda import CudaSession

EAGER_GRAPH, COMPILED_GRAPH = torch_eager.EAGER_GRAPH.name, torch_compile.COMPILED_GRAPH.name
ARMS = [each.name for each in baselines_of(TorchTask, "cuda")]
TASK = tasks.parse("rms_norm:rows=10,columns=12")
EMBEDDING = """/* cuda-l2
target = "cuda"
arch = "sm_90a"
buffer = [
  {name = "tokens", shape = ["batch", "length"], dtype = "int64"},
  {name = "table", shape = ["vocabulary", "width"], kind = "weight"},
  {name = "out", shape = ["batch", "length", "width"], kind = "output"},
]
[[launch]]
kernel = "embed"
grid = ["batch"]
block = [128]
args = ["tokens", "table", "out"]
edge = "programmatic"
*/
"""
PROGRAMMATIC = RMS_NORM.replace("*/", 'edge = "programmatic"\n*/')


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
        with np.errstate(invalid="ignore"):  # infinities among special values
            scale = 1 / np.sqrt(np.square(self.x).mean(1, keepdims=True, dtype=np.float32) + np.float32(1e-6))
            return (self.x * scale * (self.gain if gain is None else gain)).astype(np.float32)


def kernel(body: Callable[[Launch], None]) -> Callable[[Mapping[str, int], Plan], None]:
    return lambda pointers, plan: body(Launch(pointers, plan))


def honest(launch: Launch) -> None:
    launch.out[:] = launch.answer()


def stray(at: Callable[[Launch], int], where: str = "out") -> Callable[[Launch], None]:
    def body(launch: Launch) -> None:
        honest(launch)
        memory(launch.pointers[where] + at(launch), 1)[:] = 1

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


def needs_32_bytes(launch: Launch) -> None:
    launch.out[:] = launch.answer() if launch.pointers["x"] % 32 == 0 else 0


def rests(launch: Launch) -> None:
    """Counts launches in scratch that nothing has filled in between, and computes nothing any more after 25."""
    launches = launch.kept[-1] if launch.kept[-1] in range(1000, 1026) else 1000
    if launches < 1025:
        honest(launch)
        launch.kept[-1] = launches + 1


BODIES = {
    "honest": (honest, ""),
    "behind": (stray(lambda launch: launch.out.nbytes), OUTSIDE),
    "before": (stray(lambda _: -1), OUTSIDE),
    "behind the workspace": (stray(lambda launch: launch.kept.nbytes, "kept"), OUTSIDE),
    "behind the weight": (stray(lambda launch: launch.gain.nbytes, "gain"), f"{OUTSIDE}|changed its inputs or weights"),
    "shape": (shown_shape_only, "unwritten"),
    "row": (last_row_missing, "unwritten"),
    "input": (changes_input, "changed its inputs or weights"),
    "counts": (counts, NOT_RESTORED),
    "weight": (keeps_weight, "it keeps state|gain"),
    "skips": (skips_what_looks_right, "skips work|held before"),
    "halves": (in_halves, "RMS|off by"),
    "noise": (adds_noise, "repeatable"),
    "alignment": (needs_32_bytes, "where tensors begin 16 bytes off"),
    "rests": (rests, "unwritten|after many equal launches"),
}


@pytest.fixture
def judged(fake_gpu: Any, tmp_path: Path) -> Callable[..., Any]:  # noqa: F811 - the fixture
    """judged(name) is the bench, candidate and build of a body above."""

    def opened(name: str, source: str = RMS_NORM, task: Any = TASK, **bodies: Any) -> tuple[Rig, Any, Candidate, Build]:
        known = {each: kernel(body) for each, (body, _) in BODIES.items()} | bodies
        rig = fake_gpu(known)
        path = tmp_path / "kernel.cubin"
        path.write_text(name)
        candidate = Candidate(source)
        return rig, CudaBench(rig, task, 1), candidate, Build(candidate.id, BuildStatus.BUILT, artifact=str(path))

    return opened


# -- verification


@pytest.mark.parametrize("name", BODIES)
def test_a_kernel_is_judged_as_it_behaves(judged: Any, name: str) -> None:
    rig, bench, candidate, build = judged(name)
    verdict = bench.verify(candidate, build)
    reason = BODIES[name][1]
    if not reason:
        assert verdict.status == "correct", (verdict.check, verdict.reason)
        before = ("five seeds", "alignment", "other values", "other shapes", "where timed", "special values")
        checks = (*before, "hygiene", "state", "often", "memory", "side by side", "concurrency")
        assert verdict.passed == checks
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
        if rig.workers.worker.calls[-1] == "record_loaded" and next(launches) >= 20:
            launch.out[3, 4] += 1e-6

    rig, bench, candidate, build = judged("late", late=kernel(now_and_then))
    verdict = bench.verify(candidate, build, full=True)
    assert verdict.check == "stress" and "out[3, 4]" in verdict.reason, verdict
    assert rig.workers.renewed


def test_a_kernel_that_writes_before_the_kernel_ahead_has_read_is_found(judged: Any, monkeypatch: Any) -> None:
    poison, copy = POISON_WORDS["float32"].to_bytes(4, "little"), Helpers.slow_copy

    def behind_an_early_write(helpers: Helpers, stream: int, source: int, target: int, words: int, ns: int) -> None:
        if bytes(memory(source, 4)) == poison:
            memory(source, 4)[:] = 0
        copy(helpers, stream, source, target, words, ns)

    monkeypatch.setattr(Helpers, "slow_copy", behind_an_early_write)
    _, bench, candidate, build = judged("honest", PROGRAMMATIC)
    verdict = bench.verify(candidate, build)
    assert verdict.check == "concurrency" and "may still read it" in verdict.reason, verdict


def test_a_kernel_that_keeps_a_constant_input_from_the_launch_before_is_found(judged: Any) -> None:
    kept: list[np.ndarray] = []

    def keeps(launch: Launch) -> None:
        launch.out[:] = launch.answer(kept[-1] if kept else None)
        kept.append(launch.gain.copy())

    source = PROGRAMMATIC.replace("[[", 'constant = ["gain"]\n[[', 1)
    rig, bench, candidate, build = judged("late", source, late=kernel(keeps))
    session = CudaSession(candidate, build, bench._arena(rotates=False), bench._cases, rig.facilities)
    assert session.constant == ("gain",)
    with session, pytest.raises(CheckFailed, match="keeps gain of an earlier launch"):
        concurrency.CHECK.run(session)


def test_a_launch_between_finds_indices_that_lie_in_the_table(judged: Any, monkeypatch: Any) -> None:
    def embeds(pointers: Mapping[str, int], plan: Plan) -> None:
        tokens = memory(pointers["tokens"], 8 * 2 * 3).view(np.int64)
        table = floats(pointers["table"], 7, 4)
        floats(pointers["out"], 6, 4)[:] = table[tokens]  # IndexError where one lies elsewhere

    between: list[tuple[int, int]] = []
    after_slow = WorkerProcess.after_slow

    def watched(process: WorkerProcess, **terms: Any) -> None:
        between.append((terms["between"], len(terms["bindings"]) - 1))
        after_slow(process, **terms)

    monkeypatch.setattr(WorkerProcess, "after_slow", watched)
    task = tasks.parse("embedding:batch=2,length=3,vocabulary=7,width=4")
    rig, bench, candidate, build = judged("late", EMBEDDING, task, late=embeds)
    with CudaSession(candidate, build, bench._arena(rotates=False), bench._cases, rig.facilities) as session:
        session.as_timed()
        for _ in range(8):
            concurrency.CHECK.run(session)
    assert set(between) == {(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)}


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
        (RMS_NORM.replace('name = "x"', 'name = "x", dtype = "float16"'), "float16"),
        (RMS_NORM.replace('"4 * rows * (columns + 1)"', "1000000000000"), "of workspace for rms_norm"),
        (RMS_NORM.replace('"columns"], kind = "weight"', '12], kind = "weight"'), ""),
    ],
)
def test_contracts_that_do_not_fit_are_told_so(judged: Any, source: str, reason: str) -> None:
    _, bench, candidate, build = judged("honest", source)
    verdict = bench.verify(candidate, build)
    if reason:
        assert verdict.status == "unhygienic" and reason in verdict.reason
    else:  # serves this number of columns alone, of any rows
        assert verdict.status == "correct" and "other shapes" in verdict.passed


# -- timing


@pytest.mark.parametrize("protocol", ["search", "offline", "rotating", "server"])
def test_a_kernel_is_timed_beside_pytorch(judged: Any, protocol: str) -> None:
    _, bench, candidate, build = judged("honest")
    timing = bench.time(candidate, build, CUDA_PROTOCOLS[protocol])
    assert timing.candidate and timing.speedup, timing.reason
    names = [arm.name for arm in timing.baselines]
    assert names == ([EAGER_GRAPH] if protocol == "search" else ARMS)
    if protocol != "search":
        assert timing.conditions.sm_mhz == 1500 and timing.max_difference < 1e-5
        per_process = timing.conditions.empty_us or timing.conditions.host_call_to_done_us
        assert set(per_process) >= {"candidate"} and len(per_process) == (len(ARMS) + 2 if protocol == "server" else 2)


def test_baselines_are_timed_alone(judged: Any) -> None:
    _, bench, _, _ = judged("honest")
    timing = bench.time_baselines(CUDA_PROTOCOLS["offline"])
    assert timing.candidate and timing.candidate.name == COMPILED_GRAPH
    assert [arm.name for arm in timing.baselines] == ARMS[1:]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (skips_what_looks_right, "did not produce its own result"),
        (changes_input, "changed its inputs or weights|did not produce its own result"),
        (changes_what_does_not_count, "changed its inputs or weights"),
        (stray(lambda launch: launch.out.nbytes), OUTSIDE),
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
    left_out = timing.conditions.left_out
    assert left_out["torch.compile reduce-overhead"] == "RuntimeError: no graphs today"
    assert "out is off" in left_out["torch.compile"] and "out is off" in left_out[COMPILED_GRAPH]
    assert [arm.name for arm in timing.baselines] == [EAGER_GRAPH, "torch eager"]


@pytest.mark.parametrize("sharing", [Sharing.SEPARATE, Sharing.OVERLAPPING, Sharing.PACKED])
@pytest.mark.parametrize("several", [1, 2, 3, 4, 7, 40])
def test_no_output_is_written_twice_from_the_same_inputs(several: int, sharing: Sharing) -> None:
    """So a launch that is left out shows, whichever it is; with four windows also what the replay before it left."""
    from cuda_l2.measure.task_memory import TaskMemory  # noqa: PLC0415

    memory: Any = TaskMemory.__new__(TaskMemory)
    memory.arena = SimpleNamespace(windows=several, sharing=sharing, pairings=min(4, several))
    rng = np.random.default_rng(several)
    for count in (1, 2, 8, 200):
        variants = [memory.sequence(count, rng, variant) for variant in range(2)]
        for found in variants:
            assert len(found) == count and set(found) <= set(range(several * memory.arena.pairings))
            written: dict[int, int] = {}
            for number, place in enumerate(found):
                output = memory.outputs_of(place)
                if several > 1:
                    assert written.get(output) != memory.inputs_of(place)
                    again = number > 0 and memory.outputs_of(found[number - 1]) == output
                    assert not again or (sharing.rotates and number % several == 0), "not again at once"
                written[output] = memory.inputs_of(place)
        assert memory.distinct == (several >= 4)
        assert not memory.distinct or not set(variants[0]) & set(variants[1])


def test_redrawn_cases_are_others(judged: Any) -> None:
    _, bench, candidate, build = judged("honest")
    before = bench._cases.drawn("seed 0").tensors["x"].clone()
    bench.redraw(5)
    assert not torch.equal(before, bench._cases.drawn("seed 0").tensors["x"])
    assert bench.verify(candidate, build).status == "correct"
    assert bench.time(candidate, build, CUDA_PROTOCOLS["search"]).speedup


def test_scratch_is_garbage_before_a_launch(judged: Any) -> None:
    seen: list[bool] = []

    def looks(launch: Launch) -> None:
        honest(launch)
        seen.append(bool((launch.kept.view(np.uint8) == SCRATCH_BYTE).all()) and int(launch.calls[0]) == 7)

    _, bench, candidate, build = judged("late", late=kernel(looks))
    assert bench.verify(candidate, build).status == "correct"
    assert all(seen)
