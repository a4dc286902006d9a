"""Candidates in KernelBench's own style go the whole way: executed in the sandbox, checked, timed beside the reference."""

import contextlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chance
import numpy as np
import pytest
import torch
from drawing import cases

from cuda_l2.archive import Archive
from cuda_l2.kernelbench import auditor, process
from cuda_l2.kernelbench._base import ModuleCheck, ModuleSession, module_checks
from cuda_l2.kernelbench.auditor import Auditor
from cuda_l2.kernelbench.checks.operators import COMPILER, imports
from cuda_l2.kernelbench.examined import Effort
from cuda_l2.kernelbench.files import find_entry
from cuda_l2.kernelbench.opened import Call
from cuda_l2.kernelbench.process import Module, Resources, Spent
from cuda_l2.kernelbench.rounds import _ModuleRounds, measure_modules
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cpu.target import separate_cores
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.measure.rounds import CANDIDATE
from cuda_l2.records import Candidate, Operation, Tensor, Timing, Trial, Trust, VerdictStatus
from cuda_l2.report.tables import print_trial
from cuda_l2.system import process_tree, sandbox
from cuda_l2.system.errors import UserError
from cuda_l2.verify._base import CheckFailed

CHECKOUT = Path(__file__).with_name("kernelbench")
CHEATS = Path(__file__).with_name("kernelbench_cheats")
EFFORT = Effort(timeout_s=120, memory_bytes=2 << 30, budget_bytes=1 << 24, budget_flops=10**8)
COMPILED_TASK = "kernelbench/level2/1"
"""torch.compile takes half a minute of each task."""

pytestmark = [
    pytest.mark.skipif(sandbox.kind() is sandbox.Kind.LIMITS, reason="there is no sandbox on this machine"),
]


REASONS = {
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
    "cached_by_content": ("one changed element of x", "weights changed in place"),  # by one element in 97 the latter
    "same_buffer": "read after the last",
    "last_instance_weights": "its own result",
    "reads_ahead": "its own result",
    "waits_for_the_last": "its own result",
}


@pytest.fixture(scope="module", autouse=True)
def short_rounds() -> Iterator[None]:
    """A round's calls take a quarter of the time that a search gives them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(auditor.CPU_PROTOCOLS, "search", replace(SEARCH, round_s=SEARCH.round_s / 4, max_rounds=6))
        yield


@contextlib.contextmanager
def opened(text: str, shared_bytes: int = 1 << 20) -> Iterator[Module]:
    """A file's ModelNew, made in a process of its own."""
    with Module(text.encode(), "ModelNew", Resources("cpu", 1, 2 << 30, shared_bytes, 120)) as module:
        module.load(120)
        module.make(0, [])
        yield module


def vectors(size: int, *values: float, results: int = 1) -> list[Call]:
    """Calls on vectors of one value each; every result is as long as they are."""
    outputs = tuple(Tensor(f"out{index or ''}", "float32", (size,)) for index in range(results))
    task = Operation("kernelbench/level1/1_Vector", inputs=(Tensor("x", "float32", (size,)),), outputs=outputs)
    return [Call(task, {"x": torch.full((size,), float(value))}, {}) for value in values]


def files(folder: Path) -> list[Path]:
    """The candidates of a folder, with those that level B does not see."""
    return sorted([*folder.glob("*.py"), *folder.glob("unseen/*.py")])


def named(path: Path) -> str:
    return str(path.relative_to(CHEATS).with_suffix(""))


@contextlib.contextmanager
def judges(effort: Effort, compiled: Callable[[str], bool]) -> Iterator[Callable[..., Trial]]:
    """(source, task, allowed, protocol) -> Trial; references are kept, as for a list of candidates, and trials too."""
    auditors: dict[str, Auditor] = {}
    trials: dict[tuple[object, ...], Trial] = {}

    def judged(source: str, task: str, allowed: str = "", protocol: str = "search", **options: bool) -> Trial:
        if task not in auditors:
            with chance.apart(task):
                auditor = Auditor(find_entry(CHECKOUT, task), effort, compiled=compiled(task))
            auditors[task] = stack.enter_context(auditor)
        key = (source, task, allowed, protocol, *options.items())
        if key not in trials:
            trials[key] = auditors[task].judge(Candidate(source), protocol, allowed=allowed.split(), **options)
        return trials[key]

    with contextlib.ExitStack() as stack:
        yield judged


@pytest.fixture(scope="module")
def audit(own_folders) -> Iterator[object]:
    with judges(EFFORT, lambda task: task == COMPILED_TASK) as judged:
        yield judged


