"""Asking language models: endpoints and their failures, budgets, stored exchanges, keys that appear nowhere."""

import gzip
import logging
import math
import queue
import shutil
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import KEY
from llm_server import Say, serving
from waiting import wait_until

from cuda_l2.archive import Archive
from cuda_l2.llm._base import Message, Outcome, is_model, model_kinds, open_model
from cuda_l2.llm.client import MAX_ANSWER_CHARS, Client, Question
from cuda_l2.llm.exchanges import ExchangeLog
from cuda_l2.llm.kinds import openai as openai_kind
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.propose._model_policy import ModelPolicy
from cuda_l2.system.errors import UserError

QUICK = ModelSettings(retries=0, answer_tokens=200)


@pytest.fixture
def log(tmp_path):
    with Archive(tmp_path / "archive.db"), ExchangeLog(tmp_path / "archive.db") as opened:
        yield opened


def client_of(server, log, settings: ModelSettings = QUICK) -> Client:
    return Client(open_model(f"openai:stub@{server.address}", settings), log, settings)


def question(text: str = "hello", turn: int = 0) -> Question:
    return Question((Message("system", "you"), Message("user", text)), turn=turn)


def ask(client: Client, *questions: Question, deadline_s: float = 3600.0):
    return client.ask("64x64x64", "m", questions, time.perf_counter() + deadline_s)


def asked(log, script, *texts: str, settings: ModelSettings = QUICK):
    """The client that asked a server of this script one question after the other, the server and the exchanges."""
    with serving(script) as server:
        client = client_of(server, log, settings)
        return client, server, [exchange for text in texts for exchange in ask(client, question(text))]


def test_policies_that_are_models_are_told_apart() -> None:
    assert model_kinds() == ("hf", "openai")
    assert is_model("openai:gpt@http://x/v1") and is_model("hf:folder") and not is_model("schedule")


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("openai:", "openai:MODEL@URL"),
        ("openai:m@http://", "server"),
        ("openai:m@http://user:pass@host/v1", "environment"),
        ("openai:m@http://host/v1?key=abc", "environment"),
        ("openai:http://host/v1", "openai:NAME@URL"),
        ("openai:m@host.example:8000/v1", "openai:NAME@URL"),
        ("openai:m@host.example", "openai:NAME@URL"),
        ("openai:m@localhost", "openai:NAME@URL"),
        ("openai:m@10.0.0.1", "openai:NAME@URL"),
        ("openai:m@http://[::1/v1", "server"),
        ("openai:m@http://host:port/v1", "server"),
        ("openai:m@http://a..b/v1", "server"),
        (f"openai:m@http://{'x' * 70}.com/v1", "server"),
        ("openai:m@http://127.0.0.1:9/v1\r\nX: y", "openai:NAME@URL|server"),
        ("openai:m@http://exa mple/v1", "server"),
        ("openai:m@http://127.0.0.1:9/v1#part", "environment"),
        ("hf:/no/such/folder", "save_pretrained"),
    ],
)
def test_models_that_cannot_be_are_one_clear_line(policy, says) -> None:
    with pytest.raises(UserError, match=says) as caught:
        open_model(policy, QUICK)
    assert "\n" not in str(caught.value)


def test_openais_own_endpoint_needs_a_key(monkeypatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(UserError, match="set OPENAI_API_KEY"):
        open_model("openai:gpt", QUICK)


@pytest.mark.parametrize("wrong", ["sk-\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9", "two words", "a\tb"])
def test_a_key_that_cannot_be_one_is_one_clear_line(wrong, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", wrong)
    with pytest.raises(UserError, match="OPENAI_API_KEY holds") as caught:
        open_model("openai:m@http://localhost:1/v1", QUICK)
    assert wrong not in str(caught.value)


def test_model_names_may_hold_an_at_sign() -> None:
    model = open_model("openai:org/name@rev@http://localhost:1/v1", QUICK)
    assert (model.name, model.where) == ("openai:org/name@rev", "http://localhost:1/v1")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"money": 1.0}, {"price_in": 1.0}, {"tokens": 0}, {"concurrency": 0}, {"repairs": -1}),
        *({"temperature": -0.1}, {"model_seconds": float("nan")}),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong) -> None:
    with pytest.raises(UserError, match="--"):
        ModelSettings(**wrong)


