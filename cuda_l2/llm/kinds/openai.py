"""A model behind any OpenAI-compatible endpoint: openai:NAME@URL, or openai:NAME for OpenAI's own.

Retries with backoff are the client's; the bound on an answer's size and the deadline are kept here, because a server
may keep neither.
"""

import json
import math
import queue
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import openai

from cuda_l2.llm._base import Model, Outcome, Reply, Request, one_line, without_system
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.system import paths
from cuda_l2.system.errors import UserError

MAX_BODY_BYTES = 4 << 20
"""A server that sends more is not read any further."""
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


@dataclass(frozen=True, slots=True)
class _Form:
    """How a server wants to be asked, as far as it has said."""

    length_name: str = "max_tokens"
    temperature: bool = True
    system: bool = True


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
        self._form = _Form()
        self._hint = "" if address.rstrip("/").endswith("/v1") else "; addresses usually end in /v1"

    def ask(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None], deadline: float = math.inf
    ) -> None:
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[int, Reply | BaseException]] = queue.SimpleQueue()
        for i in range(len(requests)):
            todo.put(i)
        client = openai.OpenAI(
            base_url=self.where,
            api_key=self._key,
            max_retries=self._retries,
            timeout=httpx2.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            http_client=(http := _Careful("" if self._own_address else self._key, follow_redirects=False)),
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
        reason = f"cannot reach {self.where} ({cause}); is the server running, is the address right?"
        return Reply(Outcome.UNREACHABLE, reason=reason)

    def _one(self, client: openai.OpenAI, request: Request, deadline: float) -> Reply:
        start = time.perf_counter()
        while True:
            form = self._form
            reply = self._try(client, request, form, deadline)
            if isinstance(reply, openai.BadRequestError) and self._adapt(str(reply), form):
                continue
            if isinstance(reply, openai.BadRequestError):
                reply = self._failure(reply)
            return replace(reply, seconds=time.perf_counter() - start)

    def _try(
        self, client: openai.OpenAI, request: Request, form: "_Form", deadline: float
    ) -> "Reply | openai.BadRequestError":
        options: dict[str, Any] = {form.length_name: request.answer_tokens}
        if form.temperature:
            options["temperature"] = request.temperature
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
            return replace(_reply(bytes(body)), retries=retries)
        except openai.BadRequestError as error:
            return error
        except openai.OpenAIError as error:
            return self._failure(error)
        except httpx2.HTTPError as error:
            reason = one_line(f"{self.where} broke off: {error or type(error).__name__}")
            return Reply(Outcome.FAILED, reason=reason, billed=begun)
        except _NotAnAnswer as error:
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
        status, said = error.status_code, one_line(self.without_secrets(str(error.message)), 200)
        match status:
            case _ if 300 <= status < 400:
                there = one_line(self.without_secrets(error.response.headers.get("location", "elsewhere")), 120)
                advice = f"{self.where} sends questions on to {there}; name that address if prompts may go there"
                return Reply(Outcome.REFUSED, reason=advice)
            case 401 | 403:
                advice = f"{self.where} refuses the key ({said}); set {self._variable} to one that is valid there"
                if self._key == NO_KEY:
                    advice = f"{self.where} wants a key ({said}); set {self._variable} to yours"
                return Reply(Outcome.REFUSED, reason=advice)
            case 404 | 405:
                advice = f"{self.where} has no model {self._model}, or no chat ({said}){self._hint}"
                return Reply(Outcome.REFUSED, reason=advice)
            case 429 if "insufficient_quota" in str(error.body):
                return Reply(Outcome.REFUSED, reason=f"{self.where}: the account's quota is spent ({said})")
            case 429:
                advice = f"{self.where} limits the rate ({said}); lower --concurrency or raise --retries"
                return Reply(Outcome.RATE_LIMITED, reason=advice, retries=self._retries)
            case 400 | 413 | 422:
                return Reply(Outcome.REFUSED, reason=f"{self.where} refuses the request ({said})")
        return Reply(Outcome.FAILED, reason=f"{self.where} failed ({said})", retries=self._retries)


class _NotAnAnswer(Exception):
    """The body of a response is not what the interface says."""


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
        response.stream = _Bounded(response.stream, response.headers.get("content-encoding", "identity"))
        if not options.get("stream"):
            response.read()
        return response


class _Bounded(httpx2.SyncByteStream):  # type: ignore[misc]
    """A body as it comes, to MAX_BODY_BYTES."""

    def __init__(self, body: httpx2.SyncByteStream, encoding: str) -> None:
        self._body, self._encoding = body, encoding

    def __iter__(self) -> Iterator[bytes]:
        if self._encoding.strip().lower() != "identity":
            raise _NotAnAnswer(f"packed as {self._encoding}, which nobody asked for")
        size = 0
        for chunk in self._body:
            size += len(chunk)
            if size > MAX_BODY_BYTES:
                raise _NotAnAnswer(f"more than {MAX_BODY_BYTES >> 20} MiB")
            yield chunk

    def close(self) -> None:
        self._body.close()


def _reply(body: bytes) -> Reply:
    """The answer in the body of a response, read with as little faith as possible."""
    try:
        fields = json.loads(body)
        choice = fields["choices"][0]
        message = choice["message"]
        usage = fields.get("usage") or {}
        content = message.get("content")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise _NotAnAnswer(body.decode(errors="replace")) from None
    if isinstance(content, list):  # parts, as some servers send them
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return Reply(
        Outcome.ANSWERED,
        text=content if isinstance(content, str) else "",
        finish=str(choice.get("finish_reason") or ""),
        prompt_tokens=_count(usage, "prompt_tokens"),
        answer_tokens=_count(usage, "completion_tokens"),
    )


def _count(usage: Any, name: str) -> int:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and 0 <= value < 1 << 40 else 0


MODEL = OpenAiModel
