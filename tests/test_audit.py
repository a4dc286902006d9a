"""Candidates in KernelBench's own style go the whole way: executed in the sandbox, checked, timed beside the reference."""

import contextlib
import ctypes
import os
import re
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_l2 import cli
from cuda_l2.kernelbench import Auditor, auditor
from cuda_l2.kernelbench._base import ModuleCheck, ModuleSession, module_checks
from cuda_l2.kernelbench.checkout import find_entry
from cuda_l2.kernelbench.checks.operators import imports
from cuda_l2.kernelbench.onlooker import (
    COMPILER,
    LEAST_SAMPLES,
    MOST_SHARE,
    SURE_DEVIATIONS,
    SUSPECT_SAMPLES,
    Onlooker,
    _computing,
    _Spent,
    enough_samples,
)
from cuda_l2.kernelbench.opened import Effort
from cuda_l2.kernelbench.process import Call, Launched, Module, Resources, Sampled, Watched
from cuda_l2.kernelbench.rounds import measure_modules
from cuda_l2.kernelbench.samples import Samples
from cuda_l2.kernelbench.symbols import functions
from cuda_l2.kernelbench.tracing import executable
from cuda_l2.machine.cpu.target import separate_cores
from cuda_l2.machine.cpu.worker import Fault
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.records import Candidate, Operation, Tensor, Timing, Trial, VerdictStatus
from cuda_l2.system import process_tree, sandbox
from cuda_l2.system.errors import UserError
from cuda_l2.verify._base import CheckFailed

CHECKOUT = Path(__file__).with_name("kernelbench")
CHEATS = Path(__file__).with_name("kernelbench_cheats")
EFFORT = Effort(timeout_s=30, memory_bytes=2 << 30, budget_bytes=1 << 24, budget_flops=10**8)
COMPILED_TASK = "kernelbench/level2/1"
"""torch.compile takes half a minute of each task."""

pytestmark = [
    pytest.mark.skipif(sandbox.kind() is sandbox.Kind.LIMITS, reason="there is no sandbox on this machine"),
    pytest.mark.timeout(600),  # of compilers on a busy machine
]


REASONS = {
    "hides_from_profiler": "seen from outside",
    "half_hidden": "seen from outside",
    "half_hidden_rows": "seen from outside",
    "compiled": "calls torch.compile",
    "pass_through": "aten::linear",
    "pass_through_thread": "aten::linear",
    "lazy_tensor": "gives a Later",
    "patched_timer": "torch.cuda.synchronize",
    "patched_empty": "torch.empty",
    "process_left": "process of its own",
    "thread_left": "cores busy",
    "changed_input": "changed its input x",
    "folded_weight": "weights changed in place",
    "ignored_weight": "the weight scale",
    "scaled_weight": "as long as nobody sets its weights",
    "cached_by_content": "one changed element of x",
    "same_buffer": "read after the last",
    "last_instance": "seen from outside",
    "last_instance_weights": "its own result",
    "reads_ahead": "its own result",
    "waits_for_the_last": "its own result",
}


@pytest.fixture(scope="module")
def audit(own_folders) -> Iterator[object]:
    """audit(source, task, allowed) -> Trial; references are kept, as for a list of candidates, and trials too."""
    auditors: dict[str, Auditor] = {}
    trials: dict[tuple[object, ...], Trial] = {}

    def run(source: str, task: str, allowed: str = "", **options: bool) -> Trial:
        if task not in auditors:
            auditors[task] = Auditor(find_entry(CHECKOUT, task), EFFORT, compiled=task == COMPILED_TASK)
        key = (source, task, allowed, *options.items())
        if key not in trials:
            trials[key] = auditors[task].judge(Candidate(source), "search", allowed=allowed.split(), **options)
        return trials[key]

    yield run
    for each in auditors.values():
        each.close()


def said(path: Path) -> tuple[str, str, list[str], str]:
    """A file's text, the task it is for, how it may end, what it may call of PyTorch."""
    text = path.read_text()
    found = dict(re.findall(r"^(task|expect|allow): (.+)$", text, re.M))
    return text, found["task"], found["expect"].split(), found.get("allow", "")


