"""cuda-l2 bench --tasks: which tasks, what an interrupted run goes on from, and figures as CUDA-L1 tells them."""

import csv
import io

import made
import pytest

from cuda_l2.archive import Archive
from cuda_l2.families._base import families_for
from cuda_l2.machine.cpu.target import CpuTarget
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.optimizer import Result
from cuda_l2.records import Candidate, Trial
from cuda_l2.report.task_figures import figures, markdown, table
from cuda_l2.runs.task_bench import TaskResult, read_tasks, run
from cuda_l2.search import Progress
from cuda_l2.system.errors import UserError
from cuda_l2.tasks._base import definition, definitions

GPU = CudaTarget("some GPU", (9, 0), 132, 50 << 20, 227 << 10, 80 << 30)
EAGER, COMPILED = "torch eager", "torch.compile"


def trial(name: str, ours_us: float, **baselines_us: float) -> Trial:
    """A reported trial; baselines: eager, compiled."""
    times = {{"eager": EAGER, "compiled": COMPILED}[key]: us for key, us in baselines_us.items()}
    candidate = Candidate("source", "schedule", family="cpu_rows")
    found = {"task": definition(name).task(), "candidate": candidate, "timing": made.timing(ours_us, times)}
    return made.trial("", protocol="offline", machine="here", **found)


RESULTS = [
    TaskResult(definition("softmax").task(), "reduction", trial("softmax", 10, eager=20, compiled=5)),
    TaskResult(definition("rms_norm").task(), "reduction", trial("rms_norm", 10, eager=10, compiled=40)),
    TaskResult(definition("gelu").task(), "elementwise", trial("gelu", 10, eager=11)),
    TaskResult(definition("cumsum").task(), "reduction", reason="no kernel family serves it"),
]


def test_figures_are_over_what_works_and_shares_over_all() -> None:
    eager = figures(RESULTS, "all", EAGER)
    assert eager.speedups == (2.0, 1.0, 1.1) and (eager.tasks, eager.working, eager.faster) == (4, 3, 2)
    assert [eager.fast(p) for p in (0, 1, 1.5, 2)] == [0.75, 0.5, 0.25, 0.0]
    reductions = figures(RESULTS, "reduction", EAGER)
    assert (reductions.tasks, reductions.working, reductions.faster) == (3, 2, 1)


def test_a_task_counts_only_against_baselines_it_was_timed_beside() -> None:
    compiled = figures(RESULTS, "all", COMPILED)
    assert compiled.speedups == (0.5, 4.0) and (compiled.tasks, compiled.working, compiled.faster) == (3, 2, 1)
    assert figures(RESULTS, "elementwise", COMPILED).tasks == 0


def test_the_report_tells_mean_median_upper_quarter_and_largest() -> None:
    text = markdown(RESULTS)
    assert (
        "| all | 4 | 3 (75%) | 2 (50%) | 1.37x | 1.30x | 1.10x | 1.55x | 2.00x | 75% | 75% | 50% | 25% | 0% |" in text
    )
    assert "| elementwise | 0 | - | - | - | - | - | - | - | 0% | 0% | 0% | 0% | 0% |" in text
    assert f"- {RESULTS[3].task}: no kernel family serves it" in text
    rows = list(csv.DictReader(io.StringIO(table(RESULTS))))
    assert [row[f"{COMPILED} speedup"] for row in rows] == ["0.5", "4.0", "", ""]
    assert rows[0]["ours us"] == "10" and rows[3]["reason"] == "no kernel family serves it"


def test_tasks_are_named_by_group_or_text(target: CpuTarget) -> None:
    names = [str(task) for task in read_tasks("softmax:rows=3,columns=5,gelu,softmax:columns=5,rows=3", target)]
    assert names == ["softmax:rows=3,columns=5", str(definition("gelu").task())]
    assert len(read_tasks("all", target)) == len(definitions())
    assert {task.name for task in read_tasks("loss", target)} == {
        d.name for d in definitions().values() if d.group == "loss"
    }
    for text, says in (("64x64x64", "matrix product"), ("", "give tasks"), ("nothing", "no task")):
        with pytest.raises(UserError, match=says):
            read_tasks(text, target)


class Stand:
    """An optimizer whose searches are over at once."""

    def __init__(self, archive, target) -> None:
        self.archive, self.target, self.searched = archive, target, []

    def optimize(self, task, on_progress, on_stage):
        self.searched.append(task.name)
        if task.name == "cumsum":
            raise UserError("no kernel family serves it")
        if task.name == "mish":
            raise RuntimeError("CUDA error: out of luck\nCompile with device-side assertions")
        progress = Progress(interrupted=task.name == "gelu")
        return Result(task, self.target, progress, {"offline": trial(task.name, 10, eager=20)}, None)


def test_what_was_reported_is_not_searched_again_and_an_interrupt_ends_the_run(tmp_path, target) -> None:
    class Here:
        machine = "here"

    with Archive(tmp_path / "archive.db") as archive:
        archive.append(trial("softmax", 10, eager=30))
        optimizer = Stand(archive, Here())
        wanted = read_tasks("softmax,rms_norm,cumsum,gelu,relu", target)
        found = list(run(optimizer, wanted, lambda task: (print, print)))
    assert optimizer.searched == ["rms_norm", "cumsum", "gelu"]
    assert [(each.task.name, each.trial.speedup if each.trial else each.reason) for each in found] == [
        ("softmax", 3.0),
        ("rms_norm", 2.0),
        ("cumsum", "no kernel family serves it"),
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["64x64x64", "--tasks", "softmax"], "not both"),
        (["--tasks", "softmax", "--full"], "--full"),
        (["--tasks", "softmax", "--budget", "0"], "budget"),
        (["--tasks", "nothing"], "no task"),
    ],
)
def test_bad_options_are_one_clear_line(arguments, says, typed) -> None:
    status, _, error = typed("bench", *arguments)
    assert status == 2 and says in error and len(error.splitlines()) == 1


def test_a_task_that_the_machine_fails_at_does_not_end_the_run(tmp_path, target) -> None:
    with Archive(tmp_path / "archive.db") as archive:
        results = list(run(Stand(archive, target), read_tasks("mish,relu", target), lambda task: (print, print)))
    assert [bool(result.trial) for result in results] == [False, True]
    assert results[0].reason == "CUDA error: out of luck Compile with device-side assertions"


def test_served_tasks_are_those_that_a_family_writes_kernels_for(target: CpuTarget) -> None:
    every, found = read_tasks("all", target), read_tasks("served", target)
    assert set(found) < set(every) and len(found) > 20
    assert found == [task for task in every if families_for(task, target)]


def test_the_sample_is_of_the_served_tasks_and_may_stand_beside_others(target: CpuTarget) -> None:
    found = read_tasks("sample", target)
    assert set(found) < set(read_tasks("served", target)) and len(found) >= 10
    assert read_tasks("cumsum,sample,softmax", target) == [definition("cumsum").task(), *found]


def test_sizes_left_out_are_those_for_the_machine(target: CpuTarget) -> None:
    (on_gpu,), (on_cpu,) = read_tasks("softmax:rows=7", GPU), read_tasks("softmax:rows=7", target)
    known = definition("softmax")
    assert dict(on_gpu.sizes) == {**known.gpu, "rows": 7}
    assert dict(on_cpu.sizes) == {**known.cpu, "rows": 7}
