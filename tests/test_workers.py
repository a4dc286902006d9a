"""A command on several GPUs: parts, processes that die, one table in the end. Two of the CPU's processes stand in for GPUs."""

import errno
import fcntl
import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run
from waiting import CLI

from cuda_l2.commands.bench import BenchSettings
from cuda_l2.commands.bench import _by_workers as by_workers
from cuda_l2.commands.bench import _own as own_shapes
from cuda_l2.commands.collect import CollectSettings
from cuda_l2.commands.collect import command as collect
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.machine import gpus
from cuda_l2.runs import parts, workers
from cuda_l2.runs.collect import TRIES, Collection
from cuda_l2.runs.grid import read_grid
from cuda_l2.runs.parts import TAKEN, Taken
from cuda_l2.runs.results import RESULTS, SUMMARY, read_header
from cuda_l2.system import lines, variables
from cuda_l2.system.errors import UserError

GRID = "16x16x16,16x16x32,16x32x16"
ARGUMENTS = ("bench", "--grid", GRID, "--target", "cpu", "--baselines-only", "--arms", "torch fp16")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("bench --out X --grid a,b", "bench --grid a,b --part 1/2 --out Y"),
        ("bench --workers=auto --grid a --out=X", "bench --grid a --part 1/2 --out Y"),
        ("record 8x8x8 --workers 2 --out X", "record 8x8x8 --part 1/2 --out Y"),
    ],
)
def test_a_worker_has_the_command_line_with_a_part_and_an_output_of_its_own(given, kept) -> None:
    changed = {"--workers": "", "--part": "1/2", "--out": "Y"}
    assert workers.own_arguments(given.split(), changed) == kept.split()