@pytest.mark.parametrize("path", sorted(CHEATS.glob("*.py")), ids=lambda path: path.stem)
def test_a_candidate_ends_as_its_file_says(path, audit) -> None:
    text, task, expected, allowed = said(path)
    trial = audit(text, task, allowed)
    assert trial.status in expected, (trial.status, trial.reason, trial.build.reason)
    if trial.status == "measured":
        missed = {check.name for check in module_checks()} - set(trial.verdict.passed)
        arms = {"torch eager", "torch.compile"} if task == COMPILED_TASK else {"torch eager"}
        assert {arm.name for arm in trial.timing.baselines} == arms
        assert trial.timing.candidate.rounds >= 6 and missed <= {"weights changed", "kernels on the GPU"}
    else:
        assert trial.reason and trial.speedup == 0.0 and trial.reward < 0
    assert REASONS.get(path.stem, "") in trial.reason


def test_work_that_is_put_off_until_results_are_read_counts(audit) -> None:
    text, task, _, allowed = said(CHEATS / "put_off_work.py")
    trial = audit(text, task, allowed)
    assert trial.timing.candidate.latency_us.estimate > 20_000, "it sleeps so long before each result"


def test_what_is_left_to_pytorch_is_said(audit) -> None:
    text, task, _, allowed = said(CHEATS / "honest_torch.py")
    notes = audit(text, task, allowed).verdict.notes
    assert any("aten::linear" in note and "%" in note for note in notes)
    text, task, _, _ = said(CHEATS / "honest_c.py")
    assert audit(text, task).verdict.notes == ()


MAPPED = """
import ctypes
import torch

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
counts = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(f"f{i}", ctypes.c_size_t) for i in range(10)]})
libc.mallinfo2.restype = counts


def mapped():
    before = libc.mallinfo2().f3
    libc.malloc(20 << 20)
    return libc.mallinfo2().f3 - before


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x + mapped()
"""
"""Adds how many blocks were mapped on their own for one of 20 MiB."""


def test_large_blocks_are_as_fast_whatever_was_freed_before() -> None:
    """glibc would map each anew until a larger one was freed: a module was 3.6 times as fast as itself."""
    as_it_is = [sys.executable, "-c", MAPPED + "print(mapped())"]
    assert int(subprocess.run(as_it_is, capture_output=True, text=True, check=True).stdout) == 1
    tensor = {"dtype": "float32", "shape": (3,)}
    task = Operation("mapped", inputs=(Tensor("x", **tensor),), outputs=(Tensor("out", **tensor),))
    resources = Resources("cpu", threads=1, memory_bytes=2 << 30, arena_bytes=1 << 23, timeout_s=20)
    with Module(MAPPED.encode(), "ModelNew", resources) as module:
        assert not module.load(60)
        module.make(0, [])
        module.prepare([Call(task, {"x": torch.zeros(3)}, {})], {})
        module.run()
        assert module.output()["out"].tolist() == [0, 0, 0]


PLACES = """
import torch

class ModelNew(torch.nn.Module):
    def forward(self, x):
        first = x * x
        places = [first.data_ptr(), (first * first - 3 * first).data_ptr()]
        return torch.tensor([place % (1 << 24) for place in places], dtype=torch.float32)
"""


def test_what_a_module_computes_lies_where_it_lay_whatever_came_before() -> None:
    """Holes from checks of other sizes had it move about: a module took 1.2 times as long as itself."""

    def calls(size: int, count: int) -> list[Call]:
        inputs = (Tensor("x", "float32", (size,)),)
        task = Operation("kernelbench/level1/1_Places", inputs=inputs, outputs=(Tensor("out", "float32", (2,)),))
        return [Call(task, {"x": torch.full((size,), float(number))}, {}) for number in range(count)]

    with Module(PLACES.encode(), "ModelNew", Resources("cpu", 1, 2 << 30, 1 << 27, 20)) as module:
        assert not module.load(60)
        module.make(0, [])
        for size in (1 << 19, 700_001, 300_007, 1 << 18, 900_001):
            module.prepare(calls(size, 3), {})
            module.run()
        module.prepare(calls(1 << 19, 12), {}, turns=True)
        module.take_turns()
        found = [tuple(module.output(index)["out"].tolist()) for index in range(2, 12)]
        assert len(set(found)) == 1, found


