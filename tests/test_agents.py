"""Coding agents over MCP, with the package's own client: a real session, budgets, hostile and careless clients."""

import contextlib
import os
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import command_line
import httpx2
import pytest
from conftest import honest_source
from mcp import MCPError
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from cuda_l2 import tasks
from cuda_l2.agents import MAX_MESSAGE_BYTES, MOST_WAITING
from cuda_l2.agents import workshop as workshop_module
from cuda_l2.agents.server import Server, serve
from cuda_l2.agents.wire import Wire
from cuda_l2.agents.workshop import Workshop
from cuda_l2.archive import Archive
from cuda_l2.families._base import families_for
from cuda_l2.llm._base import is_unread
from cuda_l2.llm.exchanges import ExchangeLog
from cuda_l2.measure.clock import Clock
from cuda_l2.optimizer import Optimizer
from cuda_l2.propose._answer import parse_answer
from cuda_l2.propose._base import space_for
from cuda_l2.records import Candidate
from cuda_l2.search import judge_group
from cuda_l2.settings import Settings

SHAPE = "32x32x32"
RIGHT = honest_source()
WRONG = RIGHT.replace("p < k;", "p < k - 1;")
TOKEN = "token-of-the-tests"
Talk = Callable[[Client], Awaitable[None]]


def default_source(target: Any) -> str:
    """The family's first schedule, on one thread."""
    task = tasks.parse(SHAPE)
    space = space_for(families_for(task, target), task, target)
    return space.render(space.defaults()[0], "x").source


@contextlib.contextmanager
def working(path: Path, *shapes: str, **given: Any) -> Iterator[Workshop]:
    clock = given.pop("clock", Clock())
    settings = Settings(policy="random", target="cpu", archive=path, **{"budget_s": 3600, "trials": 50, **given})
    with (
        Optimizer(settings, clock=clock) as optimizer,
        Workshop(optimizer, [tasks.parse(shape) for shape in shapes or (SHAPE,)]) as opened,
    ):
        yield opened


def talk_to(workshop: Workshop, talk: Talk) -> None:
    """Serve a workshop to a client in this process, while it talks."""

    async def serving(server: Server) -> None:
        async with Client(server) as client:
            await talk(client)

    serve(lambda: contextlib.nullcontext(workshop), serving)


async def called(client: Client, tool: str, **arguments: Any) -> Any:
    """What a tool gives: the structure, or the text where that is all; an error's text in a list."""
    result = await client.call_tool(tool, arguments)
    if result.is_error:
        return [result.content[0].text]
    structure = result.structured_content
    return structure["result"] if set(structure) == {"result"} else structure


@contextlib.contextmanager
def session(tmp_path: Path, before: bytes, *arguments: str) -> Iterator[StdioServerParameters]:
    """`cuda-l2 mcp` behind named pipes, and the command that joins a client's standard input and output to them.

    before: what the server reads ahead of the client's words.
    """
    files = {name: str(tmp_path / name) for name in ("input", "output", "errors")}
    for name in ("input", "output"):
        os.mkfifo(files[name])
    (tmp_path / "errors").touch()
    (tmp_path / "before").write_bytes(before)
    status: list[int] = []
    command = ["mcp", SHAPE, "--target", "cpu", "--archive", str(tmp_path / "archive.db"), *arguments]
    thread = threading.Thread(target=lambda: status.append(command_line.run_over(files, *command)))
    thread.start()
    joined = 'cat "$0/output" & exec cat "$0/before" - > "$0/input"'
    yield StdioServerParameters(command="/bin/sh", args=["-c", joined, str(tmp_path)])
    thread.join()
    assert status == [0], (tmp_path / "errors").read_text()


FLOOD = b"".join(b'{"jsonrpc":"2.0","id":%d,"method":"ping"}\n' % (10_000 + i) for i in range(300))
RUBBISH = b'\x00\xff\n{"jsonrpc"\n[]\n{"jsonrpc":"2.0","id":7}\n' + b"x" * (MAX_MESSAGE_BYTES + 9) + b"\n"


