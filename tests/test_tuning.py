"""The choice of a shape's kernel, on scripted times; choices files; and the way from a choice to a launch without a GPU."""

import json
import multiprocessing
import warnings
from typing import ClassVar

import pytest
import torch
from fake_driver import fake_driver

from cuda_l2 import contract
from cuda_l2.library.deploy import calls, choices, dispatch, pack, recipes, tuning, vendor
from cuda_l2.library.deploy.choices import Choice, Place
from cuda_l2.library.deploy.entries import packed_algorithm
from cuda_l2.library.deploy.recipes import candidate
from cuda_l2.library.deploy.tuning import Arm, choose
from cuda_l2.library.table import family_of, schedule_text
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.measure import cublas
from cuda_l2.records import Candidate, Gemm
from cuda_l2.system.errors import UserError

GEMM = Gemm.parse("64x512x256:bf16")
PLACE = Place("H100 9.0 132", "580.1", "CUDA 13.0, torch 2.11", "0123456789abcdef")


class Scripted:
    """Times by a kernel's name and way; a list is used up, one time a sample. None: does not run or is wrong."""

    def __init__(self, **times: float | list[float] | None) -> None:
        self.times, self.prepared = times, []

    def prepare(self, arm: Arm) -> bool:
        self.prepared.append(name(arm))
        return self.times[name(arm)] is not None

    def sample(self, arm: Arm) -> float:
        found = self.times[name(arm)]
        return found.pop(0) if isinstance(found, list) else found


def name(arm: Arm) -> str:
    return f"{arm.kernel}{dict(arm.candidate.schedule)['way']}" if arm.candidate else "vendor"


def schedules(**ways: int):
    return (
        iter([Arm(kernel, Candidate("x", "table", (("way", way),), "sm90_wave")) for way in range(count)])
        for kernel, count in ways.items()
    )


def test_the_fastest_kernel_and_launch_serve_a_shape() -> None:
    found = choose(GEMM, schedules(a=2, b=2), Scripted(a0=5.0, a1=3.0, b0=4.0, b1=6.0, vendor=4.0))
    assert (found.kernel, found.schedule, found.us, found.vendor_us) == ("a", "way=1", 3.0, 4.0)
    assert found.served and found.gemm == GEMM


def test_torch_serves_what_no_kernel_wins_clearly() -> None:
    same = choose(GEMM, schedules(a=1), Scripted(a0=4.0, vendor=4.0))
    assert not same.served and (same.us, same.vendor_us) == (4.0, 4.0)
    often = 3 * [4.2, 3.9, 3.9, 4.2, 3.9, 3.9, 3.9]
    in_one_capture = [*14 * [3.9], *4 * [4.2], *3 * [3.9]]
    for turns in (often, in_one_capture):
        unsure = choose(GEMM, schedules(a=1), Scripted(a0=[9.0, 4.0, *turns], vendor=4.0))
        assert unsure.us < unsure.vendor_us and not unsure.served
    seldom = 3 * [4.2, *6 * [3.9]]
    assert choose(GEMM, schedules(a=1), Scripted(a0=[9.0, 4.0, *seldom], vendor=4.0)).served


def test_the_librarys_best_algorithm_serves_where_it_beats_kernels_and_torch() -> None:
    algorithms = [Arm("l", Candidate("", "cublaslt", (("way", way),), "cublaslt")) for way in range(4)]
    times = {"l0": 4.0, "l1": 2.0, "l2": 3.0, "l3": None, "vendor": 4.0}
    found = choose(GEMM, schedules(a=1), Scripted(a0=3.0, **times), algorithms)
    assert (found.kernel, found.family, found.schedule, found.us) == ("l", "cublaslt", "way=1", 2.0)
    assert choose(GEMM, schedules(a=1), Scripted(a0=1.0, **times), algorithms).kernel == "a"
    assert choose(GEMM, schedules(), Scripted(**times), algorithms).kernel == "l"


def test_a_kernel_that_is_wrong_or_does_not_run_is_out() -> None:
    assert choose(GEMM, schedules(a=2, b=1), Scripted(a0=None, a1=1.0, b0=3.0, vendor=4.0)).kernel == "b"
    assert not choose(GEMM, schedules(a=1), Scripted(a0=None, vendor=4.0)).served
    assert not choose(GEMM, schedules(), Scripted(vendor=4.0)).served


