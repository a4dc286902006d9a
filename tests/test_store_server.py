"""store/postgres.py against a real server: shared by many, killed in mid-run, and clear about what it cannot use."""

import concurrent.futures
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import example
from made import trial
from waiting import wait_until

from cuda_l2.archive import Archive
from cuda_l2.records import Candidate, Gemm
from cuda_l2.store import postgres
from cuda_l2.store.postgres import PostgresDatabase
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Server

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")
GEMM = Gemm(64, 64, 64)


@pytest.fixture
def own_server(postgres: Any) -> Iterator[Any]:
    """A server for a test that kills it. Asks for the shared one, which knows whether there can be any."""
    with example("postgres_server").PostgresServer() as server:
        yield server


def run(url: str, query: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(query)


def sources(place: str) -> list[str]:
    with Archive(place, reading=True) as archive:
        return [each.candidate.source for each in archive.trials(GEMM)]


def append_for_ever(url: str, acknowledged: Path) -> None:
    """Store trials; write each into a file once it is acknowledged."""
    with Archive(url) as archive, acknowledged.open("w", buffering=1) as file:
        for i in range(1_000_000):
            archive.append(trial(f"{os.getpid()} {i}", created=str(i)))
            file.write(f"{os.getpid()} {i}\n")


def started(url: str, files: list[Path]) -> list[Any]:
    processes = multiprocessing.get_context("spawn")
    workers = [processes.Process(target=append_for_ever, args=(url, file)) for file in files]
    for worker in workers:
        worker.start()
    wait_until(lambda: all_live(workers) and all(f.exists() and len(f.read_text().splitlines()) > 20 for f in files))
    return workers


def all_live(workers: list[Any]) -> bool:
    assert all(worker.is_alive() for worker in workers), "a worker has failed; its error is above"
    return True


def grown(files: list[Path], before: list[int]) -> bool:
    return all(len(file.read_text()) > size for file, size in zip(files, before, strict=True))


def killed(workers: list[Any]) -> None:
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()


def told(files: list[Path]) -> list[str]:
    """What workers were told is stored; a line that a kill cut counts not."""
    return [line[:-1] for file in files for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_a_killed_worker_loses_nothing_that_was_acknowledged(database: str, tmp_path: Path) -> None:
    files = [tmp_path / "0", tmp_path / "1"]
    killed(started(database, files))
    kept = sources(database)
    assert set(told(files)) <= set(kept) and len(kept) == len(set(kept))


@pytest.mark.full
def test_a_killed_server_loses_nothing_and_stores_nothing_twice(own_server: Any, tmp_path: Path) -> None:
    url, files = own_server.url(), [tmp_path / "0", tmp_path / "1"]
    workers = started(url, files)
    try:
        for _ in range(2):
            own_server.kill()
            before = [len(file.read_text()) for file in files]
            own_server.start()
            wait_until(lambda before=before: all_live(workers) and grown(files, before))
    finally:
        killed(workers)
    kept = sources(url)
    assert set(told(files)) <= set(kept) and len(kept) == len(set(kept))


def test_a_search_goes_on_after_a_restart_and_says_so_once(own_server: Any, capsys: Any, monkeypatch: Any) -> None:
    starts = [own_server.start]
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: starts and starts.pop()())
    with Archive(own_server.url()) as archive:
        archive.append(trial("before"))
        own_server.kill()
        monkeypatch.setattr(postgres, "time", clock)
        archive.append(trial("after"))
        assert [each.candidate.source for each in archive.trials()] == ["before", "after"]
    said = capsys.readouterr().err
    assert said.count("trying again for up to 120 s") == 1 and own_server.password not in said


def test_a_server_that_stays_away_is_given_up_in_one_line(own_server: Any) -> None:
    place = Server(own_server.url())
    with Archive(place) as archive:
        archive.append(trial("before"))
        archive._db.close()
        archive._db = PostgresDatabase(place, "make", patience_s=0.3)
        own_server.kill()
        for _ in range(2):  # the second asks once
            with pytest.raises(UserError, match="what was stored before is kept") as raised:
                archive.append(trial("after"))
        assert own_server.password not in str(raised.value) and "\n" not in str(raised.value)
    own_server.start()
    assert sources(own_server.url()) == ["before"]


def test_a_trial_that_is_sent_twice_is_stored_once(database: str) -> None:
    """As where the connection is lost after the server has stored it, and before it says so."""
    with Archive(database) as archive:
        connection = archive._db._connection
        execute = connection.execute

        def lost(*arguments: Any) -> Any:
            execute(*arguments)
            connection.close()
            raise psycopg.OperationalError("the connection is lost")

        connection.execute = lost
        archive.append(trial("x"))
        assert [each.candidate.source for each in archive.trials()] == ["x"]
        assert archive._db._connection is not connection


def test_another_server_in_its_place_is_not_taken_for_it(database: str, postgres: Any) -> None:
    """Two heads: after a failover, a server that lacks what the first acknowledged."""
    with Archive(database) as archive:
        archive.append(trial("x"))
        run(database, "TRUNCATE cuda_l2.trials CASCADE")
        archive._db._connection.close()
        with pytest.raises(UserError, match="another server, which lacks trials"):
            archive.append(trial("y"))
    with Archive(database) as archive:
        run(database, "UPDATE cuda_l2.about SET identity = 'another'")
        archive._db._connection.close()
        with pytest.raises(UserError, match="another server"):
            archive.trials()


def test_many_may_open_a_new_database_at_once(database: str) -> None:
    together = threading.Barrier(6)

    def open_it(_: int) -> None:
        together.wait()
        with Archive(database):
            pass

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(open_it, range(6)))