@pytest.fixture(scope="module")
def audit_file(audit) -> object:
    """audit_file(name, allowed, more) -> Trial of a candidate of the folder. more: text added to it."""

    def run(name: str, allowed: str | None = None, more: str = "", **options: bool) -> Trial:
        text, task, _, named = said(CHEATS / f"{name}.py")
        return audit(text + more, task, named if allowed is None else allowed, **options)

    return run


def said(path: Path) -> tuple[str, str, list[str], str]:
    """A file's text, the task it is for, how it may end, what it may call of PyTorch."""
    text = path.read_text()
    found = dict(re.findall(r"^(task|expect|allow): (.+)$", text, re.M))
    return text, found["task"], found["expect"].split(), found.get("allow", "")


def corpus() -> list[Any]:
    """The candidates as cases of a corpus; those that a C++ compiler or torch.compile works on for long are for all."""
    found = cases(files(CHEATS), lambda path: path.stem.startswith("honest"), named)
    for case in found:
        if re.search(r"cpp|compiled", case.id):
            case.marks.append(pytest.mark.full)
    return found


@pytest.mark.corpus(1)
@pytest.mark.parametrize("path", corpus())
def test_a_candidate_ends_as_its_file_says(path, audit) -> None:
    text, task, expected, allowed = said(path)
    trial = audit(text, task, allowed)
    assert trial.status in expected, (trial.status, trial.reason, trial.build.reason)
    if trial.status == "measured":
        missed = {check.name for check in module_checks()} - set(trial.verdict.passed)
        arms = {"torch eager", "torch.compile"} if task == COMPILED_TASK else {"torch eager"}
        assert {arm.name for arm in trial.timing.baselines} == arms
        assert trial.timing.candidate.rounds >= 6 and missed <= {"weights changed"}
    else:
        assert trial.reason and trial.speedup == 0.0
    assert trial.trust is Trust.B and math.isnan(trial.reward)
    reasons = REASONS.get(path.stem, "")
    assert any(each in trial.reason for each in ([reasons] if isinstance(reasons, str) else reasons)), trial.reason


def test_what_level_b_does_not_see_is_listed() -> None:
    text = (CHEATS / "README.md").read_text()
    unseen = {f"{named(path)}.py" for path in CHEATS.rglob("unseen/*.py")}
    assert set(re.findall(r"^\| `(.+\.py)` \|", text, re.M)) == unseen and len(unseen) == 6 and "six files" in text


def test_a_trial_of_level_b_has_no_reward_and_enters_no_archive(audit_file, tmp_path, capsys) -> None:
    trial = audit_file("honest_torch")
    assert trial.status == "measured" and trial.speedup > 0
    with pytest.raises(ValueError, match="trust level B"):
        replace(trial, reward=1.0)
    with Archive(tmp_path / "archive.sqlite") as archive:
        with pytest.raises(ValueError, match="trust level A"):
            archive.append(trial)
        assert not archive.trials()
    print_trial(trial)
    out = " ".join(capsys.readouterr().out.split())
    assert "trust B: host code" in out and "enters no reward" in out and "self-reported" in out
    assert re.search(r"^reward", out, re.M) is None


def test_work_that_is_put_off_until_results_are_read_counts() -> None:
    """Seconds of a call: until it is done, and what reading its result takes longer than a baseline's, less nothing."""
    rounds = object.__new__(_ModuleRounds)
    rounds._collect_s, rounds._empty_s = {True: [0.5], False: []}, {True: [0.25], False: []}
    rounds._core, rounds._found, rounds._right, rounds._ahead = None, {}, {}, {CANDIDATE: [(1, 0), (2, 1)]}
    rounds.case = SimpleNamespace(task=SimpleNamespace(bytes=1))
    taken: list[list[int]] = []

    def take_turns(order: list[int], **_: Any) -> Spent:
        taken.append(order)
        return Spent(run_s=2 * 3.0, collect_s=2 * 1.5)

    rounds.modules = {CANDIDATE: SimpleNamespace(take_turns=take_turns, output=lambda index: {"out": index})}
    assert rounds.sample(CANDIDATE, 2) == pytest.approx(3.0 + (1.5 - 0.5) - 0.25)
    assert taken == [[0, 0, 1, 2]] and rounds._found == {0: {"out": 1}, 1: {"out": 2}}