def test_only_the_best_schedules_are_timed_with_every_launch() -> None:
    count = tuning.BEST + 4
    times = {f"k{i}w{way}": float(i + 1) for i in range(count) for way in range(2)}
    timer = Scripted(**{key.replace("w", ""): value for key, value in times.items()}, vendor=50.0)
    choose(GEMM, schedules(**{f"k{i}": 2 for i in range(count)}), timer)
    assert {ready for ready in timer.prepared if ready.endswith("1") and ready != "k1"} >= {"k01", "k51"}
    assert "k91" not in timer.prepared


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_L2_HOME", str(tmp_path))
    return tmp_path


def test_choices_are_kept_and_joined(home) -> None:
    first = Choice("64x512x256", "a" * 16, "sm90_wave", "BM=64", 3.0, 4.0)
    assert choices.read(PLACE) == {}
    choices.add(PLACE, [first, Choice("1x1x1")])
    later = Choice("64x512x256", us=5.0, vendor_us=4.0)
    assert (
        choices.add(PLACE, [later]) == {Gemm.parse("1x1x1"): Choice("1x1x1"), first.gemm: later} == choices.read(PLACE)
    )
    assert choices.read(Place("H100 9.0 132", "581.0", PLACE.toolkit, PLACE.pack)) == {}
    assert not [path for path in home.rglob("*") if path.name.startswith(".")]


def _adds(number: int) -> None:
    choices.add(PLACE, [Choice(f"{number}x8x8", us=1.0)])