def test_a_session_over_standard_input_and_output_improves_a_kernel(tmp_path: Path, target: Any) -> None:
    faster = default_source(target)

    async def talk(server: StdioServerParameters) -> None:
        async with Client(server, mode="legacy") as client:
            assert SHAPE in await called(client, "task") and "roofline bound" in await called(client, "machine")
            assert "cuda-l2" in await called(client, "contract")
            wrong = (await called(client, "submit", sources=[WRONG]))["results"][0]
            assert wrong["status"] == "incorrect" and wrong["reward"] < 0
            assert re.search(r"C\[\d+, \d+\] is \S+, exact \S+", wrong["feedback"])
            with pytest.raises(MCPError, match="at most 4 MiB"):
                await client.call_tool("submit", {"sources": ["y" * (1 << 20)] * 5})
            answer = await called(client, "submit", sources=[RIGHT, faster])
            right, default = answer["results"]
            assert right["status"] == default["status"] == "measured" and right["speedup"][0] > 0
            assert answer["left"]["candidates"] == 9 - 3
            best = max(right, default, key=lambda result: result["reward"])
            said = await called(client, "best")
            assert said.startswith(best["candidate"]) and f"Score {best['reward']:.3f}" in said
            shown = await called(client, "exemplars", count=8)
            assert all(result["candidate"] in shown for result in (right, default)) and "What failed before" in shown

    with session(tmp_path, RUBBISH + FLOOD, "--trials", "9") as server:
        anyio.run(talk, server)
    assert "message of 4 MB was refused" in (tmp_path / "errors").read_text()
    with Archive(tmp_path / "archive.db") as archive, ExchangeLog(archive.path) as log:
        trials, kept = archive.trials(tasks.parse(SHAPE)), log.exchanges(purpose="agent")
    assert [trial.status for trial in trials] == ["incorrect", "measured", "measured"]
    assert {trial.candidate.proposer for trial in trials} == {"mcp:mcp"} and is_unread("mcp:mcp")
    assert [Candidate(parse_answer(each.reply.text).source).id for each in kept] == [t.candidate.id for t in trials]


def test_a_later_server_goes_on_from_the_archive_and_reports(tmp_path: Path) -> None:
    async def first(client: Client) -> None:
        assert not (await called(client, "submit", sources=[RIGHT]))["results"][0]["known"]

    async def second(client: Client) -> None:
        assert (await called(client, "submit", sources=[RIGHT]))["results"][0]["known"]
        report = await called(client, "report")
        assert report["protocols"]["offline"]["status"] == "measured" and isinstance(report["wins"], bool)
        assert await called(client, "report") == report  # not measured again

    for talk in (first, second):
        with working(tmp_path / "archive.db", protocol="offline") as workshop:
            talk_to(workshop, talk)
    with Archive(tmp_path / "archive.db") as archive:
        assert len(archive.trials(protocol="search")) == 1 and len(archive.trials(protocol="offline")) == 1


def test_budgets_of_count_and_of_time_end_submissions(tmp_path: Path) -> None:
    now = [0.0]

    async def by_count(client: Client) -> None:
        answer = await called(client, "submit", sources=["a", "b", "c"])
        assert [result["status"] for result in answer["results"]] == ["refused"] * 2
        assert answer["not_judged"] == 1 and answer["left"]["candidates"] == 0
        assert "budget is spent" in (await called(client, "submit", sources=["d"]))[0]

    async def by_time(client: Client) -> None:
        now[0] += 1e6  # before the first submission
        assert (await called(client, "submit", sources=["a"]))["left"]["seconds"] == 60
        now[0] += 61
        assert "budget is spent" in (await called(client, "submit", sources=["b"]))[0]

    with working(tmp_path / "count.db", trials=2) as workshop:
        talk_to(workshop, by_count)
    with working(tmp_path / "time.db", budget_s=60, clock=Clock(lambda: now[0], lambda s: None)) as workshop:
        talk_to(workshop, by_time)


