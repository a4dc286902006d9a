"""Endpoints with ways of their own: streams, short windows, code in other fields, errors in good responses, proxies."""

import json
import shutil
import socket
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from llm_server import Say, serving
from made import trial

from cuda_l2.archive import Archive
from cuda_l2.llm import completions
from cuda_l2.llm._base import Message, Outcome, open_model
from cuda_l2.llm.client import Client, Question
from cuda_l2.llm.completions import Limits, limits_in
from cuda_l2.llm.exchanges import ExchangeLog
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.propose._answer import Fault, parse_answer
from cuda_l2.propose._llm import LlmProposer
from cuda_l2.propose._prompt import Templates
from cuda_l2.propose._question import Sources
from cuda_l2.records import Gemm
from cuda_l2.system.errors import UserError

ONCE = ModelSettings(retries=0, concurrency=1)
FILE = '/* cuda-l2\ntarget = "cpu"\n*/\nvoid gemm(void) { char c = \'"\'; }\n'
USAGE = {"prompt_tokens": 70, "completion_tokens": 30}
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def log(tmp_path):
    with Archive(tmp_path / "archive.db"), ExchangeLog(tmp_path / "archive.db") as opened:
        yield opened


def client_at(address: str, log, settings: ModelSettings = ONCE) -> Client:
    return Client(open_model(f"openai:stub@{address}", settings), log, settings)


def asked(client: Client, text: str = "hello"):
    (exchange,) = client.ask("64x64x64", "m", [Question((Message("system", "you"), Message("user", text)))])
    return exchange.reply


def stream(*events: dict | str, line: str = "\n") -> Say:
    texts = [event if isinstance(event, str) else f"data: {json.dumps(event)}" for event in events]
    body = "".join(f"{text}{line}{line}" for text in texts).encode()
    return Say(body=body, headers={"Content-Type": "text/event-stream"})


def delta(text: str, field: str = "content", finish: str | None = None) -> dict:
    return {"choices": [{"index": 0, "delta": {field: text}, "finish_reason": finish}]}


STREAM = (": a comment", delta("void "), delta("f();", finish="stop"), {"choices": [], "usage": USAGE}, "data: [DONE]")


@pytest.mark.parametrize("line", ["\n", "\r\n"])
def test_an_event_stream_that_nobody_asked_for_is_read(line, log) -> None:
    with serving([stream(*STREAM, line=line)]) as server:
        client = client_at(server.address, log)
        reply = asked(client)
    assert (reply.outcome, reply.text, reply.finish) == (Outcome.ANSWERED, "void f();", "stop")
    assert client.budget.tokens == 100 and "stream" not in server.requests[0]


def test_an_endpoint_that_only_streams_is_asked_for_a_stream(log) -> None:
    def script(request, number):
        if not request.get("stream"):
            return Say("this model only supports streaming, set stream to true", 400)
        return Say("unknown field stream_options", 400) if "stream_options" in request else stream(*STREAM)

    with serving(script) as server:
        client = client_at(server.address, log)
        assert [asked(client, text).text for text in "ab"] == ["void f();"] * 2
    assert [request.get("stream") for request in server.requests] == [None, True, True, True]  # it remembers


def test_a_stream_may_be_long_for_its_text(log) -> None:
    """Each event carries names and dates: 300 bytes for a token."""
    many = [delta("x") | {"system_fingerprint": "y" * 220}] * 20_000
    with serving([stream(*many, "data: [DONE]")]) as server:
        assert asked(client_at(server.address, log)).text == "x" * 20_000


def test_an_error_in_a_stream_is_named(log) -> None:
    error = {"error": {"message": "overloaded", "code": 503}, "choices": []}
    with serving([stream(delta("void"), error), stream(error)]) as server:
        client = client_at(server.address, log)
        cut, at_once = asked(client, "a"), asked(client, "b")
    assert cut.outcome is at_once.outcome is Outcome.FAILED and "overloaded" in cut.reason
    assert cut.billed and not at_once.billed  # text that came is paid for


def test_a_response_that_ends_too_early_is_no_whole_answer(log) -> None:
    half = f"```c\n{FILE[:-4]}"
    streamed = stream(delta(half))
    cut = [replace(say, missing=9) for say in (streamed, Say(body=choice(content=half)))]
    with serving([*cut, streamed]) as server:
        client = client_at(server.address, log)
        *broken, ended = [asked(client, text) for text in "abc"]
    assert all(reply.outcome is Outcome.FAILED and "broke off" in reply.reason and reply.billed for reply in broken)
    assert ended.text == half and parse_answer(ended.text, ended.finish).fault is Fault.CUT_OFF


