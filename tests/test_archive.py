"""archive.py: durable, append-only, shared, and clear about files it cannot use."""

import concurrent.futures
import multiprocessing
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from made import trial
from waiting import wait_until

from cuda_l2.archive import Archive
from cuda_l2.records import (
    Build,
    BuildStatus,
    Candidate,
    Gemm,
    Layout,
    Operation,
    Tensor,
    Trial,
    Verdict,
    VerdictStatus,
)
from cuda_l2.system import paths
from cuda_l2.system.errors import UserError

GEMM = Gemm(64, 64, 64)


def test_an_archive_makes_no_folder_but_the_usual_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_L2_HOME", str(tmp_path / "home" / "data"))
    with pytest.raises(UserError, match=r"there is no folder .*/other/deep; make it, or choose another with --archive"):
        Archive(tmp_path / "other" / "deep" / "archive.db")
    assert not any(tmp_path.iterdir())
    Archive(paths.default_archive()).close()
    assert (tmp_path / "home" / "data" / "archive.db").is_file()


def test_trials_come_back_whole_and_in_order(archive) -> None:
    for i in range(3):
        archive.append(trial(f"source {i}", 1.0 + i))
    assert [t.candidate.source for t in archive.trials(GEMM)] == ["source 0", "source 1", "source 2"]
    assert archive.find(GEMM, Candidate("source 1"), "m", "search").speedup == 2.0


@pytest.mark.parametrize("where", [(Gemm(1, 1, 1), "m", "search"), (GEMM, "other", "search"), (GEMM, "m", "offline")])
def test_a_trial_is_known_only_under_its_own_conditions(archive, where) -> None:
    archive.append(trial("x"))
    task, machine, protocol = where
    assert archive.find(task, Candidate("x"), machine, protocol) is None


def test_best_names_each_candidate_once(archive) -> None:
    for source, speedup in (("a", 1.0), ("b", 3.0), ("a", 2.0), ("c", 0.5)):
        archive.append(trial(source, speedup))
    assert [(t.candidate.source, t.speedup) for t in archive.best(GEMM, "m", "search", 2)] == [("b", 3.0), ("a", 2.0)]


def test_policy_state_is_kept_by_name_and_machine(archive) -> None:
    archive.save_policy("schedule", "m", b"1")
    archive.save_policy("schedule", "m", b"2")
    assert archive.load_policy("schedule", "m") == b"2"
    assert archive.load_policy("schedule", "other") is None


def _append_for_ever(path: Path) -> None:
    with Archive(path) as archive:
        for i in range(100_000):
            archive.append(trial(f"{os.getpid()} {i}"))


def test_kill_minus_nine_loses_nothing_that_was_appended(tmp_path) -> None:
    path = tmp_path / "archive.db"
    writers = [multiprocessing.get_context("spawn").Process(target=_append_for_ever, args=(path,)) for _ in range(2)]
    for writer in writers:
        writer.start()

    def written() -> bool:
        if not path.exists():
            return False
        with Archive(path) as archive:
            sources = [t.candidate.source for t in archive.trials(GEMM)]
        return all(sum(source.startswith(f"{writer.pid} ") for source in sources) > 20 for writer in writers)

    wait_until(written)
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    with Archive(path) as archive:
        trials = archive.trials(GEMM)
        assert len(trials) > 40
        for writer in writers:  # two writers at once, each without a gap
            numbers = [
                int(t.candidate.source.split()[1]) for t in trials if t.candidate.source.startswith(f"{writer.pid} ")
            ]
            assert numbers == list(range(len(numbers))) and numbers
        archive.append(trial("after"))
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_many_may_open_a_new_archive_at_once(tmp_path) -> None:
    """SQLite lets one of them turn logging on, and refuses the others at once."""
    together = threading.Barrier(6)

    def open_each(_: int) -> None:
        for number in range(100):
            together.wait()
            with Archive(tmp_path / f"{number}.db"):
                pass

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(open_each, range(6)))


@pytest.mark.parametrize(
    "content", [b"not a database at all, but long enough to look at" * 9, b"SQLite format 3\0" + b"\xff" * 4000]
)
def test_a_corrupt_file_is_named_and_left_alone(tmp_path, content) -> None:
    path = tmp_path / "archive.db"
    path.write_bytes(content)
    with pytest.raises(UserError, match="--archive"):
        Archive(path)
    assert path.read_bytes() == content


