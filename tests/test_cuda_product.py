"""Matrix products on a GPU: session, checks and rounds, with this machine's memory in place of a device's."""

import fcntl
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
from clocks import ticking
from cuda_cheats import all_cheats
from fake_gpu import L2_BYTES, SMS, WorkerProcess, Workers, fake_gpu, memory  # noqa: F401 - a fixture

from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cuda import windows, worker
from cuda_l2.machine.cuda import worker_main as cuda_worker_main
from cuda_l2.machine.cuda.arena import OUTSIDE, CudaArena
from cuda_l2.machine.cuda.windows import ORDERS, ORDERS_OF_TWO, PRODUCT_WINDOWS, Sharing
from cuda_l2.measure.baselines._base import LibraryProduct
from cuda_l2.measure.graph_rounds import Gpu, measure_cuda
from cuda_l2.measure.product_memory import ProductMemory, other_layout
from cuda_l2.measure.protocols import CUDA_PROTOCOLS
from cuda_l2.measure.rounds import CANDIDATE, Kernel, Terms
from cuda_l2.records import Build, BuildStatus, Candidate, Gemm, Layout
from cuda_l2.rigs.cuda import PRODUCT_SHARING
from cuda_l2.system.turns import Turns
from cuda_l2.tasks.products import CudaReferences, ProductCases
from cuda_l2.verify import all_checks, special, verify
from cuda_l2.verify._base import CheckFailed, Turn
from cuda_l2.verify._cuda import CudaSession, Facilities

GEMM = Gemm(64, 48, 80)
SOURCE = next(cheat.source for cheat in all_cheats() if cheat.name == "honest_split")


def halves(address: int, *shape: int) -> np.ndarray:
    return memory(address, 2 * int(np.prod(shape))).view(np.float16).reshape(shape)


class Library(LibraryProduct):
    """A library that computes on this machine."""

    def launcher(self, libraries: Any, gemm: Gemm) -> Any:
        return lambda stream, a, b_nn, b_tn, c: product(a, b_nn, c)


LIBRARIES = [Library("torch.matmul", 1), Library("cuBLAS", 2, layout=Layout.NN)]


def product(a: int, b: int, c: int, *, transposed: bool = False) -> None:
    with np.errstate(all="ignore"):
        right = halves(b, GEMM.n, GEMM.k).T if transposed else halves(b, GEMM.k, GEMM.n)
        found = halves(a, GEMM.m, GEMM.k).astype(np.float32) @ right.astype(np.float32)
        halves(c, GEMM.m, GEMM.n)[:] = found.astype(np.float16)


def honest(pointers: Mapping[str, int]) -> None:
    product(pointers["a"], pointers["b"], pointers["c"])


def last_row_missing(pointers: Mapping[str, int]) -> None:
    kept = halves(pointers["c"], GEMM.m, GEMM.n)[-1].copy()
    honest(pointers)
    halves(pointers["c"], GEMM.m, GEMM.n)[-1] = kept


def keeps_what_is_there(pointers: Mapping[str, int]) -> None:
    if np.isnan(halves(pointers["c"], GEMM.m, GEMM.n)).any():
        honest(pointers)


def rests_where_some_is_there(pointers: Mapping[str, int]) -> None:
    poisoned = np.isnan(halves(pointers["c"], GEMM.m, GEMM.n))
    if poisoned.all() or not poisoned.any():
        honest(pointers)


def before(pointers: Mapping[str, int]) -> None:
    honest(pointers)
    memory(pointers["c"] - 2, 1)[:] = 1


def nothing_for_one_operand(pointers: Mapping[str, int]) -> None:
    if pointers["a"] != pointers["b"]:
        honest(pointers)
    else:
        halves(pointers["c"], GEMM.m, GEMM.n)[:] = 0


def takes_b_for_a_by_a_sample(pointers: Mapping[str, int]) -> None:
    words = [halves(pointers[name], GEMM.m, GEMM.k)[:, -8:] for name in "ab"]
    product(pointers["a"], pointers["a" if np.array_equal(*words) else "b"], pointers["c"])