def test_an_exchange_comes_back_whole(log) -> None:
    settings = ModelSettings(retries=0, answer_tokens=200, temperature=0.7, price_in=2.0, price_out=10.0)
    client, server, (exchange,) = asked(log, [Say("the answer")], "hello", settings=settings)
    (kept,) = log.exchanges(task="64x64x64", machine="m", model="openai:stub", purpose="propose")
    assert kept.reply == exchange.reply and kept.messages == exchange.messages and kept.created
    assert kept.address == server.address
    assert kept.reply.text == "the answer" and kept.reply.prompt_tokens == 1000
    assert kept.cost == pytest.approx(1000 * 2e-6 + 100 * 10e-6) == client.budget.money
    (request,) = server.requests
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("stub", 0.7, 200)
    assert server.keys == [f"Bearer {KEY}"]


def test_questions_are_asked_at_once(log) -> None:
    barrier = threading.Barrier(3)
    with serving([Say("x", wait=barrier.wait)]) as server:
        exchanges = ask(client_of(server, log, ModelSettings(retries=0, concurrency=3)), *map(question, "abc"))
    assert [exchange.reply.outcome for exchange in exchanges] == [Outcome.ANSWERED] * 3
    assert [exchange.messages[-1].text for exchange in exchanges] == list("abc")


def test_rate_limits_and_server_faults_are_tried_again(log) -> None:
    soon = {"retry-after-ms": "10"}
    script = [Say("slow down", 429, headers=soon), Say("oh", 500, headers=soon), Say("well")]
    _, _, (exchange,) = asked(log, script, "hello", settings=ModelSettings(retries=3))
    assert exchange.reply.text == "well" and exchange.reply.retries == 2


@pytest.mark.parametrize(
    ("say", "outcome"),
    [
        (Say("slow down", 429), Outcome.RATE_LIMITED),
        (Say("oh", 500), Outcome.FAILED),
        (Say(body=b"not JSON"), Outcome.FAILED),
        (Say(body=b'{"choices": []}'), Outcome.FAILED),
        (Say(body=b"[" * 100_000), Outcome.FAILED),
    ],
    ids=["rate", "fault", "text", "empty", "nested"],
)
def test_faults_are_recorded_and_counted_not_fatal(say, outcome, log) -> None:
    client, _, (exchange,) = asked(log, [say], "hello")
    assert exchange.reply.outcome is outcome and "\n" not in exchange.reply.reason
    assert log.exchanges()[0].reply == exchange.reply
    assert client.outcomes == {outcome: 1} and not client.ended
    assert f"1 {outcome}" in client.summary()


def test_a_response_is_read_to_a_limit(log) -> None:
    packed = Say(body=gzip.compress(b"x" * (50 << 20)), headers={"Content-Encoding": "gzip"})
    long = Say(body=b"x" * (5 << 20)), Say(body=b"x" * (5 << 20), status=400), Say(body=b"x" * (5 << 20), status=500)
    for i, say in enumerate((packed, *long)):
        _, server, (exchange,) = asked(log, [say], str(i))
        assert exchange.reply.outcome is Outcome.FAILED
        assert ("packed as gzip" if say is packed else "more than 4 MiB") in exchange.reply.reason
        assert exchange.reply.billed is (say.status == 200)
        assert server.headers[0]["accept-encoding"] == "identity"


def test_an_answer_that_cannot_be_used_counts_as_billed(log) -> None:
    with serving([Say(body=b"{}"), Say("oh", 500)]) as server:
        client = client_of(server, log)
        ask(client, question("a"))
        spent = client.budget.tokens
        ask(client, question("b"))
    assert spent >= QUICK.answer_tokens and client.budget.tokens == spent


def test_questions_go_nowhere_but_to_the_address_given(log, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-private")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-private")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Private: yes\nAuthorization: Bearer other")
    with serving([Say("never")]) as elsewhere:
        there = {"Location": f"{elsewhere.address}/chat/completions"}
        with serving([Say(status=307, headers=there)]) as server, pytest.raises(UserError, match="sends questions on"):
            ask(client_of(server, log), question())
    assert elsewhere.requests == [] and len(server.requests) == 1
    assert "private" not in str(server.headers).lower() and server.keys == [f"Bearer {KEY}"]


def test_hints_are_given_where_they_help(log, monkeypatch) -> None:
    with serving([Say("no such model", 404)]) as server:
        with pytest.raises(UserError) as caught:
            ask(client_of(server, log), question())
        assert server.address.endswith("/v1") and "/v1" not in str(caught.value).replace(server.address, "")
        elsewhere = open_model(f"openai:stub@{server.address}/chat", QUICK)
        with pytest.raises(UserError, match="usually end in /v1"):
            ask(Client(elsewhere, log, QUICK), question())
    monkeypatch.delenv("OPENAI_API_KEY")
    with serving([Say("who are you?", 401)]) as server, pytest.raises(UserError, match="wants a key"):
        ask(client_of(server, log), question())