def test_a_rounds_inputs_come_of_one_run_of_the_file() -> None:
    """A run is a process: 50 ms, and there were four inputs in each."""
    rounds, asked = object.__new__(_ModuleRounds), list[int]()

    def fresh(seeds: list[int]) -> list[dict[str, Any]]:
        asked.append(len(seeds))
        return [{"seed": seed} for seed in seeds]

    rounds._inputs, rounds.rng, rounds._source = [], np.random.default_rng(0), SimpleNamespace(fresh=fresh)
    first, again = rounds._inputs_up_to(33), rounds._inputs_up_to(33)
    assert first == again == rounds._inputs_up_to(40)[:33] and asked == [33, 7]


def test_what_is_left_to_pytorch_is_said(audit_file) -> None:
    notes = audit_file("honest_torch").verdict.notes
    assert any("aten::linear" in note and "%" in note for note in notes)
    assert audit_file("honest_c", "").verdict.notes == ()


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


@pytest.mark.full
def test_large_blocks_are_as_fast_whatever_was_freed_before() -> None:
    """glibc would map each anew until a larger one was freed: a module was 3.6 times as fast as itself."""
    as_it_is = [sys.executable, "-c", MAPPED + "print(mapped())"]
    assert int(subprocess.run(as_it_is, capture_output=True, text=True, check=True).stdout) == 1
    with opened(MAPPED) as module:
        module.prepare(vectors(3, 0), {})
        module.run()
        assert module.output()["out"].tolist() == [0, 0, 0]


STATE_OF_PROCESS = """
import gc
import sys
import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        loaded = float("torch._dynamo" in sys.modules)
        return torch.tensor([gc.isenabled(), gc.get_freeze_count() > 100_000, loaded], dtype=torch.float32)
"""


def test_garbage_is_looked_for_in_what_a_file_makes_and_profiling_loads_no_compiler() -> None:
    """Each took a second or more of a core in every process."""
    with opened(STATE_OF_PROCESS) as module:
        module.prepare(vectors(3, 0), {})
        module.profile()
        module.run()
        assert module.output()["out"].tolist() == [1, 1, 0]


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
        found = vectors(size, *range(count))
        task = replace(found[0].task, outputs=(Tensor("out", "float32", (2,)),))
        return [replace(call, task=task) for call in found]

    with opened(PLACES, 1 << 27) as module:
        for size in (1 << 19, 700_001, 300_007, 1 << 18, 900_001):
            module.prepare(calls(size, 3), {})
            module.run()
        module.prepare(calls(1 << 19, 12), {}, turns=True)
        module.take_turns()
        found = [tuple(module.output(index)["out"].tolist()) for index in range(2, 12)]
        assert len(set(found)) == 1, found


@pytest.mark.full
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


class Late(ModuleCheck):
    """A check that runs after the timing too."""

    name, order, late = "late", 90, True

    def __init__(self, happened: list[str], fails: bool) -> None:
        self.happened, self.fails = happened, fails

    def run(self, session: ModuleSession) -> None:
        self.happened.append("late" if session.timed else "early")
        session.note("was asked")
        if self.fails and session.timed:
            raise CheckFailed(VerdictStatus.FORBIDDEN, "seen late")


@pytest.mark.full
@pytest.mark.parametrize("fails", [False, True])
def test_a_late_check_comes_before_and_after_the_timing_and_decides(fails: bool, monkeypatch) -> None:
    """By a protocol whose figures are reported."""
    happened: list[str] = []
    checks = [check for check in module_checks() if check.name == "five seeds"]

    def timed(*given: Any, **options: Any) -> Timing:
        happened.append("timed")
        return measure_modules(*given, **options)

    monkeypatch.setattr(auditor, "module_checks", lambda: [*checks, Late(happened, fails)])
    monkeypatch.setattr(auditor, "measure_modules", timed)
    monkeypatch.setitem(auditor.CPU_PROTOCOLS, "search", replace(SEARCH, selects=False))
    text, task, _, _ = said(CHEATS / "honest_torch.py")
    with Auditor(find_entry(CHECKOUT, task), EFFORT, compiled=False) as judge:
        trial = judge.judge(Candidate(text), "search", allowed=["all"])
    assert happened == ["early", "timed", "late"] and trial.verdict.notes == ("was asked",)
    assert trial.verdict.passed == ("five seeds", "late")
    if fails:
        assert (trial.status, trial.reason, trial.timing) == ("forbidden", "seen late", None)
        assert trial.verdict.check == "late"
    else:
        assert trial.status == "measured"
        assert trial.timing.conditions.other_work.of == len(os.sched_getaffinity(0))


@pytest.mark.full
def test_what_torch_compile_makes_may_be_allowed(audit_file) -> None:
    trial = audit_file("compiled", COMPILER)
    assert trial.status == "measured" and "leaves kernels to torch.compile (self-reported)" in trial.verdict.notes


