"""`cuda-l2 watch`: what it says of files that grow, are cut, replaced or foreign, and to whom it says it."""

import datetime
import fcntl
import io
import itertools
import json
import math
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made import trial
from rich.console import Console

from cuda_l2.archive import Archive
from cuda_l2.measure.clock import Clock
from cuda_l2.measure.gpu_state import GpuSample
from cuda_l2.records import Build, BuildStatus, Gemm, Verdict, VerdictStatus, to_json
from cuda_l2.report.live import GridProgress, Stages
from cuda_l2.report.page import plots
from cuda_l2.report.page.parts import Code, Section, Table, Text
from cuda_l2.report.watch import terminal
from cuda_l2.report.watch.watcher import DRAWN_EVERY_S, EVERY_S, Watcher
from cuda_l2.runs.results import Header, Measurement
from cuda_l2.system import paths
from cuda_l2.system.errors import UserError
from cuda_l2.system.running import RunningFile, running

BEGAN = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
EVIL = "</pre><script>alert(1)</script>"
TOKEN = "the-token"


class Time:
    """A clock that stands still until it is moved; its epoch is `BEGAN`."""

    def __init__(self) -> None:
        self.s = 0.0
        self.clock = Clock(lambda: self.s, self.pass_by)

    def pass_by(self, seconds: float = EVERY_S) -> None:
        self.s += seconds

    def today(self) -> float:
        return BEGAN.timestamp() + self.s

    def text(self) -> str:
        return (BEGAN + datetime.timedelta(seconds=self.s)).isoformat(timespec="milliseconds")


@pytest.fixture
def time() -> Time:
    return Time()


def watching(path: Path, time: Time, **named: Any) -> Watcher:
    return Watcher(path, figures=False, clock=time.clock, today=time.today, **named)


def look(watcher: Watcher, time: Time) -> list[Section]:
    time.pass_by()
    return watcher.look()


def tables(sections: list[Section]) -> dict[str, list[list[str]]]:
    parts = [part for section in sections for part in section.parts if isinstance(part, Table)]
    return {part.id: [[cell.text for cell in row] for row in part.rows] for part in parts}


def said(sections: list[Section]) -> str:
    return "\n".join(part.text for section in sections for part in section.parts if isinstance(part, Text | Code))


def search(archive: Archive, time: Time) -> None:
    """Four candidates, two seconds apart: two that win in turn, one refused, one with a wrong result."""
    refused = {"build": Build("c", BuildStatus.REFUSED, reason="asks for the clock"), "verdict": None}
    wrong = {"verdict": Verdict(VerdictStatus.INCORRECT, check="<b>cases", reason="wrong")}
    none = {"timing": None, "reward": math.nan}
    for source, speedup, named in (
        ("one\nshared", 1.1, {}),
        ("bad", 0, refused | none),
        (f"two\nshared {EVIL}", 1.3, {}),
        ("worse", 0, wrong | none),
    ):
        time.pass_by(2.0)
        archive.append(trial(source, speedup or 1.0, created=time.text(), **named))


def test_a_search_is_followed_from_before_its_archive_is_there(tmp_path: Path, time: Time) -> None:
    path = tmp_path / "archive.db"
    watcher = watching(path, time)
    assert f"Waiting for {path}" in said(look(watcher, time))
    with Archive(path) as archive:
        assert "holds no trials yet" in said(look(watcher, time))
        search(archive, time)
        found = look(watcher, time)
        (task,) = tables(found)["searches-table"]
        assert task[:5] == ["64x64x64", "1.300", "4", "2", "2"]
        assert task[5] == f"{4 / 7:.2f}"  # the first was judged 7 s ago
        assert tables(found)["rejected"] == [["refused", "1"], ["incorrect in the check '<b>cases'", "1"]]
        assert [row[1] for row in tables(found)["newest"]] == ["-", "1.300", "-", "1.100"]
        refused, wrong = "refused: asks for the clock", "incorrect in the check '<b>cases': wrong"
        assert [row[2] for row in tables(found)["newest"]] == [wrong, "measured", refused, "measured"]
        diff, source = (part for section in found for part in section.parts if isinstance(part, Code))
        assert diff.diff and "-shared" in diff.text and f"+shared {EVIL}" in diff.text
        assert source.text == f"two\nshared {EVIL}"
        archive.append(trial("two", 1.25, "offline", created=time.text()))
        assert tables(look(watcher, time))["searches-table"][0][6] == "offline 1.250"
        assert not [each for each in tmp_path.iterdir() if "running" in each.name]