def choice(finish: str = "stop", **message) -> bytes:
    choice = {"message": {"role": "assistant", "content": None, **message}, "finish_reason": finish}
    return json.dumps({"choices": [choice], "usage": USAGE}).encode()


def call(arguments: object) -> list[dict]:
    return [{"type": "function", "function": {"name": "write_file", "arguments": arguments}}]


@pytest.mark.parametrize(
    "body",
    [
        choice(content=f"```c\n{FILE}```"),
        choice(content=[{"type": "text", "text": "Here:\n"}, {"type": "text", "text": FILE}]),
        choice(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"text": FILE}]),
        choice(content=[{"type": "thinking", "thinking": [{"type": "text", "text": FILE}]}]),
        choice(reasoning_content=f"Let me think.\n```c\n{FILE}```"),
        choice(reasoning=f"Let me think.\n```c\n{FILE}```", content="The kernel is above."),
        choice(thinking=f"Let me think.\n```c\n{FILE}```", content=""),
        choice(reasoning_details=[{"type": "reasoning.encrypted"}, {"type": "reasoning.text", "text": FILE}]),
        choice(content=f"```c\n{FILE[:40]}draft```\n</think>\n\n```c\n{FILE}```"),
        choice(tool_calls=call(json.dumps({"path": "a.c", "content": FILE}))),
        choice(tool_calls=call(json.dumps({"text": f"The file:\n```c\n{FILE}```"})), content="I write the file."),
        choice(tool_calls=call({"files": [{"content": FILE}]}), reasoning_content="a draft { }"),
        choice(tool_calls=[{"type": "custom", "custom": {"name": "write", "input": FILE}}]),
        choice(function_call={"name": "write", "arguments": json.dumps({"code": FILE})}),
        json.dumps({"choices": [{"text": FILE, "finish_reason": "stop"}]}).encode(),
        stream(delta(FILE[:20], "reasoning_content"), delta(FILE[20:], "reasoning_content")).body,
        stream(
            *[
                {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}}]}
                for part in ('{"content": ', json.dumps(FILE), "}")
            ]
        ).body,
    ],
)
def test_code_is_found_wherever_an_api_puts_text(body) -> None:
    reply = completions.read(body)
    assert reply.outcome is Outcome.ANSWERED and parse_answer(reply.text, reply.finish).source == FILE


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("begun", [None, "", "<think>"])
def test_a_draft_of_thoughts_that_were_cut_off_is_no_answer(field, begun, log) -> None:
    whole = choice("length", content=begun, **{field: f"First:\n```c\n{FILE}```\nBut"})
    streamed = stream(delta(f"First:\n```c\n{FILE}```\n", field), delta("But", field, finish="length"), "data: [DONE]")
    with serving([Say(body=whole), streamed]) as server:
        client = client_at(server.address, log)
        replies = [asked(client, "a"), asked(client, "b")]
    assert [parse_answer(reply.text, reply.finish).fault for reply in replies] == [Fault.CUT_OFF] * 2


def test_an_answer_with_code_is_not_mixed_with_its_reasoning() -> None:
    reply = completions.read(choice(content=f"```c\n{FILE}```", reasoning_content="/* cuda-l2 */ a draft"))
    assert reply.text == f"```c\n{FILE}```"
    assert completions.read(choice(content="lines 1 to 5", reasoning_content="hm")).text == "lines 1 to 5"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (choice(refusal="I cannot help with that."), "declined to answer: I cannot help with that."),
        (choice("content_filter"), "withheld the answer"),
    ],
)
def test_a_refusal_is_named_and_costs_what_it_took(body, says, log) -> None:
    with serving([Say(body=body)]) as server:
        client = client_at(server.address, log)
        reply = asked(client)
    assert reply.outcome is Outcome.DECLINED and says in reply.reason
    assert client.budget.tokens == 100 and "1 declined" in client.summary()


@pytest.mark.parametrize(
    ("fields", "outcome", "says"),
    [
        ({"error": {"message": "no capacity", "code": 502}}, Outcome.FAILED, "no capacity"),
        ({"error": "no capacity"}, Outcome.FAILED, "no capacity"),
        ({"error": {"message": "slow down", "code": "429"}}, Outcome.RATE_LIMITED, "limits the rate"),
        ({"object": "error", "message": "no capacity", "code": 500}, Outcome.FAILED, "no capacity"),
        ({"detail": "no capacity"}, Outcome.FAILED, "no capacity"),
        ({"code": 1113, "msg": "no capacity", "success": False}, Outcome.FAILED, "no capacity"),
        ({"choices": None, "message": "no capacity", "code": 503}, Outcome.FAILED, "no capacity"),
        ({"choices": [{"error": {"message": "no capacity"}, "message": {"content": ""}}]}, Outcome.FAILED, "capacity"),
    ],
)
def test_an_error_in_a_good_response_is_named_and_not_billed(fields, outcome, says, log) -> None:
    with serving([Say("well"), Say(body=json.dumps(fields).encode())]) as server:
        client = client_at(server.address, log)
        asked(client, "a")
        spent = client.budget.tokens
        reply = asked(client, "b")
    assert reply.outcome is outcome and says in reply.reason and client.budget.tokens == spent and not reply.retries