def test_tools_take_no_path_and_nothing_but_this_servers_tasks(tmp_path: Path) -> None:
    async def talk(client: Client) -> None:
        listed = (await client.list_tools()).tools
        names = {name for tool in listed for name in tool.input_schema.get("properties", {})}
        assert names == {"task", "sources", "candidate", "count", "words", "long"}
        for task in ("128x128x128", "../../etc/passwd", "kernelbench/level1/1", str(tmp_path), "\x00"):
            for tool in ("task", "machine", "contract", "best", "exemplars", "report"):
                (said,) = await called(client, tool, task=task)
                assert "there is no task" in said and "choose from 32x32x32, 8x8x8:tn" in said
        assert "column-major B" in await called(client, "task", task="8x8x8:tn")
        assert "only CUDA kernels" in (await called(client, "profile", candidate="/etc/passwd"))[0]
        assert "cuda-l2 index" in (await called(client, "look_up", words="/etc/passwd"))[0]
        for sources in ([], ["x"] * 9, ["x" * (1 << 19)], "x", [1]):
            assert "validation error" in (await called(client, "submit", sources=sources))[0]

    with working(tmp_path / "archive.db", SHAPE, "8x8x8:tn") as workshop:
        talk_to(workshop, talk)
        assert workshop.submitted == 0


