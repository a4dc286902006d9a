"""store/: every kind of archive keeps, claims, copies and checks alike; files of before open as they are."""

import concurrent.futures
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import honest_source
from made import trial

from cuda_l2 import search
from cuda_l2.archive import LEASE_S, Archive
from cuda_l2.evaluator import Evaluator
from cuda_l2.llm._base import Message, Outcome, Reply
from cuda_l2.llm.exchanges import Exchange, ExchangeLog
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.records import Candidate, Gemm, Trial, Verdict, VerdictStatus, to_json
from cuda_l2.search import POLL_S, Judged, Order, judge_group
from cuda_l2.store import holder, statements
from cuda_l2.store.checking import check
from cuda_l2.store.copying import BATCH, copy
from cuda_l2.store.opening import open_database
from cuda_l2.system import process_tree
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place, Server, file_of, folder_of, place_of

GEMM = Gemm(64, 64, 64)
WRONG = Verdict(VerdictStatus.INCORRECT, "exact match", "C is wrong")
WHERE = GEMM, Candidate("x"), "m", "search"
BEFORE = """
CREATE TABLE candidates (id TEXT PRIMARY KEY, source TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE trials (
    number INTEGER PRIMARY KEY, task TEXT NOT NULL, candidate TEXT NOT NULL REFERENCES candidates(id),
    machine TEXT NOT NULL, protocol TEXT NOT NULL, status TEXT NOT NULL, speedup REAL NOT NULL,
    reward REAL, created TEXT NOT NULL, record TEXT NOT NULL
);
CREATE INDEX trials_by_task ON trials (task, machine, protocol, candidate);
CREATE TABLE policies (
    name TEXT NOT NULL, machine TEXT NOT NULL, state BLOB NOT NULL, updated TEXT NOT NULL,
    PRIMARY KEY (name, machine)
);
PRAGMA user_version = 1;
"""
"""The tables of archives that were made before there were claims."""