def test_a_host_that_takes_no_connection_is_unreachable_and_costs_nothing(log, monkeypatch) -> None:
    monkeypatch.setattr(openai_kind, "CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(4)]  # more than it keeps for later
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        settings = ModelSettings(retries=0)
        client = Client(open_model(f"openai:stub@http://127.0.0.1:{full.getsockname()[1]}/v1", settings), log, settings)
        with pytest.raises(UserError, match=r"cannot reach .* \(no connection within 0.3 s\)"):
            ask(client, question())
        assert client.budget.tokens == 0
        for each in waiting:
            each.close()


class Clock:
    """Time that passes where a test says so, and where somebody sleeps; after its end whoever sleeps does not wake."""

    def __init__(self) -> None:
        self.now_s, self.end_s, self.over = 0.0, 3.0, threading.Event()

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s >= self.end_s:
            self.over.wait()

    def queue(self) -> queue.SimpleQueue:
        """A queue that waits by this clock."""
        clock = self

        class Waiting(queue.Queue):
            def get(self, block: bool = True, timeout: float | None = None):
                end_s = math.inf if timeout is None else clock.now_s + timeout
                while True:
                    try:
                        return super().get(timeout=0.01)
                    except queue.Empty:
                        if clock.now_s >= end_s:
                            raise

        return Waiting()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(openai_kind, "queue", SimpleNamespace(SimpleQueue=made.queue, Empty=queue.Empty))
    monkeypatch.setattr(time, "perf_counter", lambda: made.now_s)
    monkeypatch.setattr(time, "sleep", made.sleep)
    yield made
    made.over.set()


def late(clock: Clock) -> Say:
    """An answer that does not come before the time is up."""
    return Say("late", wait=lambda: clock.sleep(clock.end_s))


def test_a_rate_that_is_limited_until_the_time_is_up_is_said_as_such(log, clock) -> None:
    with serving([Say("slow down", 429, headers={"retry-after-ms": "500"})]) as server:
        client = client_of(server, log, ModelSettings(retries=9))
        (exchange,) = ask(client, question(), deadline_s=clock.end_s)
    assert exchange.reply.outcome is Outcome.RATE_LIMITED and client.budget.tokens == 0


def test_what_fails_until_the_time_is_up_is_no_late_answer(log, clock) -> None:
    """Tries go on behind waits of the client's own; nothing of it is billed."""
    settings = ModelSettings(retries=9, concurrency=1)
    with serving([Say("oh", 500, headers={"retry-after-ms": "500"})]) as server:
        client = client_of(server, log, settings)
        exchanges = ask(client, question("a"), question("b"), deadline_s=clock.end_s)
    reasons = [exchange.reply.reason for exchange in exchanges]
    assert "HTTP 500" in reasons[0] and "before this question was sent" in reasons[1]
    assert client.outcomes == {Outcome.FAILED: 2} and client.budget.tokens == 0
    client = Client(open_model("openai:stub@http://127.0.0.1:9/v1", settings), log, settings)
    clock.now_s = 0.0
    with pytest.raises(UserError, match="cannot reach"):
        ask(client, question("c"), deadline_s=clock.end_s)
    assert client.budget.tokens == 0


@pytest.mark.parametrize(
    ("say", "says"),
    [
        (Say(f"Incorrect API key provided: {KEY}", 401), "set OPENAI_API_KEY"),
        (Say("no such model", 404), "no model stub"),
        (Say("unknown option", 400), "refuses the request"),
        (Say(body=b" <!doctype html><title>Sign in"), "a web page"),
        (Say(body=b'{"error": {"message": "pay", "code": "insufficient_quota"}}', status=429), "quota"),
    ],
)
def test_what_can_never_work_is_one_clear_line(say, says, log) -> None:
    with serving([say]) as server, pytest.raises(UserError, match=says) as caught:
        ask(client_of(server, log), *map(question, "ab"))
    assert "\n" not in str(caught.value) and KEY not in str(caught.value)
    assert len(log.exchanges()) == 2


def test_a_host_that_is_not_there_is_one_clear_line(log) -> None:
    with serving([Say()]) as server:
        pass  # gone
    with pytest.raises(UserError, match="is the server running"):
        ask(client_of(server, log), question())


def test_a_key_that_is_revoked_later_is_counted(log) -> None:
    client, _, _ = asked(log, [Say("fine"), Say("revoked", 401)], "a", "b")
    assert "set OPENAI_API_KEY" in client.failure and "1 refused" in client.summary()


def test_options_a_server_does_not_know_are_left_out(log) -> None:
    def script(request, number):
        if "max_tokens" in request:
            return Say("use max_completion_tokens instead", 400)
        return Say("temperature is fixed", 400) if "temperature" in request else Say("fine")

    with serving(script) as server:
        client = client_of(server, log, ModelSettings(retries=0, concurrency=3))
        assert {exchange.reply.text for exchange in ask(client, *map(question, "abc"))} == {"fine"}
        before = len(server.requests)
        ask(client, question("d"))
    assert len(server.requests) == before + 1  # it remembers
    assert "max_completion_tokens" in server.requests[-1] and "temperature" not in server.requests[-1]


def test_a_server_without_system_prompts_gets_it_with_the_question(log) -> None:
    def script(request, number):
        roles = [message["role"] for message in request["messages"]]
        return Say("System role not supported", 400) if "system" in roles else Say("fine")

    with serving(script) as server:
        together = ask(client_of(server, log, ModelSettings(retries=0)), *[question("hello")] * 4)
    assert {exchange.reply.text for exchange in together} == {"fine"}
    assert server.requests[-1]["messages"] == [{"role": "user", "content": "you\n\nhello"}]


def test_a_deadline_is_kept_and_the_time_counts(log, clock) -> None:
    with serving([late(clock)]) as server:
        client = client_of(server, log)
        (exchange,) = ask(client, question(), deadline_s=clock.end_s)
        clock.over.set()
    assert exchange.reply.outcome is Outcome.TIMED_OUT
    assert client.budget.tokens >= QUICK.answer_tokens  # it may have been billed
    assert client.budget.seconds == clock.end_s


def test_seconds_are_a_budget(log, clock) -> None:
    with serving([late(clock)]) as server:
        client = client_of(server, log, ModelSettings(retries=0, model_seconds=clock.end_s))
        assert ask(client, question("a"))[0].reply.outcome is Outcome.TIMED_OUT
        assert ask(client, question("b")) == []
        clock.over.set()
    assert "waiting" in client.ended


def test_tokens_and_money_are_never_overspent(log) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 190}
    with serving([Say("x", usage=usage)]) as server:
        for settings in (
            ModelSettings(answer_tokens=200, tokens=1100, concurrency=4),
            ModelSettings(answer_tokens=200, money=1.1e-3, price_in=1.0, price_out=1.0, concurrency=4),
        ):
            server.requests.clear()
            client = client_of(server, log, settings)
            for i in range(8):
                ask(client, *(question(f"{settings.money} {i} {j}") for j in range(4)))
                if client.ended:
                    break
            assert client.budget.tokens <= 1100 and client.budget.money <= 1.1e-3
            assert len(server.requests) == 5 and "budget" in client.ended