@pytest.fixture
def parts(fake_gpu: Any, tmp_path: Path) -> Callable[..., Any]:  # noqa: F811 - the fixture
    def opened(body: Callable[[Mapping[str, int]], None]) -> tuple[Workers, Candidate, Build]:
        def kernel(pointers: Mapping[str, int], plan: Plan) -> None:
            body(pointers)

        rig = fake_gpu({"kernel": kernel})
        path = tmp_path / "kernel.cubin"
        path.write_text("kernel")
        candidate = Candidate(SOURCE)
        return rig.workers, candidate, Build(candidate.id, BuildStatus.BUILT, artifact=str(path))

    return opened


def references() -> CudaReferences:
    def library(gemm: Gemm, a: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
        return [(a.float() @ b.float()).half(), (a.double() @ b.double()).half()]

    found = CudaReferences(library)
    found.device = torch.device("cpu")
    return found


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (honest, "correct", ""),
        (last_row_missing, "incorrect", "left 48 of 3072 elements of c unwritten"),
        (keeps_what_is_there, "unhygienic", "held before"),
        (rests_where_some_is_there, "unhygienic", "look right already (left "),
        (before, "unhygienic", OUTSIDE),
    ],
)
def test_a_kernel_is_judged_as_it_behaves(parts: Any, body: Any, status: str, reason: str) -> None:
    workers, candidate, build = parts(body)

    def delayed(*_: object) -> list[Build]:
        return [Build(candidate.id, BuildStatus.FAILED, "none here")]

    with CudaArena([GEMM], 1 << 20) as arena:
        cases = ProductCases(GEMM, 1, references())
        facilities = Facilities(workers, SMS, delayed, 1.0, lambda *_: "")
        verdict = verify(lambda: CudaSession(candidate, build, arena, cases, facilities), all_checks(), full=True)
    assert verdict.status == status and reason in verdict.reason, (verdict.check, verdict.reason)
    if status == "correct":
        expected = {"exact match", "special values", "hygiene", "state", "concurrency", "stress", "races"}
        assert expected <= set(verdict.passed)
        assert "record_loaded" in workers.worker.calls


def writes_a(pointers: Mapping[str, int]) -> None:
    honest(pointers)
    halves(pointers["a"], GEMM.m, GEMM.k)[3, 3] += 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [(writes_a, "changed its inputs"), (before, OUTSIDE), (last_row_missing, "left 48 of 3072 elements of c")],
)
def test_what_one_launch_in_a_row_does_is_found(parts: Any, body: Any, reason: str) -> None:
    """Though one message asks for all of them, and the next ones' tensors lie where its own lay."""
    launches = 0

    def once(pointers: Mapping[str, int]) -> None:
        nonlocal launches
        launches += 1
        (body if launches == 2 else honest)(pointers)

    workers, candidate, build = parts(once)
    with CudaArena([GEMM], 1 << 20, windows=PRODUCT_WINDOWS, sharing=Sharing.OVERLAPPING) as arena:
        cases = ProductCases(GEMM, 1, references())
        facilities = Facilities(workers, SMS, lambda *_: [], 1.0, lambda *_: "")
        with CudaSession(candidate, build, arena, cases, facilities) as session:
            session.as_timed()
            turns = [Turn(cases.drawn(f"row {number}"), place=0) for number in range(4)]
            with pytest.raises(CheckFailed, match=reason):
                list(session.launch_each(turns))
    assert launches == 4 and workers.worker.calls.count("launch") == 1


@pytest.mark.parametrize(
    ("body", "where"), [(nothing_for_one_operand, "one tensor"), (takes_b_for_a_by_a_sample, "one element of one row")]
)
def test_a_kernel_that_is_wrong_for_one_operand_is_found(
    parts: Any, body: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "GEMM", Gemm(48, 48, 80))
    workers, candidate, build = parts(body)
    with CudaArena([GEMM], 1 << 20, windows=PRODUCT_WINDOWS, sharing=Sharing.OVERLAPPING) as arena:
        cases = ProductCases(GEMM, 1, references())
        facilities = Facilities(workers, SMS, lambda *_: [], 1.0, lambda *_: "")
        verdict = verify(lambda: CudaSession(candidate, build, arena, cases, facilities), all_checks())
    assert verdict.check == "same operand" and where in verdict.reason, (verdict.check, verdict.reason)