OTHER_KINDS = {
    "a tuple for a tensor": ("tensor", "(tensor,)", lambda x: f"({x},)"),
    "a list for a tensor": ("tensor", "(tensor,)", lambda x: f"[{x}]"),
    "a dictionary for a tensor": ("tensor", "{'out': tensor}", lambda x: f"dict(out={x})"),
    "nothing for a tensor": ("tensor", "NoneType", lambda x: "None"),
    "two tensors for one": ("tensor", "(tensor, tensor)", lambda x: f"({x}, {x})"),
    "a tensor for a tuple": ("(tensor,)", "tensor", str),
    "another order of names": (
        "{'a': tensor, 'b': tensor}",
        "{'b': tensor, 'a': tensor}",
        lambda x: f"dict(b={x}, a={x})",
    ),
}
GIVES = "class ModelNew:\n    def __call__(self, x):\n        return "


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_a_result_of_another_kind_than_the_references_is_refused(kind: str) -> None:
    expected, found, given = OTHER_KINDS[kind]
    with opened(GIVES + given("(x + 1)")) as module:
        (call,) = vectors(3, 0, results=expected.count("tensor"))
        module.prepare([replace(call, result=expected)], {})
        with pytest.raises(Fault, match=re.escape(f"gives {found}, not {expected}")):
            module.run()


def test_a_list_may_stand_for_a_tuple() -> None:
    """C++ extensions give lists."""
    with opened(GIVES + "[x + 1, x]") as module:
        module.prepare([replace(vectors(3, 0, results=2)[0], result="(tensor, tensor)")], {})
        module.run()
        assert module.output()["out"].tolist() == [1, 1, 1]


REFERENCE = """
import torch

class Model(torch.nn.Module):
    def forward(self, x, scale):
        return RESULT

def get_inputs():
    return [torch.rand(16, 32), 0.5]

def get_init_inputs():
    return []
"""


@pytest.mark.parametrize(
    ("result", "answer", "status", "says"),
    [
        ("x * scale", "x * scale", 0, "trust    B"),
        ("x * scale", "(x * scale,)", 1, "gives (tensor,), not tensor"),
        ("x * scale, x", "[x * scale, x]", 0, "trust    B"),
        ("x * 1j", "x * 1j", 0, "trust    B"),
        ("torch.fft.fft(x)", "torch.fft.fft(x).conj()", 1, "incorrect"),
        ("x * 1j", "torch.view_as_real(x * 1j)", 1, "gives tensor, not complex tensor"),
        ("x * scale", "x * (1 + 0j)", 1, "gives complex tensor, not tensor"),
    ],
)
@pytest.mark.full
def test_any_pair_of_files_is_judged(result, answer, status, says, own_folders, tmp_path, typed) -> None:
    reference, mine = tmp_path / "reference.py", tmp_path / "answer.py"
    reference.write_text(REFERENCE.replace("RESULT", result))
    mine.write_text(REFERENCE.replace("RESULT", answer).replace("class Model(", "class ModelNew("))
    options = ["--protocol", "search", "--pytorch", "all", "--eager", "--target", "cpu"]
    ended, out, err = typed("check", mine, "--reference", reference, *options)
    assert (ended, says in out + err) == (status, True), (out, err)


def test_a_task_and_a_reference_exclude_one_another(typed) -> None:
    for given in ([], ["gelu", "--reference", "x.py"], ["--reference", "x.py", "--kernelbench", "."]):
        ended, _, err = typed("check", CHEATS / "crash.py", *given)
        assert ended == 2 and "what to judge it on" in err