def test_a_budget_below_one_question_is_one_clear_line(log) -> None:
    with serving([Say("x")]) as server, pytest.raises(UserError, match="--answer-tokens"):
        ask(client_of(server, log, ModelSettings(tokens=201, answer_tokens=200)), question())
    assert server.requests == []


@pytest.mark.parametrize(
    "budget", [{"tokens": 50}, {"money": 1e-4, "price_in": 0.0, "price_out": 1.0}], ids=["tokens", "money"]
)
def test_a_budget_below_one_answer_is_refused_before_anything_is_searched(budget: dict[str, float], tmp_path) -> None:
    settings = ModelSettings(answer_tokens=200, without_sandbox=True, reference_tokens=0, **budget)
    archive = tmp_path / "archive.db"
    Archive(archive).close()
    with (
        serving([Say("x")]) as server,
        pytest.raises(UserError, match="too small; an answer alone may take 200 tokens"),
    ):
        ModelPolicy(f"openai:stub@{server.address}", settings, archive)
    assert server.requests == []


def test_nothing_is_paid_for_that_a_full_disk_could_not_keep(log, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10 << 30, 10 << 30, 9 << 20))
    with serving([Say("x")]) as server:
        client = client_of(server, log)
        with pytest.raises(UserError, match=r"9 MiB are free where the archive .* free 16 MiB"):
            ask(client, question("a"), question("b"))
        assert server.requests == [] and client.budget.tokens == 0
        assert len(ask(client, question("c"))) == 1


def test_usage_that_is_not_told_is_estimated(log) -> None:
    client, _, _ = asked(log, [Say("x" * 300, usage=None)], "y" * 300)
    assert 200 <= client.budget.tokens <= 220