class Late(ModuleCheck):
    """As the one that asks for what a GPU's profiler saw."""

    name, order, late = "late", 90, True

    def __init__(self, happened: list[str], fails: bool) -> None:
        self.happened, self.fails = happened, fails

    def run(self, session: ModuleSession) -> None:
        self.happened.append(self.name)
        session.notes.append("was asked late")
        if self.fails:
            raise CheckFailed(VerdictStatus.FORBIDDEN, "seen late")


def test_no_call_that_counts_has_inputs_that_its_process_has_seen(monkeypatch) -> None:
    counted: dict[int, list[int]] = {}
    leads: dict[int, set[int]] = {}
    kept: list[Any] = []
    take_turns = Module.take_turns

    def told(module: Module, order: Any = None, *, empty: bool = False, leading: int = 0, **how: Any) -> Any:
        order = range(len(module._calls)) if order is None else order
        if not empty:
            inputs = [next(iter(module._calls[index].tensors.values())) for index in order]
            kept.extend(inputs)  # so that no other takes its number
            leads.setdefault(id(module), set()).update(map(id, inputs[:leading]))
            counted.setdefault(id(module), []).extend(map(id, inputs[leading:]))
        return take_turns(module, order, empty=empty, leading=leading, **how)

    monkeypatch.setattr(Module, "take_turns", told)
    text, task, _, _ = said(CHEATS / "honest_torch.py")
    with Auditor(find_entry(CHECKOUT, task), EFFORT, compiled=False) as judge:
        trial = judge.judge(Candidate(text), "search", allowed=["all"])
    assert trial.status == "measured", trial.reason
    assert len(counted) == 2
    for module, numbers in counted.items():
        assert len({*numbers, *leads[module]}) == len(numbers) + len(leads[module])


@pytest.mark.parametrize("fails", [False, True])
def test_a_late_check_comes_after_the_timing_and_decides(fails: bool, monkeypatch) -> None:
    """By a protocol whose figures are reported."""
    happened: list[str] = []
    checks = [check for check in module_checks() if check.name == "five seeds"]

    def timed(*given: Any, **options: Any) -> Timing:
        happened.append("timed")
        return measure_modules(*given, **options)

    monkeypatch.setattr(auditor, "module_checks", lambda: [Late(happened, fails), *checks])
    monkeypatch.setattr(auditor, "measure_modules", timed)
    monkeypatch.setitem(auditor.CPU_PROTOCOLS, "search", replace(SEARCH, selects=False))
    text, task, _, _ = said(CHEATS / "honest_torch.py")
    with Auditor(find_entry(CHECKOUT, task), EFFORT, compiled=False) as judge:
        trial = judge.judge(Candidate(text), "search", allowed=["all"])
    assert happened == ["timed", "late"] and "was asked late" in trial.verdict.notes
    if fails:
        assert (trial.status, trial.reason, trial.timing) == ("forbidden", "seen late", None)
        assert trial.verdict.check == "late" and trial.verdict.passed == ("five seeds",) and trial.reward < 0
    else:
        assert trial.status == "measured" and trial.verdict.passed == ("five seeds", "late")
        assert trial.timing.conditions.other_work.of == len(os.sched_getaffinity(0))


def test_what_torch_compile_makes_may_be_allowed(audit) -> None:
    text, task, _, _ = said(CHEATS / "compiled.py")
    trial = audit(text, task, COMPILER)
    assert trial.status == "measured" and "leaves kernels to torch.compile" in trial.verdict.notes


def test_no_seed_tells_a_candidate_what_it_is_made_for(audit) -> None:
    text, task, _, allowed = said(CHEATS / "honest_torch.py")
    asks = "\nfor _base in [ModelNew]:\n    class ModelNew(_base):\n        def __init__(self, *given):\n"
    asks += "            if torch.initial_seed() <= 100:\n                raise ValueError('known by its seed')\n"
    trial = audit(text + asks + "            super().__init__(*given)\n", task, allowed)
    assert trial.status == "measured", trial.reason