def test_the_clock_runs_before_a_process_goes_on(monkeypatch) -> None:
    """What its threads do before they find the order counts."""
    clock = [10.0]
    monkeypatch.setattr(process, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    messages: list[Mapping[str, Any]] = []

    class Slow(Module):
        def __init__(self) -> None:
            talk = SimpleNamespace(send=messages.append, await_run=lambda: (clock[0], clock[0]))
            self._talk, self.stopped = talk, False  # type: ignore[assignment]

        def thaw(self) -> None:
            assert messages == [{"op": "run", "repeats": 1}]
            clock[0] += 5.0

        def freeze(self) -> None:
            self.stopped = True

    module = Slow()
    assert module.run() == Spent(5.0, 0.0) and module.stopped


@pytest.mark.full
def test_no_seed_tells_a_candidate_what_it_is_made_for(audit_file) -> None:
    asks = "\nfor _base in [ModelNew]:\n    class ModelNew(_base):\n        def __init__(self, *given):\n"
    asks += "            if torch.initial_seed() <= 100:\n                raise ValueError('known by its seed')\n"
    trial = audit_file("honest_torch", more=asks + "            super().__init__(*given)\n")
    assert trial.status == "measured", trial.reason


@pytest.mark.full
def test_results_that_differ_from_run_to_run_within_tolerance_are_said(audit_file) -> None:
    assert "is not repeatable bit for bit" in audit_file("not_repeatable").verdict.notes


def test_only_the_operators_that_are_named_are_allowed(audit_file) -> None:
    trial = audit_file("honest_torch", "linear mul")
    assert (trial.status, "aten::silu" in trial.reason, "aten::mul" in trial.reason) == ("forbidden", True, False)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "option", "check", "says"),
    [
        ("scaled_weight", "own_weights", "weights changed", "judged with the weights that its seed makes alone"),
        ("shown_shape_only", "one_shape", "other shapes", "judged at one shape alone"),
    ],
)
def test_a_check_may_be_left_out_and_that_is_said(name, option, check, says, audit_file) -> None:
    trial = audit_file(name, **{option: True})
    assert trial.status == "measured", (trial.status, trial.reason)
    assert check not in trial.verdict.passed and says in trial.verdict.notes


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


def test_the_command_prints_the_trial(typed) -> None:
    given = [CHEATS / "pass_through.py", "kernelbench/level2/1", "--kernelbench", CHECKOUT]
    ended, out, err = typed("check", *given, "--protocol", "search")
    assert ended == 1 and "forbidden in the check 'PyTorch's operators': calls aten::linear" in out
    lines = [line for line in err.splitlines() if line.startswith("kernelbench/level2/1_")]
    begun = [line.split(" s, ")[1].partition(":")[0] for line in lines]  # without the step that a slow stage is at
    assert begun[0] == "executing the file" and begun[-1] == "PyTorch's operators", "timing never began"


GPU_REASONS = {
    "pass_through": "aten::linear",
    "patched_synchronize": "torch.cuda.synchronize",
}
GPU_EFFORT = Effort(timeout_s=120, memory_bytes=16 << 30, budget_bytes=1 << 26, budget_flops=10**9, device="cuda")


@pytest.fixture(scope="module")
def gpu_audit(own_folders) -> Iterator[object]:
    with judges(GPU_EFFORT, lambda task: True) as judged:
        yield judged


@pytest.mark.gpu
@pytest.mark.parametrize("path", files(CHEATS / "cuda"), ids=named)
def test_a_candidate_for_the_gpu_ends_as_its_file_says(path, gpu_audit) -> None:
    text, task, expected, allowed = said(path)
    trial = gpu_audit(text, task, allowed)
    assert trial.status in expected, (trial.status, trial.reason, trial.build.reason)
    assert GPU_REASONS.get(path.stem, "") in trial.reason
    if trial.status == "measured":
        assert trial.verdict.passed[-1] == "PyTorch's operators"
    if path.stem == "extra_stream":
        assert trial.timing.candidate.latency_us.estimate > 10_000, "the other stream sleeps so long"


@pytest.mark.gpu
def test_kernels_of_torch_compile_may_be_allowed_on_the_gpu(gpu_audit) -> None:
    text, task, _, _ = said(CHEATS / "compiled.py")
    trial = gpu_audit(text, task, COMPILER)
    assert trial.status == "measured", (trial.status, trial.reason)
    assert "leaves kernels to torch.compile (self-reported)" in trial.verdict.notes


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
    with opened(TURNS) as module:
        module.pin(cores[1:2])
        found = [os.sched_getaffinity(pid) for pid in process_tree.processes(module.pid)]
        assert found and all(each == {cores[1]} for each in found)
        module.pin(os.sched_getaffinity(0))
        assert os.sched_getaffinity(module.pid) == os.sched_getaffinity(0)


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


@pytest.mark.full
@pytest.mark.parametrize("columns", [3, 50_000])
def test_inputs_of_later_calls_come_when_earlier_results_are_read(columns) -> None:
    def calls(*values: float) -> list[Call]:
        return vectors(columns, *values)

    with opened(TURNS, 1 << 23) as module:
        module.prepare(calls(1, 2, 4), {}, turns=True)
        module.take_turns()
        assert [module.output(index)["out"][-1] for index in range(3)] == [1, 3, 7], "each adds what it sees"
        assert module.take_turns(empty=True).run_s > 0
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
    with opened(TURNS, 1 << 23) as module:
        module.prepare(calls(0, 1), {}, turns=True)
        module._talk._timeout_s = 0.5
        with pytest.raises(Fault, match="in time"):
            module.take_turns()