@pytest.fixture(params=["file", "server"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where there is no archive yet."""
    return Server(request.getfixturevalue("database")) if request.param == "server" else tmp_path / "own.db"


def exchange(key: str) -> Exchange:
    reply = Reply(Outcome.ANSWERED, "int\0x;")
    return Exchange(key, "propose", str(GEMM), "m", "model", "url", (Message("user", "?"),), reply, created="2026")


def same(found: Sequence[Trial | None], wanted: Sequence[Trial]) -> bool:
    """Also where they have NaN."""
    return list(map(to_json, found)) == list(map(to_json, wanted))


def rows(place: Place, name: str) -> Any:
    with open_database(place, "read") as db:
        return db.read(name, {"after": 0, "count": 10_000})


def test_trials_come_back_as_they_were(place: Place) -> None:
    kept = [trial(f"source {i}", 1.0 + i, created=f"{i}") for i in range(3)]
    with Archive(place) as archive:
        for each in kept:
            archive.append(each)
        assert same(archive.trials(), kept) and same(archive.trials(GEMM, "m", "search"), kept)
        assert archive.trials(GEMM, "other") == [] and archive.find(GEMM, Candidate("z"), "m", "search") is None
        assert same([archive.find(GEMM, Candidate("source 1"), "m", "search")], kept[1:2])
        assert same(archive.best(GEMM, "m", "search", 2), [kept[2], kept[1]])
        assert archive.tasks("m", "search") == [str(GEMM)]
    with Archive(place, reading=True) as archive:
        assert [number for number, _ in archive.numbered()] == [1, 2, 3]


@pytest.mark.parametrize("source", ["a\0b", "half \ud800 a character", "ä\U0001f600 '%s' :x"])
def test_any_text_is_kept(place: Place, source: str) -> None:
    with Archive(place) as archive:
        archive.append(trial(source))
        assert [each.candidate.source for each in archive.trials()] == [source]
    with open_database(place, "read") as db:
        assert check(db).faults == []


def test_exchanges_and_states_of_policies_are_kept(place: Place) -> None:
    with Archive(place) as archive, ExchangeLog(place) as log:
        archive.save_policy("schedule", "m", b"1\0")
        archive.save_policy("schedule", "m", b"2\0")
        assert archive.load_policy("schedule", "m") == b"2\0" and archive.load_policy("other", "m") is None
        log.append(exchange("a"))
        assert log.exchanges(task=str(GEMM)) == [exchange("a")] == [log.answered("a")]
        assert log.exchanges(model="other") == [] and log.answered("b") is None


def test_a_log_of_exchanges_makes_no_archive(place: Place) -> None:
    with pytest.raises(UserError, match="no archive"):
        ExchangeLog(place)
    with pytest.raises(UserError):
        Archive(place, reading=True)


def test_a_candidate_is_claimed_by_one_at_a_time(place: Place) -> None:
    with Archive(place) as one, Archive(place) as two:
        assert one.claim(*WHERE) and not two.claim(*WHERE)
        assert one.claim(*WHERE)  # renewed
        assert two.claim(GEMM, Candidate("x"), "m", "offline") and two.claim(GEMM, Candidate("y"), "m", "search")
        two.release(*WHERE)  # not its own
        assert not two.claim(*WHERE)
        one.release(*WHERE)
        assert two.claim(*WHERE)


def test_an_expired_claim_is_given_out_again(place: Place) -> None:
    with Archive(place) as dead, Archive(place) as alive:
        assert dead.claim(*WHERE, lease_s=0.0)
        assert alive.claim(*WHERE) and not dead.claim(*WHERE)


def test_an_archive_that_is_closed_holds_no_claim(place: Place) -> None:
    with Archive(place) as one, Archive(place) as two:
        with Archive(place) as interrupted:
            assert interrupted.claim(*WHERE)
            assert one.claim(GEMM, Candidate("y"), "m", "search")
        assert two.claim(*WHERE) and not two.claim(GEMM, Candidate("y"), "m", "search")


def test_the_claims_of_a_dead_process_are_given_out_at_once(place: Place) -> None:
    code = """
import os, sys
from cuda_l2.archive import Archive
from cuda_l2.records import Candidate, Gemm
archive = Archive(sys.argv[1])
for text in ("x", "y"):
    assert archive.claim(Gemm(64, 64, 64), Candidate(text), "m", "search")
print(archive.holder, flush=True)
os.kill(os.getpid(), 9)
"""
    given = place._parts.geturl() if isinstance(place, Server) else str(place)
    words = [sys.executable, "-c", code, given]
    name = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    assert holder.is_dead(name)
    with Archive(place) as alive, Archive(place) as other:
        assert alive.claim(*WHERE) and not other.claim(*WHERE)
        assert other.claim(GEMM, Candidate("y"), "m", "search")


def test_only_a_process_that_is_surely_dead_loses_its_claims(place: Place) -> None:
    host, pid, began, number = holder.new().split("/")
    names = {"alive": f"{host}/{pid}/{began}/{number}", "of another host": f"other/{pid}/0/x", "older": "0123abc"}
    names["whose number another process has now"] = f"{host}/{pid}/0/x"
    assert [name for name in names if holder.is_dead(names[name])] == ["whose number another process has now"]
    for name, text in names.items():
        candidate = Candidate(name)
        with Archive(place) as claims:
            claims.holder = text
            assert claims.claim(GEMM, candidate, "m", "search")
            with Archive(place) as taker:
                assert taker.claim(GEMM, candidate, "m", "search") == holder.is_dead(text)


def test_a_process_that_cannot_be_seen_is_not_taken_for_dead(monkeypatch) -> None:
    name = holder.new()
    monkeypatch.setattr(process_tree, "_read", lambda path: b"")  # hidden, or no file can be opened
    assert not holder.is_dead(name)
    assert not holder.is_dead(holder.new())
    monkeypatch.undo()
    assert not holder.is_dead(name.replace(f"/{process_tree.began(os.getpid())}/", "//"))
    shown = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: "1" if path == "/proc/self" else shown(path))
    assert holder._host.__wrapped__() != holder._host.__wrapped__()  # /proc shows the processes of another namespace


def test_claims_are_renewed_together(place: Place) -> None:
    with Archive(place) as one, Archive(place) as two:
        for text in ("x", "y"):
            assert one.claim(GEMM, Candidate(text), "m", "search", lease_s=0.0)
        assert two.claim(GEMM, Candidate("z"), "m", "search", lease_s=0.0)
        one.renew()
        assert not two.claim(GEMM, Candidate("x"), "m", "search") and not two.claim(GEMM, Candidate("y"), "m", "search")
        assert one.claim(GEMM, Candidate("z"), "m", "search")


def test_a_stored_trial_ends_every_claim_on_it(place: Place) -> None:
    with Archive(place) as one, Archive(place) as two:
        assert one.claim(*WHERE)
        two.append(trial("x"))
        assert two.claim(*WHERE)


@pytest.mark.parametrize("back", [False, True])
def test_a_copy_holds_all_and_adds_nothing_twice(place: Place, tmp_path: Path, back: bool) -> None:
    other = tmp_path / "other.db"
    source, into = (other, place) if back else (place, other)
    with Archive(source) as archive, ExchangeLog(source) as log:
        for i in range(BATCH + 3):
            archive.append(trial(f"source {i % 7}" + "\0" * (i % 2), 1.0 + i, created=f"{i:04}"))
        archive.save_policy("schedule", "m", b"state")
        log.append(exchange("a"))
        before = archive.trials()
    for new in (BATCH + 3, 0):
        with open_database(source, "read") as read, open_database(into, "make") as written:
            copied = copy(read, written)
        assert (copied.trials, copied.new_trials) == (BATCH + 3, new)
        assert (copied.exchanges, copied.new_exchanges, copied.policies) == (1, min(1, new), min(1, new))
    with Archive(into) as archive, ExchangeLog(into) as log:
        assert same(archive.trials(), before) and log.exchanges() == [exchange("a")]
        assert archive.load_policy("schedule", "m") == b"state"
    assert [row[1:] for row in rows(source, "trial page")] == [row[1:] for row in rows(into, "trial page")]


def test_a_whole_archive_has_no_faults(place: Place) -> None:
    with Archive(place) as archive, ExchangeLog(place) as log:
        archive.append(trial("x"))
        log.append(exchange("a"))
        archive.claim(GEMM, Candidate("y"), "m", "search", lease_s=0.0)
        with open_database(place, "read") as db:
            found = check(db)
    assert (found.trials, found.candidates, found.exchanges, found.claims, found.expired) == (1, 1, 1, 1, 1)
    assert not found.faults


@pytest.mark.parametrize(
    "query, told",
    [
        ("UPDATE candidates SET source = 'another'", "its source is another one's"),
        ("DELETE FROM candidates", "its candidate is missing"),
        ("UPDATE trials SET record = '{'", "its record cannot be read"),
        ("UPDATE trials SET task = '1x1x1'", "its row of 1x1x1"),
    ],
)
def test_check_finds_what_is_wrong(typed: Callable[..., Any], tmp_path: Path, query: str, told: str) -> None:
    path = tmp_path / "a.db"
    with Archive(path) as archive:
        archive.append(trial("x"))
    with sqlite3.connect(path) as db:
        db.execute(query)
    status, said, _ = typed("archive", "check", str(path))
    assert status == 1 and told in said


@pytest.mark.parametrize("command", [("show", "64x64x64", "--archive"), ("archive", "check"), ("report",)])
@pytest.mark.parametrize(
    "query",
    [
        "UPDATE trials SET record = 'no' || char(10) || 'JSON'",
        "UPDATE trials SET record = '[' || printf('%.99999c', '[')",
        "UPDATE trials SET record = '{\"' || printf('%.9999c', 'x') || '\":0}'",
        "UPDATE candidates SET source = CAST(x'41ff0a' || zeroblob(9999) AS TEXT)",
    ],
)
def test_a_damaged_record_or_source_is_said_in_a_line(
    typed, tmp_path: Path, command: tuple[str, ...], query: str
) -> None:
    path = tmp_path / "a.db"
    with Archive(path) as archive:
        archive.append(trial("x"))
    with sqlite3.connect(path) as db:
        db.execute(query)
    page = ("-o", str(tmp_path / "page.html")) if command == ("report",) else ()
    status, *said = typed(*command, str(path), *page)
    lines = "".join(said).splitlines()
    assert status == (2 if lines[-1].startswith("cuda-l2: ") else 1), lines
    assert sum("cannot be read" in line for line in lines) == 1 and max(map(len, lines)) < 700
    assert len(lines) == (1 if status == 2 else 3)


def test_commands_copy_and_check(typed: Callable[..., Any], place: Place, tmp_path: Path) -> None:
    with Archive(tmp_path / "a.db") as archive:
        archive.append(trial("x"))
    given = place._parts.geturl() if isinstance(place, Server) else str(place)
    status, said, _ = typed("archive", "copy", str(tmp_path / "a.db"), given)
    assert status == 0 and said.startswith("1 trial, 1 of them new; 0 exchanges")
    status, said, _ = typed("archive", "check", given)
    assert status == 0 and said.splitlines()[-1] == "whole" and "1 trial of 1 candidate" in said
    assert typed("archive", "check", str(tmp_path / "none.db"))[0] == 2
    assert typed("archive", "copy", given, given)[0] == 2


def before(path: Path) -> Trial:
    """An archive as it was written before there were claims, and its trial."""
    kept = trial("int x;", 2.0, created="2026")
    with Archive(path.with_name("model.db")) as archive:
        archive.append(kept)
    (row,) = rows(path.with_name("model.db"), "trial page")
    with sqlite3.connect(path) as db:
        db.executescript(BEFORE)
        db.execute("INSERT INTO candidates VALUES (?, ?)", (kept.candidate.id, "int x;"))
        db.execute(f"INSERT INTO trials VALUES (?{', ?' * 9})", row)
    return kept


def test_a_file_of_before_is_read_and_written_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "before.db"
    kept = before(path)
    with Archive(path, reading=True) as archive:
        assert same(archive.trials(), [kept])
    with open_database(path, "read") as read, open_database(tmp_path / "copy.db", "make") as written:
        assert not read.has("claims") and check(read).faults == []
        assert copy(read, written).new_trials == 1
    with Archive(path) as archive:
        assert same([archive.find(GEMM, kept.candidate, "m", "search")], [kept]) and archive.claim(*WHERE)
        archive.append(trial("y"))
    with sqlite3.connect(path) as db:  # as the program of then reads it
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        query = "SELECT source FROM trials JOIN candidates ON candidates.id = trials.candidate ORDER BY number"
        assert db.execute(query).fetchall() == [("int x;",), ("y",)]


def test_statements_are_the_same_for_every_dialect() -> None:
    for name in statements.STATEMENTS:
        for dialect in ("postgresql",) if name == "append" else statements.NOW:
            text, constants = statements.statement(name, dialect)
            assert text and all(value is not None for value in constants.values())


URL = "postgresql://me:hush@host:5433/trials?sslmode=require"


@pytest.mark.parametrize("given", [URL, Path(URL), Server(URL)])
def test_a_url_is_a_server_and_never_shows_its_password(given: Any) -> None:
    found = place_of(given)
    assert isinstance(found, Server) and found == Server(URL) and hash(found) == hash(Server(URL))
    assert str(found) == "postgresql://me@host:5433/trials" and "hush" not in repr(found) and found.exists()
    wanted = {"host": "host", "port": "5433", "user": "me", "password": "hush", "dbname": "trials"}
    assert found.options() == wanted | {"sslmode": "require"}
    assert found.without_password("no hush here") == "no *** here"


def test_a_path_is_a_file(tmp_path: Path) -> None:
    for given in ("a/b.db", Path("a/b.db")):
        assert place_of(given) == file_of(place_of(given)) == Path("a/b.db")
    assert folder_of(tmp_path / "a.db") == tmp_path.resolve() and file_of(Server(URL)) is None
    assert folder_of(Server(URL)) == Path(os.environ["CUDA_L2_HOME"])
    with pytest.raises(ValueError, match="not a URL"):
        Server("a/b.db")


@pytest.mark.parametrize("url", ["mysql://a:hush@b/c", "postgresql://a:hush@b", "postgresql://a:hush@b:x/c"])
def test_another_url_is_refused_in_a_line_without_its_password(url: str, typed: Callable[..., Any]) -> None:
    status, _, said = typed("show", "64x64x64", "--archive", url)
    assert status == 2 and len(said.splitlines()) == 1 and "hush" not in said


def test_importing_the_archive_loads_no_sqlalchemy_and_a_file_no_psycopg(tmp_path: Path) -> None:
    code = (
        "import sys, cuda_l2.archive, cuda_l2.commands._app; assert 'sqlalchemy' not in sys.modules;"
        f" cuda_l2.archive.Archive({str(tmp_path / 'a.db')!r}); assert 'psycopg' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Others:
    """Another search on the same archive: it holds a claim, and stores its trial when it was waited for."""

    def __init__(self, place: Path, source: str) -> None:
        self.archive, self.source, self.slept = Archive(place), source, 0
        self.stores_after = 2

    def sleep(self, seconds: float) -> None:
        assert seconds == POLL_S
        self.slept += 1
        if self.slept == self.stores_after:
            self.archive.append(trial(self.source, 3.0, machine=self.machine, task=self.task))


def sources(count: int) -> list[Candidate]:
    return [Candidate(f"{honest_source()}// {number}\n") for number in range(count)]


@pytest.fixture
def searching(rig: Any, tmp_path: Path) -> Any:
    """An evaluator whose clock stands still unless it waits, and another search that holds the first of 3 candidates."""
    from cuda_l2.measure.clock import Clock  # noqa: PLC0415

    group = sources(3)
    others = Others(tmp_path / "archive.db", group[0].source)
    clock = Clock(lambda: float(others.slept), others.sleep)
    with Evaluator(Gemm(64, 48, 80), rig, clock=clock) as evaluator:
        others.machine, others.task = evaluator.target.machine, evaluator.task
        assert others.archive.claim(evaluator.task, group[0], evaluator.target.machine, SEARCH.name)
        yield evaluator, others, group
    others.archive.close()


def test_what_another_search_judges_is_left_to_it(searching: Any, archive: Archive) -> None:
    evaluator, others, group = searching
    judged = list(judge_group(evaluator, archive, group))
    assert [each.candidate for each, _ in judged] == group and [known for _, known in judged] == [True, False, False]
    assert judged[0][0].speedup == 3.0 and others.slept == 2
    assert len(archive.trials(evaluator.task)) == 3
    assert all(archive.claim(evaluator.task, each, evaluator.target.machine, SEARCH.name) for each in group)


def test_the_work_of_a_dead_search_is_done_again(searching: Any, archive: Archive) -> None:
    evaluator, others, group = searching
    others.archive.claim(evaluator.task, group[0], evaluator.target.machine, SEARCH.name, lease_s=0.0)
    judged = list(judge_group(evaluator, archive, group))
    assert [known for _, known in judged] == [False] * 3 and others.slept == 0


def test_nobody_is_waited_for_beyond_the_budget(searching: Any, archive: Archive) -> None:
    evaluator, others, group = searching
    others.stores_after, evaluator.ends = 0, 5.0
    judged = list(judge_group(evaluator, archive, group[:1]))
    assert [known for _, known in judged] == [False] and others.slept == 5


class Waiting:
    """Judges whose answers are not there when the first is awaited; meanwhile all claims run out."""

    count = 1

    def __init__(self, archive: Archive, trials: Sequence[Trial]) -> None:
        self._archive, self._trials = archive, {trial.candidate.id: trial for trial in trials}
        self._begun: dict[str, Future[Judged]] = {}
        self.waited = list[float]()

    def begin(self, order: Order, build: object = None) -> "Future[Judged]":
        return self._begun.setdefault(order.candidate.id, Future())

    def expire(self) -> None:
        path = file_of(self._archive.path)
        assert path
        with sqlite3.connect(path) as db:
            db.execute("UPDATE claims SET expires = 0")

    def wait(self, futures: Sequence["Future[Judged]"], timeout_s: float) -> Any:
        self.waited.append(timeout_s)
        if len(self.waited) == 1:
            self.expire()
            return concurrent.futures.wait(futures, 0.0)
        for key, future in self._begun.items():
            if not future.done():
                future.set_result(Judged(self._trials[key], {}, 0.0))
        return concurrent.futures.wait(futures)


def test_what_waits_for_a_process_stays_claimed(searching: Any, archive: Archive, monkeypatch: Any) -> None:
    evaluator, others, group = searching
    judges = Waiting(archive, list(evaluator.evaluate(group)))
    machine = evaluator.target.machine
    with (
        judge_group(evaluator, archive, group[1:2], judges=judges) as first,
        judge_group(evaluator, archive, group[2:], judges=judges) as second,
    ):
        monkeypatch.setattr(search, "wait", judges.wait)
        next(first)
        assert judges.waited == [LEASE_S / 3] * 2
        assert not others.archive.claim(evaluator.task, group[2], machine, SEARCH.name)
        next(second)


def test_what_was_begun_before_stays_claimed_when_a_group_begins(searching: Any, archive: Archive) -> None:
    evaluator, others, group = searching
    judges = Waiting(archive, [])
    with judge_group(evaluator, archive, group[1:2], judges=judges):
        judges.expire()
        with judge_group(evaluator, archive, group[2:], judges=judges):
            assert not others.archive.claim(evaluator.task, group[1], evaluator.target.machine, SEARCH.name)


def test_an_interrupted_judgement_gives_its_claim_back(searching: Any, archive: Archive, monkeypatch: Any) -> None:
    evaluator, others, group = searching

    def interrupted(*_: object) -> Trial:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluator, "judge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(judge_group(evaluator, archive, group[1:]))
    assert others.archive.claim(evaluator.task, group[1], evaluator.target.machine, SEARCH.name)


def test_what_is_found_wrong_later_is_not_the_best_until_it_is_measured_anew(place: Place) -> None:
    fast, slow = trial("fast", 9.0), trial("slow", 2.0)
    elsewhere = replace(fast, machine="another", timing=None, verdict=WRONG)
    wrong = replace(elsewhere, machine="m", protocol="offline")
    with Archive(place) as archive:

        def best() -> list[str]:
            return [found.candidate.source for found in archive.best(GEMM, "m", "search", 5)]

        for each in (fast, slow, elsewhere):
            archive.append(each)
        assert best() == ["fast", "slow"]
        archive.append(wrong)
        assert best() == ["slow"]
        archive.append(replace(fast, created="later"))
        assert best() == ["fast", "slow"]


def test_the_best_of_many_trials_are_found_in_one_pass(tmp_path: Path) -> None:
    """Whatever was found wrong later: steps of SQLite's machine for 250 trials, and for four times as many."""
    steps = []
    for count in (250, 1000):
        with Archive(tmp_path / f"{count}.db") as archive:
            db, taken = archive._db.connection, [0]  # type: ignore[attr-defined]
            for number in range(count):
                kept = trial(f"{number}", 1.0 + number)
                archive.append(replace(kept, timing=None, verdict=WRONG) if number % 3 == 0 else kept)

            def step(taken: list[int] = taken) -> None:
                taken[0] += 1

            db.set_progress_handler(step, 100)
            found = archive.best(GEMM, "m", "search", 2)
            db.set_progress_handler(None, 0)
            steps.append(taken[0])
            assert [float(each.candidate.source) for each in found] == [count - 2.0, count - 3.0]
    assert steps[1] < 6 * steps[0]