def test_another_version_is_refused(tmp_path) -> None:
    path = tmp_path / "archive.db"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(UserError, match="version 99"):
        Archive(path)


def test_an_unwritable_place_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--archive"):
        Archive(tmp_path / "file" / "archive.db")
    if os.geteuid():
        folder = tmp_path / "folder"
        folder.mkdir()
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(UserError, match="--archive"):
            Archive(folder / "archive.db")


def test_a_full_disk_keeps_what_was_stored(tmp_path) -> None:
    path = tmp_path / "archive.db"
    with Archive(path) as archive:
        archive.append(trial("before"))
        (pages,) = archive._db.connection.execute("PRAGMA page_count").fetchone()
        archive._db.connection.execute(
            f"PRAGMA max_page_count = {pages + 1}"
        )  # SQLite answers as it does to a full disk
        with pytest.raises(UserError, match="full"):
            archive.append(trial("x" * 100_000))
        assert [t.candidate.source for t in archive.trials(GEMM)] == ["before"]


def test_another_programs_database_is_left_alone(tmp_path) -> None:
    path = tmp_path / "other.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE theirs (x)")
    db.commit()
    db.close()
    with pytest.raises(UserError, match="another program"):
        Archive(path)
    assert sqlite3.connect(path).execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]


def test_a_timed_out_trial_does_not_count_as_known(archive) -> None:
    slow = Verdict(VerdictStatus.TIMED_OUT, reason="slow")
    archive.append(Trial(GEMM, Candidate("x"), "m", "search", Build("c", BuildStatus.BUILT, artifact="k"), slow))
    assert archive.find(GEMM, Candidate("x"), "m", "search") is None


def test_tasks_of_every_kind_are_kept_apart_by_their_text(archive) -> None:
    softmax = Operation("softmax", (("rows", 4),), outputs=(Tensor("out", "float32", (4,)),))
    other = Operation("softmax", (("rows", 5),), outputs=(Tensor("out", "float32", (5,)),))
    for task in (GEMM, softmax, other):
        archive.append(replace(trial("x"), task=task))
    assert [t.task for t in archive.trials()] == [GEMM, softmax, other]
    assert archive.find(softmax, Candidate("x"), "m", "search").task == softmax
    assert [t.task for t in archive.best(other, "m", "search", 5)] == [other]


BEFORE_TASKS = (
    '{"task":{"m":64,"n":64,"k":64,"layout":"tn","accumulate":"fp32"},"candidate":{"source":"","proposer":"user",'
    '"schedule":[],"family":""},"machine":"m","protocol":"search","build":{"candidate_id":"c","status":"failed",'
    '"reason":"no","log":"","artifact":"","compiler":"","sandbox":"","seconds":0.0,"kernels":[],"warnings":[]},'
    '"verdict":null,"timing":null,"reward":-1.0,"environment":{},"created":"","profile":{}}'
)


def test_a_record_written_before_there_were_other_tasks_is_read(archive) -> None:
    gemm = Gemm(64, 64, 64, Layout.TN)
    archive._db.connection.execute("INSERT INTO candidates VALUES ('id', 'source')")
    row = (str(gemm), "id", "m", "search", "failed", 0.0, -1.0, "", BEFORE_TASKS)
    archive._db.connection.execute(f"INSERT INTO trials VALUES (1{', ?' * 9})", row)
    (back,) = archive.trials(gemm)
    assert back.task == gemm and back.candidate.source == "source" and back.build.reason == "no"


@pytest.mark.parametrize("open_elsewhere", [False, True])
def test_what_cannot_be_written_can_be_read(tmp_path, open_elsewhere) -> None:
    path = tmp_path / "folder" / "a.db"
    path.parent.mkdir()
    with Archive(path) as archive:
        archive.append(trial("int x;"))
        if not open_elsewhere:
            archive.close()
        read = f"from pathlib import Path; from cuda_l2.archive import Archive; path = Path({str(path)!r})"
        read += "; print(len(Archive(path, reading=True).trials()))"
        mount = f"mount --bind {path.parent} {path.parent} && mount -o remount,bind,ro {path.parent} && echo mounted"
        command = ["unshare", "-Urm", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, read]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "mounted" not in done.stdout:
        pytest.skip("nothing can be mounted here")
    assert (done.stdout.split(), done.stderr) == (["mounted", "1"], "")