def test_a_wrong_key_said_in_a_good_response_is_one_clear_line(log) -> None:
    body = json.dumps({"error": {"message": "who are you?", "code": 401}}).encode()
    with serving([Say(body=body)]) as server, pytest.raises(UserError, match="set OPENAI_API_KEY"):
        asked(client_at(server.address, log))


def test_an_empty_answer_is_no_turn_of_the_conversation() -> None:
    count = len
    asking = (Message("system", "you"), Message("user", "write"))
    first = Templates().repair(asking, " \n", "no code", 10_000, count)
    assert [message.role for message in first] == ["system", "user"]
    assert first[-1].text.startswith("write\n\n") and "no code" in first[-1].text
    second = Templates().repair((*asking, Message("assistant", "x"), Message("user", "y")), "", "none", 10_000, count)
    assert [message.role for message in second] == ["system", "user", "assistant", "user"]
    assert Templates().repair(asking, "", "no code", 5, count) == ()


@pytest.mark.parametrize(
    ("refusal", "limits"),
    [
        ("This model's maximum context length is 8192 tokens. However, you requested 12000 tokens", Limits(8192)),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 16384. This model's maximum context length is 8192"
            " tokens and your request has 3000 input tokens (16384 > 8192 - 3000).",
            Limits(8192),
        ),
        (
            "You passed 9000 input tokens and requested 16384 output tokens. However, the model's context length is only"
            " 8192 tokens",
            Limits(8192),
        ),
        ("request (9000 tokens) exceeds the available context size (8192 tokens), try increasing it", Limits(8192)),
        ("{'message': 'exceeds the available context size', 'n_prompt_tokens': 9000, 'n_ctx': 8192}", Limits(8192)),
        ("The input (9000 tokens) is longer than the model's context length (8192 tokens).", Limits(8192)),
        ("`inputs` tokens + `max_new_tokens` must be <= 8192. Given: 3000 `inputs` tokens and 16384", Limits(8192)),
        ("input length and `max_tokens` exceed context limit: 190000 + 16384 > 200000", Limits(200_000)),
        ("prompt is too long: 210000 tokens > 200000 maximum", Limits(200_000)),
        ("Prompt contains 40000 tokens, too large for model with 32,768 maximum context length", Limits(32_768)),
        ("The input token count (9000) exceeds the maximum number of tokens allowed (8192).", Limits(8192)),
        ("max_tokens is too large: 16384. This model supports at most 4096 completion tokens", Limits(answer=4096)),
        ("Invalid max_tokens value, the valid range of max_tokens is [1, 8192]", Limits(answer=8192)),
        ("`max_tokens` must be less than or equal to `8192`", Limits(answer=8192)),
        ("the request exceeds the available context size, try increasing it", Limits()),
        ("Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.", None),
        ("temperature must be <= 1 for this model", None),
        ("System role not supported", None),
    ],
)
def test_a_refusal_for_length_is_told_from_others(refusal, limits) -> None:
    assert limits_in(refusal) == limits


def short_window(request, number):
    """A server as vLLM is, with a window of 8192 tokens of 2.8 characters each."""
    prompt = round(sum(len(message["content"]) for message in request["messages"]) / 2.8)
    if "max_completion_tokens" in request:
        return Say("there is no max_completion_tokens", 400)
    if prompt + request["max_tokens"] <= 8192:
        return Say("fine")
    return Say(
        f"'max_tokens' or 'max_completion_tokens' is too large: {request['max_tokens']}. This model's maximum context"
        f" length is 8192 tokens and your request has {prompt} input tokens.",
        400,
    )


def test_a_short_window_is_learnt_and_answers_shrink_to_it(log) -> None:
    with serving(short_window) as server:
        client = client_at(server.address, log)
        assert asked(client, "x" * 9000).text == "fine"
        assert client.model.window == 8192 and client.prompt_tokens() == int(0.6 * 8192)
        sent = len(server.requests)
        assert asked(client, "y" * 3000).text == "fine" and len(server.requests) == sent + 1
        assert client.summary().count("window of 8,192 tokens") == 1
        reply = asked(client, "z" * 30_000)
    assert reply.outcome is Outcome.TOO_LONG and "8,192" in reply.reason and client.budget.tokens == 2200


