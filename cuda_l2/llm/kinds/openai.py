"""A model behind any OpenAI-compatible endpoint: openai:NAME@URL, or openai:NAME for OpenAI's own.

Retries with backoff are the client's; the bound on an answer's size and the deadline are kept here, because a server
may keep neither.
"""

import math
import queue
import re
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import openai

from cuda_l2.llm import completions, network
from cuda_l2.llm._base import Model, Outcome, Reply, Request, one_line, without_system
from cuda_l2.llm.completions import ErrorInBody, Limits, NotAnAnswer, limits_in
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.system import paths
from cuda_l2.system.errors import UserError

MAX_BODY_BYTES, MAX_STREAM_BYTES = 4 << 20, 64 << 20
"""A server that sends more is not read any further. A stream takes some 300 bytes a token."""
LEAST_ANSWER = 256
"""Tokens. Where a window leaves fewer beside the prompt, no question is sent."""
LATE = "the time was up before the answer came; give more with --budget"
NOT_SENT = Reply(Outcome.FAILED, reason="the time was up before this question was sent")
NO_KEY = "none"
LEAST_KEY = 4
"""Characters of a key: shorter ones keep no secret, and any text holds them."""
SENT_HEADERS = {"accept", "connection", "content-length", "content-type", "host", "user-agent"}
"""The headers of a request beside the key: values for OpenAI in the environment must not reach other servers."""
READ_TIMEOUT_S, CONNECT_TIMEOUT_S = 600.0, 15.0
"""A server that is silent for so long is given up; deadlines are usually earlier."""


_HOST = re.compile(r"@(localhost$|\[|[^@]*[/:]|[\w-]+(\.[\w-]+)*\.[a-z]{2,}$|\d+(\.\d+){3}$)", re.IGNORECASE)
"""An address without its http://: read as part of the name, it would send the prompt to another server."""