def test_nothing_is_read_while_a_reply_is_not_taken() -> None:
    (read_in, write_in), (read_out, write_out) = os.pipe(), os.pipe()
    reply = "x" * (1 << 20)  # more than a pipe holds

    def take() -> None:
        left = len(reply)
        while left:
            left -= len(os.read(read_out, left))

    async def talk() -> None:
        wire = Wire()
        wire._input, wire._output = read_in, write_out
        wire.start()
        async with anyio.create_task_group() as group:
            group.start_soon(wire.write, reply)
            await anyio.wait_all_tasks_blocked()
            os.write(write_in, b"a question\n")
            lines: list[str] = []

            async def read() -> None:
                lines.append(await anext(wire))

            group.start_soon(read)
            while not wire._lines.full():
                await anyio.sleep(0)
            await anyio.wait_all_tasks_blocked()
            early = [*lines]
            await anyio.to_thread.run_sync(take)
            await wire.flush()
        assert (early, lines) == ([], ["a question\n"])
        os.close(write_in)
        assert [line async for line in wire] == []

    anyio.run(talk)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Set when a submission begins to be judged, and to be set for it to go on."""
    begun, goes_on = threading.Event(), threading.Event()

    def waits(*arguments: Any) -> Any:
        begun.set()
        goes_on.wait()
        yield from judge_group(*arguments)

    monkeypatch.setattr(workshop_module, "judge_group", waits)
    return begun, goes_on


def test_a_client_that_leaves_in_mid_submission_leaves_a_trial(tmp_path: Path, held: Any) -> None:
    begun, goes_on = held
    path = tmp_path / "archive.db"

    async def talk(client: Client) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "submit", {"sources": [RIGHT]})
            await anyio.to_thread.run_sync(begun.wait)
            group.start_soon(client.call_tool, "submit", {"sources": ["never judged"]})
            await anyio.wait_all_tasks_blocked()
            with ExchangeLog(path) as log:  # before it is judged: a kill now would leave it there
                assert [RIGHT in kept.reply.text for kept in log.exchanges(purpose="agent")] == [True]
            group.cancel_scope.cancel()
        goes_on.set()
        assert "Score" in await called(client, "best")

    with working(path) as workshop:
        talk_to(workshop, talk)
        assert workshop.submitted == 1
    with Archive(path) as archive:
        assert [trial.candidate.source for trial in archive.trials()] == [RIGHT]


def test_a_flood_of_calls_is_bounded(tmp_path: Path, held: Any, capsys: Any) -> None:
    begun, goes_on = held
    answers: list[Any] = []

    async def talk(client: Client) -> None:
        async def ask() -> None:
            answers.append(await called(client, "submit", sources=["x"]))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.to_thread.run_sync(begun.wait)
            for _ in range(100):
                group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            goes_on.set()

    with working(tmp_path / "archive.db") as workshop:
        talk_to(workshop, talk)
        assert workshop.submitted == 1 + MOST_WAITING
    refused = [answer for answer in answers if isinstance(answer, list)]
    assert len(refused) == 100 - MOST_WAITING and all("calls wait already" in said for (said,) in refused)
    assert "92 calls refused" in capsys.readouterr().err


def test_an_error_that_nobody_foresaw_ends_one_call_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*arguments: Any) -> Any:
        raise RuntimeError("a secret of the machine")

    async def talk(client: Client) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(workshop_module, "judge_group", breaks)
            assert await called(client, "submit", sources=[RIGHT]) == ["Error executing tool submit"]
        assert (await called(client, "submit", sources=[RIGHT]))["results"][0]["status"] == "measured"

    with working(tmp_path / "archive.db") as workshop:
        talk_to(workshop, talk)


ALLOWED = {"Authorization": f"Bearer {TOKEN}", "Accept": "application/json, text/event-stream"}


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    """A client over HTTP."""
    async with (
        httpx2.AsyncClient(trust_env=False, timeout=None, headers=ALLOWED) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        yield client


def over_http(workshop: Workshop, talk: Callable[[str], Awaitable[None]]) -> None:
    """Serve a workshop on loopback, while clients talk to its address."""

    async def clients(server: Server) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            async with anyio.create_task_group() as group:
                group.start_soon(server.serve_http, listening, TOKEN)
                await talk(f"http://127.0.0.1:{listening.getsockname()[1]}/mcp")
                group.cancel_scope.cancel()

    serve(lambda: contextlib.nullcontext(workshop), clients)


def test_a_client_that_disconnects_in_mid_submission_leaves_a_trial(tmp_path: Path, held: Any) -> None:
    begun, goes_on = held

    async def talk(url: str) -> None:
        async def submit() -> None:
            async with connected(url) as client:
                await client.call_tool("submit", {"sources": [RIGHT]})

        async with anyio.create_task_group() as group:
            group.start_soon(submit)
            await anyio.to_thread.run_sync(begun.wait)
            group.cancel_scope.cancel()
        goes_on.set()
        async with connected(url) as client:
            assert "Score" in await called(client, "best")

    with working(tmp_path / "archive.db") as workshop:
        over_http(workshop, talk)
        assert workshop.submitted == 1


def test_http_asks_for_the_token_host_and_origin(tmp_path: Path) -> None:
    async def talk(url: str) -> None:
        asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        async with httpx2.AsyncClient(trust_env=False, timeout=None) as http:
            for changed, status in (
                ({"Authorization": ""}, 401),
                ({"Authorization": "Bearer another"}, 401),
                ({"Host": "rebound.example"}, 421),
                ({"Origin": "http://rebound.example"}, 403),
            ):
                response = await http.post(url, json=asked, headers=ALLOWED | changed)
                assert response.status_code == status, changed
            large = await http.post(url, content=b"x" * (MAX_MESSAGE_BYTES + 1), headers=ALLOWED)
            assert large.status_code == 413
        for _ in range(2):  # a second client after the first has left
            async with connected(url) as client:
                assert SHAPE in await called(client, "task")

    with working(tmp_path / "archive.db") as workshop:
        over_http(workshop, talk)


def test_a_person_who_starts_the_server_is_told_who_does(tmp_path) -> None:
    person, terminal = os.openpty()
    os.write(person, b"\x04")  # the end of the input
    errors = tmp_path / "errors"
    errors.touch()
    files = {"input": os.ttyname(terminal), "output": os.devnull, "errors": str(errors)}
    status = command_line.run_over(files, "mcp", "32x32x32", "--target", "cpu", CUDA_L2_HOME=str(tmp_path))
    assert status == 0 and errors.read_text().startswith("cuda-l2: an agent starts this command and talks to it")