def test_results_that_differ_from_run_to_run_within_tolerance_are_said(audit) -> None:
    text, task, _, allowed = said(CHEATS / "not_repeatable.py")
    assert "is not repeatable bit for bit" in audit(text, task, allowed).verdict.notes


def test_only_the_operators_that_are_named_are_allowed(audit) -> None:
    text, task, _, _ = said(CHEATS / "honest_torch.py")
    trial = audit(text, task, "linear mul")
    assert (trial.status, "aten::silu" in trial.reason, "aten::mul" in trial.reason) == ("forbidden", True, False)


def test_weights_may_be_left_as_the_seed_makes_them(audit) -> None:
    text, task, _, allowed = said(CHEATS / "scaled_weight.py")
    trial = audit(text, task, allowed, own_weights=True)
    assert trial.status == "measured", (trial.status, trial.reason)
    assert "weights changed" not in trial.verdict.passed
    assert "judged with the weights that its seed makes alone" in trial.verdict.notes


def test_other_shapes_may_be_left_out(audit) -> None:
    text, task, _, allowed = said(CHEATS / "shown_shape_only.py")
    trial = audit(text, task, allowed, one_shape=True)
    assert trial.status == "measured" and "other shapes" not in trial.verdict.passed


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = (", "SyntaxError"),
        ("class Model: pass", "no class ModelNew"),
        ("raise SystemExit", "SystemExit"),
        ("import os; os._exit(0)", "ended"),
    ],
)
def test_a_file_that_is_no_candidate_is_a_failed_build(source, says, audit) -> None:
    trial = audit(source, "kernelbench/level1/3")
    assert trial.status == "failed" and says in trial.reason and "\n" not in trial.reason


def test_functions_of_a_library_are_found_by_what_their_names_contain(tmp_path) -> None:
    (tmp_path / "a.c").write_text("int fill_all(int x) { return x * 3; }\nint other(int x) { return x * 5; }\n")
    library, bare = tmp_path / "a.so", tmp_path / "bare.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "a.c"], check=True)
    subprocess.run(["strip", "-o", bare, library], check=True)
    loaded = ctypes.CDLL(str(library))
    mapped = {name: ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value for name in ("fill_all", "other")}
    starts = [start for low, high, start, path in executable(os.getpid()) if path == str(library)]
    found = functions(library, rb"fill_")
    assert len(found) == 1 and mapped["fill_all"] - starts[0] in found
    assert mapped["other"] - starts[0] not in found
    assert not len(functions(bare, rb"fill_")) and not len(functions(tmp_path / "a.c", rb"fill_"))


class OnGpu:
    """As a module on a GPU that launches so many kernels a call, with what its profiler sees of them."""

    on_cpu = False

    def __init__(self, launches: list[float], operators: tuple[str, ...] = ()) -> None:
        self.launches, self.names = launches, operators
        self.asked: list[tuple[str, int]] = []

    def prepare(self, calls: list[Call], _: Mapping[str, Any]) -> None:
        self.number = calls[0].numbers["look"]

    def operators(self) -> Watched:
        return Watched(0.0, dict.fromkeys(self.names, 0.0), {})

    def launched(self, *_: float) -> Launched:
        self.asked.append(("count", self.number))
        launches = Counter({("/x/libtorch_cuda.so", "cudaLaunchKernel"): 10 * (self.number + 1)})
        return Launched(launches, Counter(), calls=10)

    def run(self) -> None:
        self.asked.append(("run", self.number))

    def profile(self, *, gpu: bool, reading: bool) -> Watched:
        assert gpu and reading
        self.asked.append(("profile", self.number))
        seen = self.launches[self.number]
        return Watched(1.0, dict.fromkeys(self.names, 1.0), {"fill": 1.0} if seen else {}, seen)