@pytest.mark.parametrize("order", [*itertools.permutations("abc"), *itertools.permutations("abc", 2)], ids="".join)
def test_a_kernel_that_is_wrong_where_tensors_lie_side_by_side_is_found(
    parts: Any, order: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "ORDERS_OF_TWO", 6)  # two are drawn
    bytes_of = {tensor.name: tensor.bytes for tensor in GEMM.tensors}

    def wrong_side_by_side(pointers: Mapping[str, int]) -> None:
        honest(pointers)
        behind = {
            (one, two)
            for one, two in itertools.permutations("abc", 2)
            if pointers[one] + bytes_of[one] == pointers[two]
        }
        if behind == set(itertools.pairwise(order)):
            halves(pointers["c"], GEMM.m, GEMM.n)[5, 7] += 1

    workers, candidate, build = parts(wrong_side_by_side)
    with CudaArena([GEMM], 1 << 20, windows=PRODUCT_WINDOWS, sharing=Sharing.OVERLAPPING) as arena:
        cases = ProductCases(GEMM, 1, references())
        facilities = Facilities(workers, SMS, lambda *_: [], 1.0, lambda *_: "")
        verdict = verify(lambda: CudaSession(candidate, build, arena, cases, facilities), all_checks())
    assert verdict.check == "side by side" and "right behind one another: c[5, 7]" in verdict.reason, verdict.reason


def test_a_launch_that_rests_in_the_middle_of_a_row_is_found(parts: Any) -> None:
    """As where what it keeps is lost before the row ends: shared memory, once another process has the GPU."""
    row = looks = 0

    def rests(pointers: Mapping[str, int]) -> None:
        nonlocal row, looks
        if not np.isnan(halves(pointers["c"], GEMM.m, GEMM.n)).any():
            row += 1
        else:
            looks, row = looks + (row >= 5), 0
            if looks == 2:
                return
        honest(pointers)

    workers, candidate, build = parts(rests)
    with CudaArena([GEMM], 1 << 20) as arena:
        cases = ProductCases(GEMM, 1, references())
        facilities = Facilities(workers, SMS, lambda *_: [], 1.0, lambda *_: "")
        verdict = verify(lambda: CudaSession(candidate, build, arena, cases, facilities), all_checks())
    assert verdict.status == "unhygienic" and "equal launches" in verdict.reason, (verdict.check, verdict.reason)