@pytest.mark.parametrize(("asked", "present", "found"), [("auto", 2, ["0", "1"]), ("1", 2, ["0"])])
def test_workers_are_visible_gpus(asked, present, found, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("cuda_l2.machine.gpus.count", lambda: present)
    assert workers.gpus(asked) == found


@pytest.mark.parametrize(
    ("named", "present", "found"), [("3, 5", 2, ["3", "5"]), ("3, 5", 1, ["3"]), ("", 2, ["0", "1"]), ("", 0, [])]
)
def test_gpus_are_named_as_the_variable_names_them(named, present, found, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr("cuda_l2.machine.gpus.count", lambda: present)
    assert gpus.visible() == found


@pytest.mark.parametrize(
    ("asked", "says"), [("3", "there are 2 GPUs"), ("0", "auto, a number"), ("rays", "auto, a number")]
)
def test_workers_that_there_cannot_be_are_one_line(asked, says, monkeypatch) -> None:
    monkeypatch.setattr("cuda_l2.machine.gpus.count", lambda: 2)
    with pytest.raises(UserError, match=says):
        workers.gpus(asked)


def test_a_worker_that_a_signal_ends_is_started_again_and_one_with_an_error_is_not(tmp_path) -> None:
    program = f"""
import os, pathlib, sys
gpu, runs = os.environ["CUDA_VISIBLE_DEVICES"][0], pathlib.Path({str(tmp_path)!r}, sys.argv[1])
runs.write_text((runs.read_text() if runs.exists() else "") + gpu)
if sys.argv[1] == "dies" and len(runs.read_text()) < 2:
    os.kill(os.getpid(), {int(signal.SIGKILL)})
print("cuda-l2: measured", file=sys.stderr, flush=True)
sys.exit(2 if sys.argv[1] == "fails" else 0)
"""
    said: list[str] = []
    workers.share({"0": ["dies"], "5": ["fails"]}, said.append, (sys.executable, "-c", program))
    assert (tmp_path / "dies").read_text() == "00" and (tmp_path / "fails").read_text() == "5"
    assert sorted(said) == [
        "GPU 0: ended by signal 9; started again",
        "GPU 0: measured",
        "GPU 5: ended with status 2; what it has not measured is measured after",
        "GPU 5: measured",
    ]


def test_a_worker_sees_its_own_gpu_first_and_then_the_one_that_reviews_what_it_finds() -> None:
    assert [workers.seen(gpu, ["3", "5", "7"]) for gpu in ("3", "5", "7")] == ["3,5", "5,7", "7,3"]
    assert workers.seen("3", ["3"]) == "3"


def test_an_interrupted_worker_interrupts_the_command() -> None:
    with pytest.raises(KeyboardInterrupt):
        workers.share({"0": []}, print, (sys.executable, "-c", "raise SystemExit(130)"))


def test_an_interrupt_in_what_the_command_does_meanwhile_interrupts_its_workers() -> None:
    program = "import signal; signal.pause()"

    def meanwhile() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workers.share({"0": []}, print, (sys.executable, "-c", program), meanwhile=meanwhile)


def test_each_worker_measures_a_part_of_a_grid_into_a_folder_of_its_own(tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    command = [*ARGUMENTS, "--workers", "auto", "--out", str(out)]
    shared, left = workers.share, set[str]()

    def share(commands, say, **named) -> bool:
        done = shared(commands, say, CLI, **named)
        left.update(path.name for path in out.glob("gpu-*/*"))
        return done

    monkeypatch.setattr(workers, "gpus", lambda asked: ["0", "1"])
    monkeypatch.setattr(workers, "share", share)
    monkeypatch.setattr(sys, "argv", ["cuda-l2", *command])
    monkeypatch.setattr(variables, "_stripped", dict(variables.OWN))  # as if the shell had them, as below
    assert by_workers(BenchSettings(workers="auto"), out, read_grid(GRID))
    assert not list(out.glob("gpu-*")) and (out / SUMMARY).exists() and not (out / TAKEN).exists()
    assert RESULTS in left and SUMMARY not in left, "the command alone writes tables"
    done = run(*ARGUMENTS, "--out", str(out))
    assert "baselines alone on 3 shapes, 3 of them done before" in done.stderr


def test_commands_that_take_shapes_begin_each_with_their_part(tmp_path) -> None:
    shapes = read_grid("16x16x16,16x16x32,16x16x32:tn,16x32x16")
    taking, alone = BenchSettings(taken=tmp_path / TAKEN), BenchSettings()
    assert own_shapes(shapes, replace(taking, part="1/2")) == [*shapes]
    assert own_shapes(shapes, replace(taking, part="2/2")) == [*shapes[1:], shapes[0]], "both layouts go together"
    assert own_shapes(shapes, replace(alone, part="2/2")) == shapes[2:]


def test_an_item_is_taken_by_one_process_and_is_free_again_where_that_dies(tmp_path) -> None:
    path = tmp_path / "taken"

    def elsewhere(then: str) -> list[bool]:
        program = f"""
import os, pathlib
from cuda_l2.runs.parts import Taken
taken = Taken(pathlib.Path({str(path)!r}))
print([taken.take(number) for number in range(4)], flush=True)
{then}"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        found: list[bool] = json.loads(done.stdout.lower())
        return found

    with Taken(path) as ours:
        assert ours.take(0) and ours.take(0)
        assert elsewhere("os.kill(os.getpid(), 9)") == [False, True, True, True]
        assert [ours.take(number) for number in range(4)] == [True, False, False, True]  # it died with the last
        assert elsewhere("") == [False] * 4


def test_a_file_of_items_that_cannot_be_used_is_one_clear_error(tmp_path, monkeypatch) -> None:
    for place in (tmp_path, tmp_path / "none" / "taken"):
        with pytest.raises(UserError, match="cannot write"):
            Taken(place)

    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", without_locks)
    with Taken(tmp_path / "taken") as ours, pytest.raises(UserError, match="No locks available"):
        ours.take(0)


@pytest.mark.parametrize("header", [b"\0" * 40 + b"\n", b"{}\n", b'{"machine": "a\xff"}\n', b"[1]\n"])
def test_a_part_whose_header_is_damaged_is_kept(tmp_path, header) -> None:
    part = tmp_path / "out" / "gpu-0" / RESULTS
    part.parent.mkdir(parents=True)
    part.write_bytes(header + b"what was measured\n")
    with pytest.raises(UserError, match=r"first line of .* is damaged"):
        by_workers(BenchSettings(workers="1"), tmp_path / "out", [])
    assert part.read_bytes() == header + b"what was measured\n"


def test_a_part_that_has_not_begun_is_left_alone(tmp_path) -> None:
    part = tmp_path / "gpu-0" / RESULTS
    part.parent.mkdir()
    part.touch()
    parts.take_over(tmp_path, RESULTS, lambda file: read_header(file) is not None)
    assert part.exists()


def test_two_commands_share_no_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(workers, "gpus", lambda asked: ["0"])
    with lines.open_alone(tmp_path / f"{TAKEN}.lock"), pytest.raises(UserError, match="another run"):
        by_workers(BenchSettings(workers="1"), tmp_path, [])


def test_a_worker_that_dies_within_a_grid_loses_no_shape(tmp_path, monkeypatch, capsys) -> None:
    """Each of two is killed once, right after its first shape was stored."""
    out, shared, told = tmp_path / "out", workers.share, tmp_path / "told"
    monkeypatch.setattr(sys, "argv", ["cuda-l2", *ARGUMENTS, "--workers", "auto", "--out", str(out)])
    monkeypatch.setattr(workers, "gpus", lambda asked: ["0", "1"])
    program = (sys.executable, DIES, str(told), "2")
    monkeypatch.setattr(workers, "share", lambda commands, say, **named: shared(commands, say, program, **named))
    assert by_workers(BenchSettings(workers="auto"), out, read_grid(GRID))
    lines = [json.loads(line) for line in (out / RESULTS).read_text().splitlines()][1:]
    assert sorted(line["gemm"]["k"] * 64 + line["gemm"]["n"] for line in lines) == [1040, 1056, 2064]
    assert "ended by signal 9; started again" in capsys.readouterr().err


def test_a_grid_goes_on_from_what_parts_of_an_interrupted_run_have_left(tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    assert run(*ARGUMENTS, "--part", "1/2", "--out", str(out / "gpu-7")).returncode == 0
    before = (out / "gpu-7" / RESULTS).read_text().splitlines()[1:]
    shared, given = workers.share, dict[str, str]()

    def share(commands, say, **named) -> bool:
        given.update({gpu: (out / f"gpu-{gpu}" / RESULTS).read_text() for gpu in commands})
        return shared(commands, say, CLI, **named)

    monkeypatch.setattr(workers, "gpus", lambda asked: ["0", "1"])
    monkeypatch.setattr(workers, "share", share)
    monkeypatch.setattr(sys, "argv", ["cuda-l2", *ARGUMENTS, "--workers", "auto", "--out", str(out)])
    monkeypatch.setattr(variables, "_stripped", dict(variables.OWN))
    assert by_workers(BenchSettings(workers="auto"), out, read_grid(GRID))
    assert len(before) == 1 and all(before[0] in text for text in given.values()) and len(given) == 2
    lines = (out / RESULTS).read_text().splitlines()[1:]
    assert lines[0] == before[0] and len(lines) == 3


def test_a_part_that_fails_leaves_the_tables_to_the_command(tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(workers, "gpus", lambda asked: ["0", "1"])
    shared = workers.share
    fails = (sys.executable, "-c", "raise SystemExit(2)")
    monkeypatch.setattr(workers, "share", lambda commands, say, **named: shared(commands, say, fails, **named))
    monkeypatch.setattr(sys, "argv", ["cuda-l2", *ARGUMENTS, "--workers", "auto", "--out", str(out)])
    assert not by_workers(BenchSettings(workers="auto"), out, read_grid(GRID))
    assert not (out / SUMMARY).exists()


def test_workers_take_no_part(tmp_path) -> None:
    done = run(*ARGUMENTS, "--workers", "auto", "--part", "1/2", "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and "leave --part, --taken, --also and --fresh out" in done.stderr


DIES = str(Path(__file__).with_name("dies_once.py"))
SHAPES = ["16x16x16", "16x16x32", "16x32x16"]


def collecting(out: Path, workers: str = "2", **settings) -> None:
    limits = {"tries": 4, "keep": 4, "least_speedup": 1e6}
    settings = {**limits, "archive": out.parent / "archive.db", "target": "cpu", "policy": ["random"], **settings}
    collect(SHAPES, settings=CollectSettings(out=out, workers=workers, **settings))


def test_a_worker_that_dies_while_it_collects_loses_no_try(tmp_path, monkeypatch, capsys) -> None:
    """Each of two is killed once, right after its second try was stored."""
    out, shared = tmp_path / "out", workers.share
    arguments = ["collect", *SHAPES, "--policy", "random", "--target", "cpu", "--archive", str(tmp_path / "archive.db")]
    arguments += ["--tries", "4", "--keep", "4", "--least-speedup", "1e6", "--workers", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["cuda-l2", *arguments])
    monkeypatch.setattr(workers, "gpus", lambda asked: ["0", "1"])
    told = tmp_path / "told"

    def share(commands, say, **named) -> None:
        shared(commands, say, (sys.executable, DIES, str(told), "2"), **named)

    monkeypatch.setattr(workers, "share", share)
    collecting(out)
    tries = [json.loads(line) for line in (out / TRIES).read_text().splitlines()][1:]
    assert Counter(line["task"] for line in tries) == dict.fromkeys(SHAPES, 4)
    assert all(line in tries for line in map(json.loads, told.read_text().splitlines()) if "task" in line)
    assert capsys.readouterr().err.count("ended by signal 9; started again") == 2
    assert [path.name for path in out.iterdir()] == [TRIES]  # the parts' folders are gone


def test_what_parts_collected_counts_whatever_the_number_of_parts_is_now(tmp_path) -> None:
    out = tmp_path / "out"
    Collection(out).close()  # as a command with workers begins
    collecting(out / "gpu-0", workers="", part="1/2", archive=tmp_path / "archive.db")
    before = (out / "gpu-0" / TRIES).read_text().splitlines()[1:]
    collecting(out, workers="")
    with Collection(out) as collection:
        assert Counter(line["task"] for line in collection.lines) == dict.fromkeys(SHAPES, 4)
        assert [json.dumps(line) for line in collection.lines][: len(before)] == before
    assert not (out / "gpu-0").exists()


def test_a_try_is_taken_over_once_and_a_kernel_is_kept_once(tmp_path) -> None:
    tried = [{"task": "8x8x8", "kept": False, "try": 1}, {"task": "8x8x8", "kept": True, "digest": "d", "try": 2}]
    with Collection(tmp_path / "there") as there:
        for line in tried:
            there.append(line)
    with Collection(tmp_path / "again") as again:
        again.append({**tried[1], "try": 1})
    with Collection(tmp_path / "here") as here:
        for folder in ("there", "there", "again"):
            here.take_over(tmp_path / folder / TRIES)
        assert here.lines == tried


def test_workers_that_collect_take_no_part_and_no_budget_of_a_model(tmp_path) -> None:
    with pytest.raises(UserError, match="leave --part out"):
        collecting(tmp_path / "out", part="1/2")
    with pytest.raises(UserError, match="limit --tries instead"):
        collecting(tmp_path / "out", model=ModelSettings(tokens=1000))


def test_what_one_of_several_gpus_collects_is_its_part(tmp_path) -> None:
    collecting(tmp_path / "out", workers="", part="2/2", tries=1)
    with Collection(tmp_path / "out") as collection:
        assert [line["task"] for line in collection.lines] == [SHAPES[1]]


def test_the_statuses_of_a_part_that_is_done_are_no_errors() -> None:
    said: list[str] = []
    workers.share({"0": []}, said.append, (sys.executable, "-c", "raise SystemExit(1)"), ended=(0, 1))
    assert said == []