@pytest.mark.parametrize(
    ("launches", "allowed", "says"),
    [
        ([1.0, 2.0], (), ""),
        ([2.0, 2.0], (), ""),
        ([2.0, 1.0], (), "beside the operators"),
        ([1.0, 0.0], (), "launched 2 kernels a call, of which PyTorch's profiler sees none"),
        ([0.0, 0.0], ("mul",), ""),
    ],
)
def test_on_a_gpu_each_look_is_compared_with_the_profile_of_its_calls(launches, allowed, says) -> None:
    """After the timing, and not before."""
    module = OnGpu(launches)
    watching = Onlooker(module, allowed, lambda: None, lambda _: None)
    for look in range(2):
        watching.look([Call(None, {}, {"look": look})], 2)
    assert module.asked == ([] if allowed else [("count", 0), ("count", 1)])
    with pytest.raises(CheckFailed, match=says) if says else contextlib.nullcontext():
        watching.require_seen()
    after = [] if allowed else [("run", 0), ("profile", 0), ("run", 1), ("profile", 1)]
    assert module.asked[-len(after) :] == after if after else not module.asked


def test_on_a_gpu_operators_are_forbidden_by_name() -> None:
    watching = Onlooker(OnGpu([0.0], ("empty", "linear")), (), lambda: None, lambda _: None)
    with pytest.raises(CheckFailed, match="calls aten::linear;"):
        watching.look([Call(None, {}, {"look": 0})], 1)


MANY_OPERATORS = """
import threading
import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        if torch.autograd.profiler._is_profiler_enabled:
            raise ValueError("seen")
        thread = threading.Thread(target=lambda: torch.nn.functional.linear(x[None], x[None]))
        thread.start()
        thread.join()
        return torch.empty_like(x).copy_(x).relu_()
"""


def test_operators_are_told_by_name_from_every_thread(monkeypatch) -> None:
    tensor = {"dtype": "float32", "shape": (3,)}
    task = Operation("positive", inputs=(Tensor("x", **tensor),), outputs=(Tensor("out", **tensor),))
    resources = Resources("cpu", threads=1, memory_bytes=2 << 30, arena_bytes=1 << 23, timeout_s=20)
    with Module(MANY_OPERATORS.encode(), "ModelNew", resources) as module:
        assert not module.load(60)
        module.make(0, [])
        module.prepare([Call(task, {"x": torch.full((3,), -1.0)}, {})], {})
        for _ in range(2):
            watched = module.operators()
            assert {"linear", "relu_", "copy_", "empty_like"} <= watched.operators.keys()
            assert not {"clamp_min_", "mm", "matmul"} & watched.operators.keys(), "only the outermost"
            assert module.output()["out"].tolist() == [0, 0, 0] and not watched.compiled
        assert not list(module.folder.glob("operators*"))
        with pytest.raises(Fault, match="seen"):
            module.profile()
        for answer in ({}, {"operators": "mul"}, {"operators": ["mul", 1]}, {"operators": [["mul"]]}):
            monkeypatch.setattr(module, "_watch", lambda _, answer=answer: answer)
            with pytest.raises(Fault):
                module.operators()