def test_shared_memory_is_spoilt_but_where_state_is_looked_for(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And launches meet every window that timed ones have, and every order side by side."""
    workers, candidate, build = parts(honest)
    met: list[tuple[bool, int]] = []
    launch = WorkerProcess.launch

    def watched(process: WorkerProcess, turns: list[dict[str, Any]]) -> None:
        met.extend((turn["spoil"], turn["binding"]) for turn in turns)
        launch(process, turns)

    monkeypatch.setattr(WorkerProcess, "launch", watched)
    with CudaArena([GEMM], 1 << 20, windows=PRODUCT_WINDOWS, sharing=Sharing.OVERLAPPING) as arena:
        cases = ProductCases(GEMM, 1, references())
        facilities = Facilities(workers, SMS, lambda *_: [], 1.0, lambda *_: "")
        verdict = verify(lambda: CudaSession(candidate, build, arena, cases, facilities), all_checks())
    assert verdict.status == "correct", (verdict.check, verdict.reason)
    assert {spoil for spoil, _ in met} == {True, False}
    places, several = {place for _, place in met}, PRODUCT_WINDOWS**2
    assert set(range(several, several + ORDERS + ORDERS_OF_TWO)) <= places
    for window in (arena.window_of(GEMM.inputs[0], place) for place in range(several)):
        assert window in {arena.window_of(GEMM.inputs[0], place) for place in places if place < several}
    for window in (arena.window_of(GEMM.inputs[1], place) for place in range(several)):
        assert window in {arena.window_of(GEMM.inputs[1], place) for place in places if place < several}


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_kernel_that_drops_nans_in_one_window_of_a_tensor_is_found(parts: Any, name: str) -> None:
    where = {0}

    def drops(pointers: Mapping[str, int]) -> None:
        honest(pointers)
        if pointers[name] in where:
            np.nan_to_num(halves(pointers["c"], GEMM.m, GEMM.n), copy=False)

    workers, candidate, build = parts(drops)
    with CudaArena([GEMM], 1 << 20, windows=PRODUCT_WINDOWS, sharing=Sharing.OVERLAPPING) as arena:
        facilities = Facilities(workers, SMS, lambda *_: [], 1.0, lambda *_: "")
        with CudaSession(candidate, build, arena, ProductCases(GEMM, 1, references()), facilities) as session:
            session.as_timed()
            special.CHECK.run(session)
            (tensor,) = (tensor for tensor in GEMM.tensors if tensor.name == name)
            windows = {arena.address(arena.place(tensor, place)) for place in range(arena.place_count)}
            assert len(windows) == PRODUCT_WINDOWS
            for window in windows:
                where = {window}
                with pytest.raises(CheckFailed, match="with nan values comes out wrong"):
                    special.CHECK.run(session)


def test_what_others_must_not_come_between_is_done_alone_and_the_rest_beside_them(parts: Any, tmp_path: Path) -> None:
    file, met = tmp_path / "turns", list[tuple[str, bool]]()

    def refused(kind: int) -> bool:
        with file.open("w") as other:
            try:
                fcntl.flock(other, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    workers, candidate, build = parts(honest)
    call = workers.worker.call

    def watched(op: str, timeout_s: float, *descriptors: Any, **terms: Any) -> Any:
        kept = any(not turn["spoil"] for turn in terms.get("turns", []))
        met.append((f"{op} {kept}", refused(fcntl.LOCK_SH)))
        assert refused(fcntl.LOCK_EX)  # it has a turn
        return call(op, timeout_s, *descriptors, **terms)

    workers.worker.call = watched
    with CudaArena([GEMM], 1 << 20, windows=2, sharing=Sharing.OVERLAPPING) as arena, Turns(file) as turns:
        facilities = Facilities(workers, SMS, lambda *_: [], 1.0, lambda *_: "", turns)
        cases = ProductCases(GEMM, 1, references())
        with turns.taken():
            verdict = verify(lambda: CudaSession(candidate, build, arena, cases, facilities), all_checks())
        assert verdict.status == "correct", verdict.reason
        assert {op for op, alone in met if alone} == {"launch True", "launch_often False"}
        assert {op for op, alone in met if not alone} == {
            "load False",
            "launch False",
            "loaded_launches False",
        }
        met.clear()
        terms, nothing = Terms(CUDA_PROTOCOLS["search"], np.random.default_rng(1), clock=ticking(0.5)), cast(Any, None)
        memory = ProductMemory(arena, GEMM, torch.Generator().manual_seed(1), workers.helpers, nothing)
        kernels = {CANDIDATE: Kernel(candidate, build)}
        with turns.taken():
            timing = measure_cuda(Gpu(workers, SMS, L2_BYTES, turns), LIBRARIES, kernels, memory, terms)[CANDIDATE]
        assert timing.status == "measured", timing.reason
        assert {op for op, alone in met if not alone} <= {"load False", "traced False"}
        assert {("time False", True), ("record False", True)} <= {*met}


def test_a_result_kept_for_an_a_is_wrong_for_another_b(parts: Any) -> None:
    """Where what keeps it is none of what verification looks into."""
    kept: dict[Any, np.ndarray] = {}

    def recalls(pointers: Mapping[str, int]) -> None:
        key = pointers["a"], *halves(pointers["a"], 4).tolist()
        if key not in kept:
            honest(pointers)
            kept[key] = halves(pointers["c"], GEMM.m, GEMM.n).copy()
        halves(pointers["c"], GEMM.m, GEMM.n)[:] = kept[key]

    workers, candidate, build = parts(recalls)
    with CudaArena([GEMM], 1 << 20, windows=PRODUCT_WINDOWS, sharing=Sharing.OVERLAPPING) as arena:
        terms, nothing = Terms(CUDA_PROTOCOLS["search"], np.random.default_rng(1), clock=ticking(0.5)), cast(Any, None)
        memory = ProductMemory(arena, GEMM, torch.Generator().manual_seed(1), workers.helpers, nothing)
        kernels = {CANDIDATE: Kernel(candidate, build)}
        timing = measure_cuda(Gpu(workers, SMS, L2_BYTES), LIBRARIES, kernels, memory, terms)[CANDIDATE]
    assert timing.status == "wrong-output", timing.reason


@pytest.mark.parametrize(("spoilt", "first", "share"), [((0, 0.0), 0, 0), ((1, 0.0), 1, 0), ((0, 1.0), 0, 1)])
def test_a_recorded_round_begins_as_drawn(parts: Any, monkeypatch: Any, spoilt: Any, first: int, share: int) -> None:
    met: list[tuple[int, int]] = []
    spoils: list[int] = []
    record = WorkerProcess.record

    def watched(process: WorkerProcess, bindings: list[int], **terms: Any) -> None:
        spoils.clear()
        record(process, bindings, **terms)
        met.append((len(spoils), len(bindings)))

    monkeypatch.setattr(cuda_worker_main, "SPOILT", (spoilt,))
    monkeypatch.setattr(WorkerProcess, "_spoil", lambda _, slot=0: spoils.append(slot))
    monkeypatch.setattr(WorkerProcess, "record", watched)
    workers, candidate, build = parts(honest)
    with CudaArena([GEMM], 1 << 20, windows=PRODUCT_WINDOWS, sharing=Sharing.OVERLAPPING) as arena:
        terms, nothing = Terms(CUDA_PROTOCOLS["search"], np.random.default_rng(1), clock=ticking(0.5)), cast(Any, None)
        memory = ProductMemory(arena, GEMM, torch.Generator().manual_seed(1), workers.helpers, nothing)
        kernels = {CANDIDATE: Kernel(candidate, build)}
        measure_cuda(Gpu(workers, SMS, L2_BYTES), LIBRARIES, kernels, memory, terms)
    ((found, launches),) = met
    assert launches > 1 and found == first + share * launches


class Transposed(LibraryProduct):
    """A library that computes on this machine, and reads B as N x K."""

    def launcher(self, libraries: Any, gemm: Gemm) -> Any:
        return lambda stream, a, b_nn, b_tn, c: product(a, b_tn, c, transposed=True)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("rotates", [True, False])
def test_b_in_either_layout_is_what_its_readers_are_held_to(parts: Any, beside: bool, rotates: bool) -> None:
    """Whether or not a candidate may have it in the other one."""

    def transposed(pointers: Mapping[str, int]) -> None:
        product(pointers["a"], pointers["b"], pointers["c"], transposed=True)

    workers, candidate, build = parts(transposed if beside else honest)
    others = [other_layout(GEMM)] if beside else []
    sharing, windows = PRODUCT_SHARING[rotates], 5 if rotates else PRODUCT_WINDOWS
    with CudaArena([GEMM], 1 << 20, windows=windows, sharing=sharing, beside=others) as arena:
        kernels = {CANDIDATE: Kernel(candidate, build, Layout.TN if beside else None)}
        chosen = CUDA_PROTOCOLS["rotating" if rotates else "search"]
        terms, nothing = Terms(chosen, np.random.default_rng(1), clock=ticking(0.5)), cast(Any, None)
        memory = ProductMemory(arena, GEMM, torch.Generator().manual_seed(1), workers.helpers, nothing)
        libraries = [*LIBRARIES, Transposed("cuBLAS", 3, layout=Layout.TN)]
        timing = measure_cuda(Gpu(workers, SMS, L2_BYTES), libraries, kernels, memory, terms)[CANDIDATE]
    assert timing.status == "measured", timing.reason
    assert [arm.name for arm in timing.baselines] == ["torch.matmul", "cuBLAS NN", "cuBLAS TN"]


@pytest.mark.parametrize("protocol", ["search", "offline", "rotating", "server", "paper"])
@pytest.mark.parametrize(("body", "status"), [(honest, "measured"), (keeps_what_is_there, "wrong-output")])
def test_it_is_timed_beside_libraries(parts: Any, protocol: str, body: Any, status: str) -> None:
    workers, candidate, build = parts(body)

    chosen = CUDA_PROTOCOLS[protocol]
    windows, sharing = 5 if chosen.rotates else PRODUCT_WINDOWS, PRODUCT_SHARING[chosen.rotates]
    with CudaArena([GEMM], 1 << 20, windows=windows, sharing=sharing) as arena:
        gpu = Gpu(workers, SMS, L2_BYTES)
        kernels = {CANDIDATE: Kernel(candidate, build, Layout.NN)}
        terms = Terms(chosen, np.random.default_rng(1), clock=ticking(0.5))
        nothing: Any = None
        memory = ProductMemory(arena, GEMM, torch.Generator().manual_seed(1), workers.helpers, nothing)
        timing = measure_cuda(gpu, LIBRARIES, kernels, memory, terms)[CANDIDATE]
    if body is keeps_what_is_there and protocol in ("server", "paper"):
        status = "measured"  # each output is met once, and poisoned before
    assert timing.status == status, timing.reason
    if status == "measured":
        assert [arm.name for arm in timing.baselines] == ["torch.matmul", "cuBLAS NN"]


def test_no_launch_can_know_that_it_is_the_last(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    capture = WorkerProcess.capture

    def watched(process: WorkerProcess, bindings: list[int], slot: int = 0) -> dict[str, Any]:
        lengths.append(len(bindings))
        return capture(process, bindings, slot)

    monkeypatch.setattr(WorkerProcess, "capture", watched)
    workers, candidate, build = parts(honest)
    with CudaArena([GEMM], 1 << 20, windows=PRODUCT_WINDOWS, sharing=Sharing.OVERLAPPING) as arena:
        nothing: Any = None
        memory = ProductMemory(arena, GEMM, torch.Generator().manual_seed(1), workers.helpers, nothing)
        for seed in range(4):
            terms = Terms(CUDA_PROTOCOLS["offline"], np.random.default_rng(seed), clock=ticking(0.5))
            kernels = {CANDIDATE: Kernel(candidate, build, Layout.NN)}
            timing = measure_cuda(Gpu(workers, SMS, L2_BYTES), LIBRARIES, kernels, memory, terms)[CANDIDATE]
    assert timing.status == "measured", timing.reason
    longest = max(lengths)
    assert longest >= 16 and len({length for length in lengths if length > 1}) > 2
    assert all(length >= longest - longest // 8 for length in lengths if length > 1)


def test_a_worker_lives_on_when_its_memory_goes(fake_gpu) -> None:  # noqa: F811 - the fixture
    workers = Workers({})
    with CudaArena([GEMM], 1 << 20) as arena:
        worker = workers.get(arena)
        workers.detach()
    assert worker.alive and worker.arena is None and worker.process.buffers == {} and worker.calls == ["attach"]


def test_a_worker_stays_though_another_was_traced_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Started:
        arena, alive, mapped = None, True, 0

        def __init__(self, helpers: Path) -> None:
            made.append(self)

        def attach(self, arena: Any) -> None:
            self.arena = arena

        def call(self, op: str, timeout_s: float, **arguments: Any) -> None:
            self.mapped = len(arguments["sizes"])

        def close(self) -> None:
            self.alive = False

    monkeypatch.setattr(worker, "CudaWorker", Started)
    monkeypatch.setattr(worker, "compiled_helpers", Path)
    monkeypatch.setattr(worker, "Helpers", lambda cubin: None)
    arena = cast(Any, object())
    with worker.CudaWorkers("sm_90a") as workers:
        plain, traced = workers.get(arena), workers.get(arena, traced=True)
        assert plain is not traced
        for _ in range(3):  # shape by shape, replays and then single launches
            assert workers.get(arena) is plain and workers.get(arena, traced=True) is traced
        assert len(made) == 3, "one is ready for whoever needs a fresh one"
        workers.detach()
        assert plain.arena is None and traced.arena is None
        plain.alive = False
        assert workers.get(arena) not in (plain, traced) and workers.get(arena, traced=True) is traced
        workers.renew()
        assert not traced.alive and workers.get(arena, traced=True).alive
    assert not any(each.alive for each in made)


def test_a_worker_has_its_memory_near_one_another_and_far_apart(monkeypatch) -> None:
    made: list[tuple[int, int]] = []

    def imported(descriptor: int, size: int, grain: int, *, writable: bool = True, far: int = 0) -> Any:
        assert far % grain == 0 and far + size < 1 << 37
        if writable:
            made.append((size, far))
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(cuda_worker_main, "MappedMemory", SimpleNamespace(imported=imported))
    process, sizes = WorkerProcess({}), {str(number): [(1 + number) << 21, 1 << 21] for number in range(8)}
    for _ in range(2):
        process.attach(sizes, ["0"], [os.open("/dev/null", os.O_RDONLY) for _ in sizes])
    near, first, again, second = (made[start : start + 8] for start in range(0, 32, 8))
    assert near == again == [(size, 0) for size, _ in sizes.values()]
    for far in first, second:
        assert [size for size, _ in far] == [size for size, _ in near[::-1]]
        assert max(room for _, room in far) > 1 << 32
    assert first != second