def test_processes_that_tune_at_once_keep_one_anothers_choices(home) -> None:
    workers = [multiprocessing.get_context("fork").Process(target=_adds, args=(number,)) for number in range(1, 9)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [gemm.m for gemm in choices.read(PLACE)] == [*range(1, 9)]


@pytest.mark.parametrize(
    "change", [lambda t: t[:-9], lambda t: t.replace("H100", "H200"), lambda t: t.replace("3.0", '"x"')]
)
def test_a_damaged_file_is_said_and_not_used(home, change) -> None:
    choices.add(PLACE, [Choice("64x512x256", "a" * 16, "sm90_wave", "BM=64", 3.0, 4.0)])
    PLACE.path.write_text(change(PLACE.path.read_text()))
    with pytest.raises(UserError, match="damaged"):
        choices.read(PLACE)


TARGET = compile_only("sm_90a")


class FakePack:
    """A pack whose kernels the recording driver loads."""

    identity = PLACE.pack

    def __init__(self, *names: str) -> None:
        self.kernels = dict.fromkeys(names)

    def cubin(self, name: str) -> bytes:
        if self.kernels[name]:
            raise UserError(f"kernel {name} was changed")
        return b"cubin"


@pytest.fixture
def tuned(home, monkeypatch):
    """A choice for a shape on device 0, as on a Hopper GPU."""
    gemm = Gemm.parse("256x512x1024:tn:bf16")
    family = family_of("sm90_wave")
    made = candidate(family, family.named(family.default(gemm, TARGET)), gemm, TARGET)
    kernel = contract.kernel_id(made.source)
    choices.add(PLACE, [Choice(str(gemm), kernel, family.name, schedule_text(made.schedule), 3.0, 4.0)])
    found = FakePack(kernel)
    monkeypatch.setattr(dispatch, "target_of", lambda device: TARGET)
    monkeypatch.setattr(choices, "place_of", lambda device, identity: PLACE)
    monkeypatch.setattr(dispatch, "installed", lambda: found)
    for cached in (dispatch.known, dispatch.warn, dispatch.pack):
        cached.cache_clear()
    yield gemm, kernel, found, contract.parse_cuda(made.source).plan(gemm, TARGET.sms)
    for cached in (dispatch.known, dispatch.pack):
        cached.cache_clear()


def operands(gemm: Gemm) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(gemm.m, gemm.k, dtype=torch.bfloat16), torch.ones(gemm.n, gemm.k, dtype=torch.bfloat16).t()


def parameter_sizes(plan) -> list[int]:
    sizes = {"pointer": 8, "tensor_map": 128}
    return [sizes.get(argument.kind) or len(argument.data) // 2 for argument in plan.launches[0].arguments]


def test_a_tuned_shape_is_launched_as_the_family_plans_it(tuned) -> None:
    gemm, _, _, plan = tuned
    with fake_driver() as (fake, library):
        fake.parameters(parameter_sizes(plan))
        library.on_miss(dispatch.serve)
        a, b = operands(gemm)
        calls.matmul(a, b)
        calls.matmul(a, b)
        calls.matmul(a[:8], b)
        first, second = fake.launches
        (planned,) = plan.launches
        assert tuple(first.grid) == tuple(second.grid) == planned.grid and tuple(first.cluster) == planned.cluster
        assert first.shared == planned.shared_bytes and bool(first.programmatic) == planned.programmatic
        assert {first.words[0], first.words[1]} <= {a.data_ptr(), b.data_ptr()}
        assert library.counts() | {"encoded": 0, "allocated": 0} == {
            **{"launched": 2, "vendor": 1, "encoded": 0, "resolved": 2, "allocated": 0, "read_ahead": 0}
        }


def test_a_chosen_algorithm_is_put_for_its_shape_and_library_alone(tuned, monkeypatch) -> None:
    gemm, *_ = tuned
    words = tuple((f"W{number}", number + (1 << 63)) for number in range(8))
    choice = Choice(str(gemm), vendor.FAMILY, vendor.FAMILY, schedule_text((*words, ("WORKSPACE", 64), ("VERSION", 7))))
    plans = []

    class Library:
        def put(self, plan: bytes, name: str, cubin: bytes) -> str:
            plans.append((plan, name, cubin))
            return ""

    monkeypatch.setattr(vendor, "native", Library)
    monkeypatch.setattr(cublas, "lt_version", lambda: 7)
    monkeypatch.setattr(cublas, "file_name", lambda library: f"lib{library}.so.13")
    assert dispatch.put(choice, 0) == ""
    algorithm = b"".join(word.to_bytes(8, "little") for _, word in words)
    assert plans == [(packed_algorithm(gemm, 0, algorithm, 64, "libcublasLt.so.13"), "0", b"")]
    monkeypatch.setattr(cublas, "lt_version", lambda: 8)
    assert "another version of cuBLASLt" in dispatch.put(choice, 0) and len(plans) == 1


@pytest.mark.parametrize("fault", ["another kernel", "damaged kernel", "no pack", "damaged file"])
def test_whatever_is_wrong_torch_serves_after_one_warning(tuned, fault, monkeypatch) -> None:
    gemm, kernel, found, plan = tuned
    if fault == "another kernel":
        choices.add(PLACE, [Choice(str(gemm), "0" * 16, **_fields(gemm))])
    elif fault == "damaged kernel":
        found.kernels[kernel] = True
    elif fault == "no pack":
        monkeypatch.setattr(dispatch, "installed", lambda: None)
    else:
        PLACE.path.write_text("{")
    with fake_driver() as (fake, library), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fake.parameters(parameter_sizes(plan))
        library.on_miss(dispatch.serve)
        a, b = operands(gemm)
        assert torch.equal(calls.matmul(a, b), a @ b) and torch.equal(calls.matmul(a, b), a @ b)
        assert fake["launch_count"] == 0
    assert len(said) == (fault != "no pack"), [str(each.message) for each in said]


class ByKernel:
    """In GraphTimer's place: times by the kernel's id."""

    times: ClassVar[dict[str, float]] = {}

    def __init__(self, gemm: Gemm, device: int, found: object, *, cold: bool, rule: int = 0) -> None:
        if gemm.m == 1 << 20:
            raise torch.OutOfMemoryError

    def prepare(self, arm: Arm) -> bool:
        return arm.kernel in self.times

    def sample(self, arm: Arm) -> float:
        return self.times[arm.kernel]


@pytest.fixture
def timed(tuned, monkeypatch):
    """The pack's one kernel and torch, on scripted times."""
    gemm, kernel, _, _ = tuned
    monkeypatch.setattr(tuning, "device_for_timing", lambda: 0)
    monkeypatch.setattr(tuning, "GraphTimer", ByKernel)
    family = family_of("sm90_wave")
    compiled = {
        name: value for name, value in family.named(family.default(gemm, TARGET)).items() if name in family.compiled
    }
    monkeypatch.setattr(tuning, "family_schedules", lambda found, gemm: [("sm90_wave", compiled)])
    return gemm, kernel


def test_tuned_shapes_are_kept_and_served_from_then_on(timed, monkeypatch) -> None:
    gemm, kernel = timed
    monkeypatch.setattr(ByKernel, "times", {kernel: 2.0, "": 3.0})
    other, told = Gemm.parse("512x512x1024:tn:bf16"), []
    found = tuning.tune([str(gemm), other, gemm], progress=told.append)
    assert told == found and [choice.gemm for choice in found] == [gemm, other]
    assert dispatch.known(0)[gemm] == found[0] and found[0].served and found[0].us == 2.0
    monkeypatch.setattr(ByKernel, "times", {kernel: 4.0, "": 3.0})
    assert not tuning.tune([gemm])[0].served and not dispatch.known(0)[gemm].served
    assert dispatch.known(0)[other] == found[1]


def test_a_shape_without_memory_or_demoted_is_left_out(timed, monkeypatch) -> None:
    gemm, kernel = timed
    monkeypatch.setattr(ByKernel, "times", {kernel: 2.0, "": 3.0})
    choices.add(PLACE, [Choice(str(gemm), demoted=True)])
    with pytest.warns(RuntimeWarning, match="too little memory"):
        assert tuning.tune([gemm, f"{1 << 20}x512x1024:tn:bf16"]) == []
    assert dispatch.known(0)[gemm].demoted


def test_choices_that_cannot_be_kept_are_said(timed, monkeypatch) -> None:
    gemm, kernel = timed
    monkeypatch.setattr(ByKernel, "times", {kernel: 2.0, "": 3.0})

    def full(place: Place, new: list[Choice]) -> None:
        raise UserError("cannot write: no space left")

    monkeypatch.setattr(choices, "add", full)
    with pytest.warns(RuntimeWarning, match="no space left"):
        assert tuning.tune([gemm])[0].served


def test_a_check_demotes_what_loses(timed, monkeypatch) -> None:
    gemm, kernel = timed
    monkeypatch.setattr(ByKernel, "times", {kernel: 2.0, "": 3.0})
    assert tuning.check() == [] and dispatch.known(0)[gemm].served
    monkeypatch.setattr(ByKernel, "times", {kernel: 3.0, "": 2.0})
    (lost,) = tuning.check()
    assert lost.demoted and (lost.us, lost.vendor_us) == (3.0, 2.0) and not dispatch.known(0)[gemm].served
    assert tuning.check() == []


def _fields(gemm: Gemm) -> dict[str, object]:
    choice = choices.read(PLACE)[gemm]
    return {"family": choice.family, "schedule": choice.schedule, "us": choice.us, "vendor_us": choice.vendor_us}


def test_a_choices_file_names_its_place(home) -> None:
    choices.add(PLACE, [Choice("1x1x1")])
    assert json.loads(PLACE.path.read_text())["place"]["gpu"] == "H100 9.0 132"


def test_tuning_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        tuning.tune(["1x1x1"])


def test_kernels_whose_blocks_wait_for_one_another_are_tuned_on_request(monkeypatch) -> None:
    gemm = Gemm.parse("128x128x12288:tn")
    monkeypatch.setattr(dispatch, "target_of", lambda device: TARGET)
    found = pack.Pack.__new__(pack.Pack)
    found.kernels = {recipe.id: listed(recipe) for recipe in recipes.recipes() if recipe.gemm.layout == gemm.layout}

    def waiting(one_stream: bool) -> set[bool]:
        arms = [arm for ways in tuning.candidates(gemm, 0, found, one_stream) for arm in ways]
        plans = [contract.parse_cuda(arm.candidate.source).plan(gemm, TARGET.sms) for arm in arms]
        assert plans and all(arm.kernel in found.kernels for arm in arms)
        return {plan.launches[0].coresident for plan in plans}

    assert waiting(False) == {False} and waiting(True) == {False, True}


def listed(recipe: recipes.Recipe) -> pack.Packed:
    text = schedule_text(recipe.schedule)
    shape = recipe.gemm
    return pack.Packed(recipe.id, shape.dtype, shape.layout, recipe.family, text, str(shape), 0, "", "", 0, 0, 0)