@pytest.mark.parametrize("looks", [1, 4])
@pytest.mark.parametrize(("inside", "needed"), [(0.0, LEAST_SAMPLES), (0.4, SUSPECT_SAMPLES)])
def test_who_computes_inside_pytorch_is_sampled_longer(inside: float, needed: int, looks: int) -> None:
    """Of 100 samples a share of 0.4 was once found to be below 0.3."""
    torchs, own, waiting = ("/lib/libmkl_core.so", 0), ("/tmp/quartic.so", 0), ("/lib/libc.so.6", 0)

    def of(count: int) -> Samples:
        return Samples({torchs: round(inside * count), own: count - round(inside * count), waiting: 10 * needed})

    assert not enough_samples(of(needed // looks - 1), looks)
    assert enough_samples(of(needed // looks), looks)


def inside_torch(pattern: bytes) -> tuple[str, int]:
    """A place in one of PyTorch's functions, as samples have it."""
    library = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    return str(library), int(functions(library, pattern).ranges[0, 0])


@pytest.mark.parametrize(
    ("in_kernels", "allowed", "says"),
    [(3, (), "in kernels of PyTorch's operators in 3 of 311 samples"), (3, ("mul",), ""), (0, (), "")],
)
def test_kernels_of_operators_that_nobody_saw_are_told_by_their_names(in_kernels, allowed, says) -> None:
    """Of the time that a file hid in PyTorch most was spent around kernels, as an honest file's is that makes tensors."""
    kernel, copying = inside_torch(rb"2at6native\w*10mul_kernel"), inside_torch(rb"2at6native\w*18direct_copy_kernel")
    around, own = inside_torch(rb"2at4_ops10mul_Tensor4call"), ("/tmp/quartic.so", 0)
    counts = Samples({kernel: in_kernels, copying: 50, around: 8, own: 300})
    assert _computing(counts) == (8 + in_kernels, 300, in_kernels)
    module = types.SimpleNamespace(sampled=lambda *_: Sampled(counts, calls=100, cpu_s=0.1))
    watching = Onlooker(module, allowed, lambda: None, lambda _: None)
    watching.sample()
    with pytest.raises(CheckFailed, match=says) if says else contextlib.nullcontext():
        assert watching.require_own_work() == ""
    assert enough_samples(counts, 1) and not enough_samples(Samples({kernel: 1, own: 300}), 1)


def test_few_samples_say_what_they_are_sure_of() -> None:
    """A file that hid half of its rows passed where 100 samples took longer than there was; of 20 in making tensors
    alone nothing follows.
    """
    free = _Spent(2.0, 2.0, 300)
    assert _Spent(16.0, 4.0, 90).share(free, SURE_DEVIATIONS) > MOST_SHARE
    assert _Spent(2.3, 0.0, 20).share(free) == 1.0 and not _Spent(2.3, 0.0, 20).share(free, SURE_DEVIATIONS)
    assert _Spent(16.0, 4.0, 20).share(free, SURE_DEVIATIONS) < _Spent(16.0, 4.0, 90).share(free, SURE_DEVIATIONS)
    assert not _Spent().share(free, SURE_DEVIATIONS)


def test_what_is_free_is_what_it_took_at_the_same_speed() -> None:
    """An honest NumPy module was refused where the machine was slower as it was looked at."""
    free = _Spent(10.0, 10.0, 300)
    assert _Spent(15.0, 15.0, 300).share(free) == 0
    assert _Spent(15.0, 10.0, 300).share(free) == pytest.approx(1 / 3)
    assert _Spent(50.0, 50.0, 300).share(free) == pytest.approx(30 / 80), "no machine is that much slower"


def test_libraries_are_looked_for_in_the_candidates_own_folder_alone(tmp_path) -> None:
    away, folder = tmp_path / "away", tmp_path / "own"
    for place in (away, folder / "extensions" / "a"):
        place.mkdir(parents=True)
        (place / "bad.so").write_text("no library")
    assert imports(folder) == {"an_unreadable_library"}
    (folder / "extensions").rename(folder / "other")
    (folder / "extensions").symlink_to(away)
    assert not imports(folder), "a link out of the sandbox: to / it would be a walk through all that is mounted"


def test_files_are_found_by_name_or_number() -> None:
    assert find_entry(CHECKOUT, "kernelbench/level1/1") == find_entry(CHECKOUT, "kernelbench/level1/1_Quartic")
    with pytest.raises(UserError, match="1_Quartic"):
        find_entry(CHECKOUT, "kernelbench/level1/1_Qua")


def test_a_file_that_is_no_task_is_named(own_folders, tmp_path) -> None:
    (tmp_path / "level1").mkdir()
    (tmp_path / "level1" / "1_Bad.py").write_text("import nobody_has_this")
    with pytest.raises(UserError, match="needs-package"):
        Auditor(find_entry(tmp_path, "kernelbench/level1/1"), EFFORT)


def test_the_command_prints_the_trial(monkeypatch, capsys) -> None:
    arguments = [str(CHEATS / "pass_through.py"), "kernelbench/level2/1", "--kernelbench", str(CHECKOUT)]
    monkeypatch.setattr(sys, "argv", ["cuda-l2", "check", *arguments, "--protocol", "search"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 1 and "forbidden in the check 'PyTorch's operators': calls aten::linear" in out
    begun = [line.rpartition(" s, ")[2] for line in err.splitlines() if line.startswith("kernelbench/level2/1: ")]
    assert begun[0] == "executing the file ..." and begun[-1] == "PyTorch's operators ...", "timing never began"


GPU_REASONS = {
    "hides_from_profiler": "beside the operators that its profiler sees",
    "last_instance": "beside the operators that its profiler sees",
    "pass_through": "aten::linear",
    "patched_synchronize": "torch.cuda.synchronize",
    "reads_ahead": "its own result",
}
GPU_EFFORT = Effort(timeout_s=120, memory_bytes=16 << 30, budget_bytes=1 << 26, budget_flops=10**9, device="cuda")


@pytest.fixture(scope="module")
def gpu_audit(own_folders) -> Iterator[object]:
    """The same on the GPU."""
    with contextlib.ExitStack() as stack:
        auditors: dict[str, Auditor] = {}

        def run(source: str, task: str, allowed: str = "", protocol: str = "search") -> Trial:
            if task not in auditors:
                auditors[task] = stack.enter_context(Auditor(find_entry(CHECKOUT, task), GPU_EFFORT))
            return auditors[task].judge(Candidate(source), protocol, allowed=allowed.split())

        yield run


@pytest.mark.gpu
@pytest.mark.parametrize("path", sorted((CHEATS / "cuda").glob("*.py")), ids=lambda path: path.stem)
def test_a_candidate_for_the_gpu_ends_as_its_file_says(path, gpu_audit) -> None:
    text, task, expected, allowed = said(path)
    trial = gpu_audit(text, task, allowed)
    assert trial.status in expected, (trial.status, trial.reason, trial.build.reason)
    assert GPU_REASONS.get(path.stem, "") in trial.reason
    if trial.status == "measured":
        assert trial.verdict.passed[-1] == "kernels on the GPU"
    if path.stem == "extra_stream":
        assert trial.timing.candidate.latency_us.estimate > 10_000, "the other stream sleeps so long"


@pytest.mark.gpu
def test_kernels_of_torch_compile_may_be_allowed_on_the_gpu(gpu_audit) -> None:
    text, task, _, _ = said(CHEATS / "compiled.py")
    trial = gpu_audit(text, task, COMPILER)
    assert trial.status == "measured", (trial.status, trial.reason)
    assert "leaves kernels to torch.compile" in trial.verdict.notes


@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2])
def test_a_reference_is_as_fast_as_itself_on_the_gpu(number: int, gpu_audit) -> None:
    """It once was judged to be a third slower: 0.68 [0.65, 0.74]."""
    entry = find_entry(CHECKOUT, f"kernelbench/level1/{number}")
    trial = gpu_audit(re.sub(r"\bModel\b", "ModelNew", entry.path.read_text()), entry.name, "all", "offline")
    assert trial.status == "measured", (trial.status, trial.reason)
    ratio = dict(trial.timing.speedups)["torch eager"]
    assert 0.9 < ratio.estimate < 1.1, ratio


def test_the_first_thread_of_a_module_can_be_kept_on_a_core() -> None:
    cores = separate_cores()
    if len(cores) < 2:
        pytest.skip("there is one core")
    with Module(TURNS.encode(), "ModelNew", Resources("cpu", 1, 2 << 30, 1 << 23, 20)) as module:
        module.pin(cores[1:2])
        found = [os.sched_getaffinity(pid) for pid in process_tree.processes(module.pid)]
        assert found and all(each == {cores[1]} for each in found)
        module.pin(os.sched_getaffinity(0))
        assert os.sched_getaffinity(module.pid) == os.sched_getaffinity(0)


def test_the_clock_runs_before_a_process_goes_on() -> None:
    """What its threads do before they find the order counts."""

    messages: list[Mapping[str, Any]] = []

    class Ordered:
        def send(self, message: Mapping[str, Any]) -> None:
            messages.append(message)

        def await_run(self) -> tuple[float, float]:
            now = time.perf_counter()
            return now, now

    class Slow(Module):
        def __init__(self) -> None:
            self._talk, self.stopped = Ordered(), False  # type: ignore[assignment]

        def thaw(self) -> None:
            assert messages == [{"op": "run", "repeats": 1}]
            time.sleep(0.02)

        def freeze(self) -> None:
            self.stopped = True

    module = Slow()
    assert module.run().run_s >= 0.02 and module.stopped


TURNS = """
import gc, os, socket, torch

class ModelNew:
    calls = 0

    def __call__(self, x):
        self.calls += 1
        judge = next(found for found in gc.get_objects() if type(found).__name__ == "Runner")
        if x[0] < 0:
            if self.calls == 2:
                os._exit(3)
        while x[0] == 0:
            judge._send(b"T")
        return torch.stack([arguments[0] for arguments, *_ in judge._calls]).sum(0)
"""


HIDING = """
import ctypes, threading, time, torch

class ModelNew:
    def __call__(self, x):
        if x[0] < 0:
            time.sleep(1000)
        if x[0] > 0:
            hidden = threading.Event()
            threading.Thread(target=self.hide, args=[hidden], daemon=True).start()
            hidden.wait()
        return x + 0

    def hide(self, hidden):
        ctypes.CDLL(None).ptrace(0, 0, 0, 0)  # whoever began this process traces it now
        hidden.set()
        time.sleep(1000)
"""


def test_a_module_that_is_to_be_sampled_answers_in_time_and_lets_itself_be_traced() -> None:
    tensor = {"dtype": "float32", "shape": (3,)}
    task = Operation("sum", inputs=(Tensor("x", **tensor),), outputs=(Tensor("out", **tensor),))
    resources = Resources("cpu", threads=1, memory_bytes=2 << 30, arena_bytes=1 << 23, timeout_s=2)
    for value, why in ((1.0, "from outside"), (-1.0, "in time")):
        with Module(HIDING.encode(), "ModelNew", resources) as module:
            assert not module.load(60)
            module.make(0, [])
            module.prepare([Call(task, {"x": torch.zeros(3)}, {})], {})
            if not module.sampled(0.1, 0.2, lambda _: False):
                pytest.skip("no threads can be traced here")
            module.prepare([Call(task, {"x": torch.full((3,), value)}, {})], {})
            if value > 0:
                module.run()
            with pytest.raises(Fault, match=why):
                module.sampled(0.1, 0.2, lambda _: False)


@pytest.mark.parametrize("columns", [3, 50_000])
def test_inputs_of_later_calls_come_when_earlier_results_are_read(columns) -> None:
    task = Operation(
        "kernelbench/level1/1_Sum",
        inputs=(Tensor("x", "float32", (columns,)),),
        outputs=(Tensor("out", "float32", (columns,)),),
    )

    def calls(*values: float) -> list[Call]:
        return [Call(task, {"x": torch.full((columns,), float(value))}, {}) for value in values]

    resources = Resources("cpu", threads=1, memory_bytes=2 << 30, arena_bytes=1 << 23, timeout_s=3)
    with Module(TURNS.encode(), "ModelNew", resources) as module:
        assert not module.load(60)
        module.make(0, [])
        module.prepare(calls(1, 2, 4), {}, turns=True)
        spent = module.take_turns()
        assert [module.output(index)["out"][-1] for index in range(3)] == [1, 3, 7], "each adds what it sees"
        assert 0 < module.take_turns(empty=True).run_s < spent.run_s
        module.prepare(calls(10, 20, 40), {}, turns=True)
        module.take_turns([2, 2, 0], leading=1)
        assert [module.output(index)["out"][-1] for index in (2, 0)] == [43, 52], (
            "1, 2, 4 lie there until theirs are shown"
        )
        module.prepare(calls(1, 2, 4), {})
        module.run()
        assert [module.output(index)["out"][-1] for index in range(3)] == [7, 7, 7]
        module.make(0, [])
        module.prepare(calls(-1, -1, -1), {}, turns=True)
        with pytest.raises(Fault, match="ended"):
            module.take_turns()
    with Module(TURNS.encode(), "ModelNew", resources) as module:
        assert not module.load(60)
        module.make(0, [])
        module.prepare(calls(0, 1), {}, turns=True)
        with pytest.raises(Fault, match="in time"):
            module.take_turns()