@pytest.mark.parametrize("there", [True, False])
def test_the_command_says_that_it_waits_for_what_is_not_there(there: bool, tmp_path: Path) -> None:
    path = tmp_path / "mistyped.db"
    if there:
        Archive(path).close()
    words = [*paths.CLI, "watch", str(path), "--port", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        said = list(itertools.takewhile(lambda line: " follows " not in line, process.stderr))
        process.kill()
    waits = [f"cuda-l2: {path} is not there yet: the page waits for a run that writes it\n"]
    assert said == ([] if there else waits)


def test_only_new_rows_are_read_and_nothing_is_written(tmp_path: Path, time: Time, monkeypatch: Any) -> None:
    path, asked = tmp_path / "archive.db", []
    with Archive(path) as archive:
        search(archive, time)
    before = sorted((each.name, each.stat().st_mtime_ns) for each in tmp_path.iterdir())
    watcher = watching(path, time)
    connect = sqlite3.connect

    def traced(*arguments: Any, **named: Any) -> sqlite3.Connection:
        db = connect(*arguments, **named)
        db.set_trace_callback(asked.append)
        return db

    monkeypatch.setattr(sqlite3, "connect", traced)
    look(watcher, time)
    first = len(asked)
    for _ in range(3):
        look(watcher, time)
    assert first and len(asked) == first  # nothing changed: not even opened
    assert sorted((each.name, each.stat().st_mtime_ns) for each in tmp_path.iterdir()) == before
    with Archive(path) as archive:
        archive.append(trial("new", 1.4, created=time.text()))
        del asked[:]
        assert tables(look(watcher, time))["searches-table"][0][1] == "1.400"
    assert [each for each in asked if "number > 4" in each]
    time.pass_by(EVERY_S / 2)
    del asked[:]
    with Archive(path) as archive:
        archive.append(trial("newer", 1.5, created=time.text()))
        watcher.look()
    assert not [each for each in asked if "number > 5" in each]  # within a second of the look before


@pytest.mark.parametrize("same_length", [False, True])
def test_an_archive_in_anothers_place_is_read_from_its_beginning(tmp_path: Path, time: Time, same_length: bool) -> None:
    path, watcher = tmp_path / "archive.db", watching(tmp_path, time)
    with Archive(path) as archive:
        search(archive, time)
    look(watcher, time)
    path.unlink()
    with Archive(path) as archive:
        for at in range(4 if same_length else 1):
            archive.append(trial(f"other {at}", 0.5, created="2026-01-03T00:00:00+00:00"))
    assert [row[1] for row in tables(look(watcher, time))["searches-table"]] == ["0.500"]


def test_a_run_says_what_it_does_and_a_killed_one_is_told_from_one_that_ended(tmp_path: Path, time: Time) -> None:
    path = tmp_path / "archive.db"
    Archive(path).close()
    watcher = watching(path, time)
    with Stages("64x64x64", quiet=True, most_s=90.0, clock=time.clock, beside=path) as stages:
        stages.stage("searching <i>")
        (run,) = running(path)
        assert run.alive and run.task == "64x64x64" and run.left_s == 90.0 and run.pid == os.getpid()
        (file,) = (each for each in tmp_path.iterdir() if "running" in each.name)
        kept = file.read_bytes()
        assert "64x64x64: 0 s of at most 90 s, searching <i>" in said(look(watcher, time))
    assert not running(path) and "No run says" in said(look(watcher, time))
    file.write_bytes(kept)  # of a process that could not remove it
    assert "Killed" in said(look(watcher, time))
    with file.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "Killed" not in said(look(watcher, time))
    file.rename(file.with_name(f"{file.name}1"))
    with RunningFile(path) as ours:  # the next run clears it away
        ours.write("goes on", "", None)
        assert [each.said for each in running(path)] == ["goes on"]


def test_a_table_is_followed_line_by_line(tmp_path: Path, time: Time) -> None:
    from test_report_page import measured  # noqa: PLC0415

    path, watcher = tmp_path / "results.jsonl", watching(tmp_path, time)
    lines = [to_json(Header("m", {}, {"shapes": "3 of hash 1"})), to_json(measured("64x64x64", 5))]
    failed = to_json(Measurement(Gemm(64, 64, 128), "offline", "failed", EVIL))
    path.write_text("\n".join([*lines, failed[:20]]))
    assert tables(look(watcher, time))["rows-newest"] == [
        ["64x64x64", "offline", "measured", "5.000", "2.400", "cuBLAS NN"]
    ]
    with path.open("a") as file, GridProgress(3, 1, beside=path) as line:
        line.stage("64x64x128", "offline")
        file.write(f"{failed[20:]}\n{{damaged\n")
        file.flush()
        found = look(watcher, time)
    assert "2 of 3 shapes" in said(found) and "1 damaged line" in said(found)
    assert "1 of 3 shapes; 64x64x128: offline" in said(found)
    assert tables(found)["protocols"] == [["offline", "2", "+140.0%", "100.0%", "2.400", "64x64x128: failed"]]
    path.write_text(f"{lines[0]}\n")
    assert tables(look(watcher, time))["rows-newest"] == []


def test_speedups_of_unrelated_shapes_are_marks_and_no_line() -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra report")
    figures = [
        plots.curves("k", "t", "row", "speedup", [("a", [1.0, 2.0, 0.5])], joined=joined) for joined in (False, True)
    ]
    marks, line = (figure.count("var(--s0)") for figure in figures)
    assert marks > line == 1 and figures[0].count("<use") == figures[1].count("<use") + 3


def test_training_is_followed_with_the_time_left(tmp_path: Path, time: Time) -> None:
    path, watcher = tmp_path / "run.jsonl", watching(tmp_path, time)
    group = {"task": "64x64x64", "speedups": [0.5, 0.0], "statuses": ["measured", "refused"]}
    with path.open("w") as file:
        for fields in (
            {"format": "cuda-l2 train 1", "stage": "hgemm-rl", "tuning": {"steps": 10}},
            *(group, {"step": 1, "loss": 2.0}),
        ):
            file.write(f"{json.dumps(fields)}\n")
        file.flush()
        assert "left" not in said(look(watcher, time))
        time.pass_by(9.0)
        file.write(f"{json.dumps({'step': 2, 'loss': 1.0})}\n")
        file.flush()
        found = look(watcher, time)
    assert "step 2 of 10" in said(found) and "About 80 s left" in said(found) and "64x64x64" in said(found)
    assert "mean speedup, failures as 0: 0.25" in said(found) and "loss: 1.5" in said(found)
    assert tables(found)["answers"] == [["measured", "1"], ["refused", "1"]]


def test_what_cannot_be_followed_is_one_clear_line(tmp_path: Path, time: Time) -> None:
    other, archive = tmp_path / "notes.txt", tmp_path / "archive.db"
    other.write_text("notes")
    with pytest.raises(UserError, match="nothing that can be watched"):
        watching(other, time)
    with sqlite3.connect(archive) as db:
        db.execute("PRAGMA user_version = 99")
        db.execute("CREATE TABLE trials (number INTEGER)")
    watcher = watching(archive, time)
    assert "archive version 99" in said(look(watcher, time))
    archive.write_bytes(archive.read_bytes()[:100])
    assert "cannot be read" in said(look(watcher, time))
    archive.write_bytes(b"")
    assert "no archive, or not one yet" in said(look(watcher, time))


def test_a_figure_is_drawn_again_only_when_its_share_of_a_core_allows(time: Time) -> None:
    watcher, made = Watcher(Path("nowhere"), figures=True, clock=time.clock), []

    def make() -> str:
        time.pass_by(0.1)
        made.append(len(made))
        return f"<svg>{len(made)}</svg>"

    assert watcher._draw("a", 1, make) == watcher._draw("a", 2, make) == "<svg>1</svg>"
    time.pass_by(19.8)
    assert watcher._draw("a", 2, make) == "<svg>1</svg>"
    time.pass_by(DRAWN_EVERY_S - 19.8)
    assert watcher._draw("a", 1, make) == "<svg>1</svg>"  # of the same
    assert watcher._draw("a", 2, make) == "<svg>2</svg>"


def test_the_terminal_shows_the_same_and_reads_nothing_as_markup(tmp_path: Path, time: Time) -> None:
    path = tmp_path / "[red]archive.db"
    obeyed = "\x1b[2J\x1b]0;title\x07"
    with Archive(path) as archive:
        search(archive, time)
        refused = Build("c", BuildStatus.REFUSED, reason=f"{obeyed}seen")
        archive.append(trial("bad", build=refused, verdict=None, timing=None, reward=math.nan, created=time.text()))
        archive.append(trial(f"three {obeyed}", 1.4, created=time.text()))
    written = io.StringIO()
    watcher, console = watching(path, time), Console(width=120, record=True, file=written)
    watcher._sampled = lambda: [GpuSample(1755, 2619, 698.7, 61, ("power cap",))]  # type: ignore[method-assign]
    terminal.follow(watcher, console)
    text = console.export_text()
    for shown in (
        "[red]archive.db",
        "1.300",
        "'<b>cases'",
        "1755",
        "699",
        "power cap",
        f"-shared {EVIL}",
        "seen",
        "+three",
    ):
        assert shown in text
    assert not {"\x1b", "\x07"} & set(written.getvalue())


@pytest.fixture
def client(tmp_path: Path, time: Time) -> Iterator[Any]:
    for package in ("matplotlib", "jinja2", "uvicorn"):
        pytest.importorskip(package, reason="the page needs the extra report")
    testing = pytest.importorskip("starlette.testclient")
    from cuda_l2.report.watch.server import application  # noqa: PLC0415

    with Archive(tmp_path / "archive.db") as archive:
        search(archive, time)
    watcher = Watcher(tmp_path / "archive.db", figures=True, clock=time.clock, today=time.today)
    app = application(watcher.look, TOKEN, f"<i>{EVIL}")
    yield testing.TestClient(app, base_url="http://localhost:8765", follow_redirects=False)


def test_the_page_answers_loopback_names_with_the_token_alone(client: Any) -> None:
    for host in ("localhost", "localhost:1234", "127.0.0.1:9", "[::1]:8765"):
        assert client.get(f"/{TOKEN}/", headers={"host": host}).status_code == 200
    for host in ("evil.example", "localhost.evil.example:8765", ""):
        assert client.get(f"/{TOKEN}/", headers={"host": host}).status_code == 400
    for address in ("/other/", "/other/now", "/other/watch.js", f"/{TOKEN}x/", "/%00/now", "/ä/"):
        answer = client.get(address)
        assert answer.status_code == 403 and TOKEN not in answer.text
    assert client.get("/").status_code == 404 and client.post(f"/{TOKEN}/now").status_code == 405


def test_the_page_executes_nothing_of_what_it_shows(client: Any) -> None:
    answer = client.get(f"/{TOKEN}/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["referrer-policy"] == "no-referrer" and answer.headers["cache-control"] == "no-store"
    assert "alert(1)</script>" not in answer.text and answer.text.count("<script") == 1
    sections = client.get(f"/{TOKEN}/now").json()
    assert [id for id, _, _ in sections] == ["now", "searches", "current", "winner"]
    html = "".join(html for _, _, html in sections)
    assert "<script" not in html and "<b>" not in html and "&lt;/pre&gt;&lt;script&gt;" in html
    assert "<svg" in html and "http" not in html


def test_the_page_is_sent_what_changed_alone(client: Any, tmp_path: Path, time: Time) -> None:
    keys = {id: key for id, key, _ in client.get(f"/{TOKEN}/now").json()}
    has = f"/{TOKEN}/now?has={','.join(keys.values())}"
    assert [html for _, _, html in client.get(has).json()] == [""] * 4
    with Archive(tmp_path / "archive.db") as archive:
        archive.append(trial("slow", 0.4, created=time.text()))
    time.pass_by()
    assert {id for id, _, html in client.get(has).json() if html} == {"searches", "current"}