def test_a_candidate_is_claimed_by_one_of_many(database: str) -> None:
    archives = [Archive(database) for _ in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for number in range(20):
            candidate = Candidate(str(number))
            claimed = pool.map(lambda archive, c=candidate: archive.claim(GEMM, c, "m", "search"), archives)
            assert sum(claimed) == 1
    for archive in archives:
        archive.close()


def refused(url: str, **named: Any) -> str:
    """The one line for an archive that cannot be used."""
    with pytest.raises(UserError) as raised:
        Archive(url, **named)
    (line,) = str(raised.value).splitlines()
    return line


def test_a_wrong_password_is_told_and_never_shown(postgres: Any, typed: Callable[..., Any], caplog: Any) -> None:
    caplog.set_level("DEBUG")
    line = refused(postgres.url("hush-hush"))
    assert "user or password is wrong" in line and "PGPASSWORD" in line
    status, out, said = typed("show", "64x64x64", "--archive", postgres.url("hush-hush"))
    assert status == 2 and len(said.splitlines()) == 1
    assert not [text for text in (line, out, said, caplog.text) if "hush" in text or postgres.password in text]


def test_the_password_may_come_from_the_environment(postgres: Any, database: str, monkeypatch: Any) -> None:
    without = database.replace(f":{postgres.password}@", "@")
    monkeypatch.delenv("PGPASSWORD", raising=False)
    assert "password" in refused(without)
    monkeypatch.setenv("PGPASSWORD", postgres.password)
    with Archive(without) as archive:
        assert archive.trials() == []


def test_what_is_not_there_is_told_in_one_line(postgres: Any, database: str) -> None:
    assert 'database "none" does not exist' in refused(postgres.url(database="none"))
    assert "refused" in refused(postgres.url().replace(f":{postgres.port}/", ":1/"))
    assert "holds no archive" in refused(database, reading=True)
    assert "foo" in refused(f"{database}?foo=1")


def test_another_version_is_refused(database: str) -> None:
    Archive(database).close()
    run(database, "UPDATE cuda_l2.about SET version = 99")
    assert "archive version 99" in refused(database) and "--archive" in refused(database)


def test_another_programs_tables_are_left_alone(database: str) -> None:
    run(database, "CREATE SCHEMA cuda_l2")
    run(database, "CREATE TABLE cuda_l2.trials (theirs int)")
    assert "another program" in refused(database)


def test_a_server_that_can_only_be_read_is_told_apart(database: str) -> None:
    with Archive(database) as archive:
        archive.append(trial("x"))
        run(database, f"ALTER DATABASE {database.rpartition('/')[2]} SET default_transaction_read_only = on")
        assert "name the primary server" in refused(database)
        assert sources(database) == ["x"]


def test_without_psycopg_a_line_says_how_to_get_it(database: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    assert "pip install 'cuda-l2[postgres]'" in refused(database)


def test_commands_take_a_server(database: str, typed: Callable[..., Any], monkeypatch: Any) -> None:
    with Archive(database) as archive:
        archive.append(trial("int x;", 2.0))
    status, said, _ = typed("show", "64x64x64", "--archive", database)
    assert status == 0 and "2.000x" in said and f" --archive {Server(database)}" in said
    status, said, _ = typed("show", "64x64x64", "--archive", database, "--source")
    assert (status, said) == (0, "int x;")
    assert "no such exchange" in typed("exchanges", "--archive", database)[2]


def test_waiting_grows_and_ends(database: str, monkeypatch: Any) -> None:
    """The network is away for a minute by a clock of the test's own."""
    now, waits = [0.0], []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    with Archive(database) as archive:
        archive.append(trial("x"))
        connect = archive._db._connect

        def away() -> Any:
            if now[0] < 60:
                raise psycopg.OperationalError("no route to host")
            return connect()

        monkeypatch.setattr(time, "sleep", sleep)
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        monkeypatch.setattr(archive._db, "_connect", away)
        archive._db._connection.close()
        archive.append(trial("y"))
        monkeypatch.undo()
        assert [each.candidate.source for each in archive.trials()] == ["x", "y"]
    assert waits == sorted(waits) and waits[0] == 0.1 and waits[-1] == 5.0 and 60 <= sum(waits) < 70