REFORMED = (400, 413, 422)
"""Statuses of a refusal that another form of the question may avoid."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How a server wants to be asked, as far as it has said."""

    length_name: str = "max_tokens"
    temperature: bool = True
    system: bool = True
    stream: bool = False
    stream_usage: bool = True
    """Whether a stream is to end with the number of tokens."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """A refusal that another form of the question may avoid."""

    said: str
    reply: Reply
    """For where no other form does."""


class OpenAiModel(Model):
    """Asks over HTTP, several questions at once."""

    def __init__(self, rest: str, settings: ModelSettings) -> None:
        match = re.fullmatch(r"(.+?)(?:@(https?://.*))?", rest)
        if not match or (match.group(2) is None and ("://" in rest or _HOST.search(rest))):
            raise UserError(
                f"cannot read the model {rest!r}: write openai:NAME@URL, as in openai:m@http://localhost:8000/v1"
            )
        self._model, address = match.group(1), match.group(2) or paths.endpoint_address()
        try:
            parts = urllib.parse.urlsplit(address)
            named = bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", address)
            httpx2.URL(address).host.encode("idna")  # as a connection does: labels of up to 63 characters
        except (ValueError, httpx2.InvalidURL):
            named = False
        if not named:
            raise UserError(f"{address!r} is not the address of a server; it should look like http://localhost:8000/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise UserError(
                f"the address of {self._model} must hold no user, password, query or fragment; put the key into the"
                f" environment variable {settings.key_variable}"
            )
        key = paths.endpoint_key(settings.key_variable)
        if not key.isascii() or not key.isprintable() or " " in key:
            raise UserError(f"{settings.key_variable} holds characters that no key has; set it again")
        if not key and match.group(2) is None:
            raise UserError(f"set {settings.key_variable} to your key for {address}")
        self.name, self.where = f"openai:{self._model}", address
        self.secrets = (key,) if len(key) >= LEAST_KEY else ()
        self._own_address = match.group(2) is None
        self._key, self._variable = key or NO_KEY, settings.key_variable
        self._retries, self._concurrency = settings.retries, settings.concurrency
        self._form, self._most_answer = _Form(), sys.maxsize
        self._more_tokens = 1.0  # a prompt's tokens on the server over those that are counted here
        self._hint = "" if address.rstrip("/").endswith("/v1") else "; addresses usually end in /v1"

    def ask(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None], deadline: float = math.inf
    ) -> None:
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[int, Reply | BaseException]] = queue.SimpleQueue()
        for i in range(len(requests)):
            todo.put(i)
        try:
            own = "" if self._own_address else self._key
            http = _Careful(own, follow_redirects=False, transport=network.transport_to(self.where))
        except (ImportError, ValueError, OSError, httpx2.InvalidURL) as error:
            raise network.unusable(error) from None
        client = openai.OpenAI(
            base_url=self.where,
            api_key=self._key,
            max_retries=self._retries,
            timeout=httpx2.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            http_client=http,
        )
        asked: dict[int, int] = {}  # by which thread

        def work() -> None:
            while True:
                try:
                    i = todo.get_nowait()
                except queue.Empty:
                    return
                asked[i] = threading.get_ident()
                try:
                    done.put((i, self._one(client, requests[i], deadline)))
                except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                    done.put((i, error))

        # daemons: an interrupt must not wait for a server
        for _ in range(min(self._concurrency, len(requests))):
            threading.Thread(target=work, daemon=True).start()
        waiting = set(range(len(requests)))
        try:
            while waiting:
                try:
                    left = None if math.isinf(deadline) else max(0.0, deadline - time.perf_counter())
                    i, reply = done.get(timeout=left)
                except queue.Empty:
                    break
                waiting.remove(i)
                if isinstance(reply, BaseException):
                    raise reply
                on_reply(i, reply)
        finally:
            client.close()
        for i in sorted(waiting):
            on_reply(i, self._late(http.failures.get(asked[i], "")) if i in asked else NOT_SENT)

    def _late(self, failure: str | int) -> Reply:
        """The reply to a question without an answer at the deadline.

        failure: how its last try ended, as in `_Careful`; empty while it lasts.
        """
        if failure == 429:
            advice = f"{self.where} limited the rate until the time was up; lower --concurrency or raise --budget"
            return Reply(Outcome.RATE_LIMITED, reason=advice)
        if isinstance(failure, int):
            return Reply(Outcome.FAILED, reason=f"{self.where} failed (HTTP {failure}) until the time was up")
        if failure:
            return self._unreachable(failure)
        return Reply(Outcome.TIMED_OUT, reason=LATE)

    def _unreachable(self, cause: str) -> Reply:
        cause = one_line(self.without_secrets(cause), 120)
        proxy = network.proxy_to(self.where)
        way = f" through the proxy that {proxy} names" if proxy else ""
        advice = "; is the server running, is the address right?"
        if "CERTIFICATE_VERIFY_FAILED" in cause:
            advice = ": its certificate is not trusted here; name a file with its authority's in SSL_CERT_FILE"
        elif "WRONG_VERSION_NUMBER" in cause:
            advice = ": it does not speak https; is it a server for http?"
        reason = f"cannot reach {self.where}{way} ({cause}){advice}"
        return Reply(Outcome.UNREACHABLE, reason=reason)

    def _one(self, client: openai.OpenAI, request: Request, deadline: float) -> Reply:
        start = time.perf_counter()
        prompt_tokens = sum(self.count_tokens(message.text) for message in request.messages)
        most = request.answer_tokens
        while True:
            form = self._form
            tokens = min(most, self._room(prompt_tokens))
            if tokens < min(LEAST_ANSWER, request.answer_tokens):
                reason = (
                    f"a prompt of about {prompt_tokens:,} tokens leaves no room for an answer in the window of"
                    f" {self.window:,} tokens that {self.where} has; lower --prompt-tokens"
                )
                return Reply(Outcome.TOO_LONG, reason=reason, seconds=time.perf_counter() - start)
            reply = self._try(client, request, form, tokens, deadline)
            if isinstance(reply, _Refused):
                limits = limits_in(reply.said)
                if limits is not None:
                    self._learn(limits, prompt_tokens + tokens)
                    if self._room(prompt_tokens) >= tokens:  # the server counts more tokens than are counted here
                        most, self._more_tokens = tokens // 2, self._more_tokens * 1.25
                    continue
                if self._adapt(reply.said, form):
                    continue
                reply = reply.reply
            return replace(reply, seconds=time.perf_counter() - start)

    def _room(self, prompt_tokens: int) -> int:
        """Tokens for an answer beside such a prompt."""
        if self.window is None:
            return self._most_answer
        return min(self._most_answer, self.window - math.ceil(self._more_tokens * prompt_tokens))

    def _learn(self, limits: Limits, refused_tokens: int) -> None:
        """Keep the limit that a refusal named, or half of `refused_tokens` where it named none."""
        if limits.answer:
            self._most_answer = min(self._most_answer, limits.answer)
            self.note = f"answers are kept to the {self._most_answer:,} tokens that {self.where} allows"
            return
        window = limits.window or max(2 * LEAST_ANSWER, refused_tokens // 2)
        self.window = min(window, self.window or window)
        self.note = f"prompts and answers are kept to the window of {self.window:,} tokens that {self.where} has"

    def _try(
        self, client: openai.OpenAI, request: Request, form: "_Form", tokens: int, deadline: float
    ) -> "Reply | _Refused":
        options: dict[str, Any] = {form.length_name: tokens}
        if form.temperature:
            options["temperature"] = request.temperature
        if form.stream:
            options["stream"] = True
            if form.stream_usage:
                options["stream_options"] = {"include_usage": True}
        asked = request.messages if form.system else without_system(request.messages)
        messages: Any = [{"role": message.role, "content": message.text} for message in asked]
        body = bytearray()
        begun = False  # an answer: only then may it be billed
        try:
            create = client.chat.completions.with_streaming_response.create
            with create(model=self._model, messages=messages, **options) as response:
                begun = True
                for chunk in response.iter_bytes():
                    body += chunk
                    if time.perf_counter() > deadline:
                        return Reply(Outcome.TIMED_OUT, reason=LATE)
                retries = int(response.retries_taken)
            return replace(completions.read(bytes(body)), retries=retries)
        except openai.APIStatusError as error:
            reply = self._failure(error)
            return _Refused(str(error), reply) if error.status_code in REFORMED else reply
        except openai.OpenAIError as error:
            return self._failure(error)
        except ErrorInBody as error:
            said = one_line(self.without_secrets(str(error)), 200)
            reply = replace(self._by_status(error.status, said, quota="insufficient_quota" in said), retries=0)
            return replace(reply, billed=True) if error.begun else _Refused(str(error), reply)
        except httpx2.HTTPError as error:
            reason = one_line(f"{self.where} broke off: {error or type(error).__name__}")
            return Reply(Outcome.FAILED, reason=reason, billed=begun)
        except NotAnAnswer as error:
            said = one_line(self.without_secrets(str(error)), 100)
            if body.lstrip()[:1] == b"<":
                advice = f"{self.where} sent a web page, no chat completion ({said}){self._hint}"
                return Reply(Outcome.REFUSED, reason=advice)
            reason = f"{self.where} sent what is not a chat completion: {said}"
            return Reply(Outcome.FAILED, reason=reason, billed=begun)
        except (httpx2.InvalidURL, UnicodeError) as error:  # a name that no connection takes
            return Reply(Outcome.UNREACHABLE, reason=one_line(f"{self.where} cannot be an address: {error}"))

    def _adapt(self, refusal: str, form: "_Form") -> bool:
        """Whether a server refused a part of this form that it can do without; later requests go without it."""
        if "max_completion_tokens" in refusal and form.length_name == "max_tokens":
            self._form = replace(self._form, length_name="max_completion_tokens")
        elif "stream_options" in refusal and form.stream and form.stream_usage:
            self._form = replace(self._form, stream_usage=False)
        elif re.search("stream", refusal, re.IGNORECASE) and not form.stream:
            self._form = replace(self._form, stream=True)
        elif "temperature" in refusal and form.temperature:
            self._form = replace(self._form, temperature=False)
        elif re.search(r"\bsystem\b", refusal, re.IGNORECASE) and form.system:
            self._form = replace(self._form, system=False)
        else:
            return False
        return True

    def _failure(self, error: openai.OpenAIError) -> Reply:
        if isinstance(error.__cause__, httpx2.ConnectTimeout):
            return self._unreachable(f"no connection within {CONNECT_TIMEOUT_S:g} s")
        if isinstance(error, openai.APITimeoutError):
            return Reply(Outcome.TIMED_OUT, reason=f"{self.where} was silent for {READ_TIMEOUT_S:.0f} s")
        if isinstance(error, openai.APIConnectionError):
            return self._unreachable(str(error.__cause__ or error))
        if not isinstance(error, openai.APIStatusError):
            return Reply(Outcome.FAILED, reason=one_line(f"{self.where}: {self.without_secrets(str(error))}"))
        said = one_line(self.without_secrets(str(error.message)), 200)
        if 300 <= error.status_code < 400:
            there = one_line(self.without_secrets(error.response.headers.get("location", "elsewhere")), 120)
            advice = f"{self.where} sends questions on to {there}; name that address if prompts may go there"
            return Reply(Outcome.REFUSED, reason=advice)
        return self._by_status(error.status_code, said, quota="insufficient_quota" in str(error.body))

    def _by_status(self, status: int, said: str, *, quota: bool) -> Reply:
        """The reply to an error, by HTTP's status or the one that a body of status 200 names; 0 for none."""
        outcome, retries = Outcome.REFUSED, 0
        match status:
            case 401 | 403 if self._key == NO_KEY:
                what = f" wants a key ({said}); set {self._variable} to yours"
            case 401 | 403:
                what = f" refuses the key ({said}); set {self._variable} to one that is valid there"
            case 404 | 405:
                what = f" has no model {self._model}, or no chat ({said}){self._hint}"
            case _ if quota:
                what = f": the account's quota is spent ({said})"
            case 429:
                outcome, retries = Outcome.RATE_LIMITED, self._retries
                what = f" limits the rate ({said}); lower --concurrency or raise --retries"
            case 400 | 413 | 422:
                what = f" refuses the request ({said})"
            case _:
                outcome, retries = Outcome.FAILED, self._retries if status else 0
                what = f" failed ({said})"
        return Reply(outcome, reason=self.where + what, retries=retries)