def test_prompts_shrink_to_a_window_exemplars_first(log, target) -> None:
    source = FILE + f"/* {'tile ' * 4000}*/\n"
    gemm, kept = Gemm(64, 64, 64), [trial(source, 2.0, machine=target.machine)]

    def script(request, number):
        said = short_window(request, number)
        return Say(f"```c\n{FILE}```") if said.status == 200 else said

    with serving(script) as server:
        client = client_at(server.address, log)
        sources = Sources(lambda: kept)
        proposer = LlmProposer(gemm, target, client, Templates(), sources, np.random.default_rng(0))
        assert [candidate.source for candidate in proposer.propose(1)] == [FILE]
    assert "tile tile" in server.prompts[0] and "tile tile" not in server.prompts[-1]
    assert "1 too-long" in proposer.summary() and proposer.summary().count("window of 8,192") == 1


def test_an_answers_own_limit_is_learnt(log) -> None:
    def script(request, number):
        most = request["max_tokens"] <= 4096
        return Say("fine") if most else Say("This model supports at most 4096 completion tokens", 400)

    with serving(script) as server:
        client = client_at(server.address, log)
        assert asked(client).text == "fine" and "4,096 tokens" in client.summary()
    assert [request["max_tokens"] for request in server.requests] == [16_384, 4096]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY", "http_proxy"])
@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_a_loopback_address_never_goes_through_a_proxy(host, variable, proxy, log, monkeypatch) -> None:
    monkeypatch.setenv(variable, proxy)
    with serving([Say("direct")]) as server:
        assert asked(client_at(server.address.replace("127.0.0.1", host), log)).text == "direct"


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {"ALL_PROXY": "socks5://user:word@proxy:1080"},
            r"ALL_PROXY=socks5://proxy:1080 is a SOCKS proxy: pip install",
        ),
        ({"ALL_PROXY": "socks4://proxy:1080"}, "ALL_PROXY=socks4://proxy:1080 is no proxy that can be used"),
        ({"HTTP_PROXY": "http://proxy:port"}, "HTTP_PROXY=http://proxy:port is no proxy"),
        ({"SSL_CERT_FILE": "/no/such/file"}, "SSL_CERT_FILE=/no/such/file cannot be read"),
        ({"SSL_CERT_FILE": "/etc/passwd"}, "SSL_CERT_FILE=/etc/passwd holds no certificates"),
    ],
)
def test_what_the_environment_breaks_is_one_clear_line(variables, says, log, monkeypatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=says) as caught:
        asked(client_at("http://endpoint.example/v1", log))
    assert "\n" not in str(caught.value) and "word" not in str(caught.value)


def test_a_proxy_that_is_not_there_is_named(log, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    monkeypatch.setenv("HTTP_PROXY", f"http://user:word@127.0.0.1:{port}")
    with pytest.raises(UserError, match=f"through the proxy that HTTP_PROXY=http://127.0.0.1:{port} names") as caught:
        asked(client_at("http://endpoint.example/v1", log))
    assert "word" not in str(caught.value)


def test_a_server_without_tls_and_one_that_is_not_trusted_are_told(log, tmp_path, monkeypatch) -> None:
    with serving([Say()]) as server, pytest.raises(UserError, match="does not speak https"):
        asked(client_at(server.address.replace("http:", "https:"), log))
    if not (openssl := shutil.which("openssl")):
        pytest.skip("no openssl makes a certificate here")
    key, own = tmp_path / "key.pem", tmp_path / "own.pem"
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", own, "-days", "2"]
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([openssl, *made, *named], check=True, capture_output=True)
    with serving([Say("trusted")], certificate=(own, key)) as server:
        address = server.address.replace("127.0.0.1", "localhost")
        with pytest.raises(UserError, match=r"not trusted here; name a file .* SSL_CERT_FILE"):
            asked(client_at(address, log))
        monkeypatch.setenv("SSL_CERT_FILE", str(own))
        assert asked(client_at(address, log)).text == "trusted"


def test_no_proxy_is_kept(log, monkeypatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://proxy:1080")
    monkeypatch.setenv("NO_PROXY", "endpoint.invalid")
    with pytest.raises(UserError, match=r"cannot reach http://endpoint.invalid/v1 \("):
        asked(client_at("http://endpoint.invalid/v1", log))