def test_a_stored_answer_is_not_paid_for_again_and_each_asking_has_its_own(log) -> None:
    with serving([Say("one"), Say("two"), Say("three")]) as server:
        first = client_of(server, log)
        assert [ask(first, question())[0].reply.text for _ in range(2)] == ["one", "two"]
        second = client_of(server, log)  # as after a restart
        assert [ask(second, question())[0].reply.text for _ in range(3)] == ["one", "two", "three"]
    assert len(server.requests) == 3 and second.reused == 2 and second.budget.tokens == 1100


def test_failures_are_not_taken_for_stored_answers(log) -> None:
    with serving([Say("oh", 500), Say("fine")]) as server:
        ask(client_of(server, log), question())
        assert ask(client_of(server, log), question())[0].reply.text == "fine"


def test_an_answer_is_stored_the_moment_it_comes(log, tmp_path) -> None:
    """A search that is killed while others of the group are on their way has what was paid for."""
    never = threading.Event()
    with serving(lambda request, number: Say("paid", wait=never.wait if "b" in str(request["messages"][-1]) else lambda: None)) as server:  # fmt: skip
        thread = threading.Thread(target=lambda: _ask_alone(server, tmp_path / "archive.db"))
        thread.start()
        wait_until(log.exchanges)
        assert [exchange.reply.text for exchange in log.exchanges()] == ["paid"]
        never.set()
        thread.join()


def _ask_alone(server, path: Path) -> None:
    with ExchangeLog(path) as own:
        ask(client_of(server, own), question("a"), question("b"))


def test_keys_are_nowhere_even_if_a_server_repeats_them(log, tmp_path, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    client, server, _ = asked(log, [Say(f"your key is {KEY}"), Say(f"{KEY} is no key", 500)], "a", "b")
    log.close()
    for path in tmp_path.iterdir():
        assert KEY.encode() not in path.read_bytes(), path
    assert KEY not in caplog.text and KEY not in client.summary()
    assert server.keys == [f"Bearer {KEY}"] * 2  # it was in use


@pytest.mark.corpus(1)
@pytest.mark.parametrize("own", [KEY, "s3cret"])
def test_no_part_of_a_key_is_kept_where_a_text_is_cut(own, log, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", own)
    says = [Say(f"{'x' * (MAX_ANSWER_CHARS - 5)} {own}")]
    says += [Say(f"{'y' * before} {own} {'z' * 50}", 500) for before in range(100, 230, 2)]
    says += [Say(body=f"{'y' * before} {own} {'z' * 50}".encode()) for before in range(50, 110, 2)]
    _, _, exchanges = asked(log, says, *map(str, range(len(says))))
    for reply in (exchange.reply for exchange in exchanges):
        kept = f"{reply.text[-50:]} {reply.reason}"
        assert own[:4] not in kept, kept


def test_what_a_terminal_would_obey_is_not_kept(log) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x9b31m\u202efine\u200b"
    _, _, (answered, failed) = asked(log, [Say(evil), Say(evil, 500)], "a", "b")
    texts = [answered.reply.text, failed.reply.reason]
    assert all("fine" in text and text.isprintable() for text in texts)


def test_answers_of_megabytes_are_cut_and_odd_characters_do_no_harm(log) -> None:
    body = b'{"choices": [{"message": {"content": "' + b"y" * (1 << 20) + b'\\u0000\\ud800"}}]}'
    odd = b'{"choices": [{"message": {"content": "a\\u0000b\\ud800c"}}]}'
    _, _, (long, short) = asked(log, [Say(body=body), Say(body=odd)], "a", "b")
    assert len(long.reply.text) == MAX_ANSWER_CHARS and long.reply.finish == "length"
    assert short.reply.text == "ab?c"


def test_the_log_never_makes_an_archive_of_its_own(tmp_path) -> None:
    (tmp_path / "empty.db").write_bytes(b"")
    for name in ("missing.db", "empty.db"):
        with pytest.raises(UserError, match="--archive"):
            ExchangeLog(tmp_path / name)
    assert not (tmp_path / "missing.db").exists() and (tmp_path / "empty.db").read_bytes() == b""


def test_an_archive_of_before_takes_exchanges(tmp_path) -> None:
    with Archive(tmp_path / "archive.db"):
        pass
    with ExchangeLog(tmp_path / "archive.db") as log:
        assert log.exchanges() == []
    with Archive(tmp_path / "archive.db") as archive:  # and is an archive still
        assert archive.trials() == []