class _Careful(httpx2.Client):  # type: ignore[misc]
    """Reads no more of a body than its bound, of errors' too, and nothing that is packed."""

    def __init__(self, key: str, **options: Any) -> None:
        """key: for a server of the user's, which gets that and SENT_HEADERS alone; empty for OpenAI's own."""
        super().__init__(**options)
        self._only_key = key
        self.failures: dict[int, str | int] = {}
        """How the last request of a thread failed, if it did: why nothing could be reached, or the status."""

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        headers = dict(request.headers)
        if self._only_key:
            headers = {name: value for name, value in headers.items() if name in SENT_HEADERS}
            headers["authorization"] = f"Bearer {self._only_key}"
        headers["accept-encoding"] = "identity"
        sent = httpx2.Request(
            request.method, request.url, headers=headers, stream=request.stream, extensions=request.extensions
        )
        self.failures.pop(threading.get_ident(), None)
        try:
            response = super().send(sent, **{**options, "stream": True})
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            self.failures[threading.get_ident()] = str(error) or type(error).__name__
            raise
        if response.status_code >= 400:
            self.failures[threading.get_ident()] = response.status_code
        response.request = request  # openai's client reads there what it wanted
        assert isinstance(response.stream, httpx2.SyncByteStream)
        streams = "event-stream" in response.headers.get("content-type", "")
        most = MAX_STREAM_BYTES if streams else MAX_BODY_BYTES
        response.stream = _Bounded(response.stream, response.headers.get("content-encoding", "identity"), most)
        if not options.get("stream"):
            response.read()
        return response


class _Bounded(httpx2.SyncByteStream):  # type: ignore[misc]
    """A body as it comes, up to `most` bytes."""

    def __init__(self, body: httpx2.SyncByteStream, encoding: str, most: int) -> None:
        self._body, self._encoding, self._most = body, encoding, most

    def __iter__(self) -> Iterator[bytes]:
        if self._encoding.strip().lower() != "identity":
            raise NotAnAnswer(f"packed as {self._encoding}, which nobody asked for")
        size = 0
        for chunk in self._body:
            size += len(chunk)
            if size > self._most:
                raise NotAnAnswer(f"more than {self._most >> 20} MiB")
            yield chunk

    def close(self) -> None:
        self._body.close()


MODEL = OpenAiModel
