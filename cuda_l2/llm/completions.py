"""Reads a server's answer: a chat completion as JSON or as an event stream, or the limit that a refusal names."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cuda_l2.llm._base import Outcome, Reply, one_line
from cuda_l2.llm.thoughts import without_thoughts

_STREAM = re.compile(rb"\s*(data|event|id|retry)?:")
_CONTRACT = re.compile(r"/\*\s*cuda-l2\b")
_CODE = re.compile(rf"```|~~~|{_CONTRACT.pattern}")
_WITHHELD = ("content_filter", "safety", "refusal")
"""Reasons to finish with which servers withhold an answer."""


_ERRORS = ("detail", "message", "msg", "errors")
"""Fields in which bodies without an answer name an error."""


class NotAnAnswer(Exception):
    """The body of a response is not what the interface says."""


class ErrorInBody(Exception):
    """A response with status 200 that holds an error.

    status: HTTP's code for the error where the body names one, else 0; begun: whether text of an answer came before.
    """

    def __init__(self, said: str, status: int, *, begun: bool) -> None:
        super().__init__(said)
        self.status, self.begun = status, begun


@dataclass
class _Parts:
    """An answer's fields so far, each joined over the events of a stream."""

    content: str = ""
    reasoning: str = ""
    refusal: str = ""
    finish: str = ""
    calls: dict[int, str] = field(default_factory=dict)  # arguments of tool calls, by index
    usage: Mapping[str, Any] = field(default_factory=dict)
    choices: int = 0

    def add(self, fields: Any) -> None:
        if not isinstance(fields, dict):
            raise NotAnAnswer(json.dumps(fields))
        choices = fields.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        self._require_no_error(fields, choice)
        if isinstance(fields.get("usage"), dict):
            self.usage = fields["usage"]
        if not isinstance(choice, dict):
            return
        self.choices += 1
        message = choice.get("delta") or choice.get("message") or {}
        if not isinstance(message, dict):
            raise NotAnAnswer(json.dumps(fields))
        self._add_content(message.get("content") or choice.get("text"))
        self.reasoning += _reasoning(message)
        self.refusal += _string(message.get("refusal"))
        calls = message.get("tool_calls")
        for i, call in enumerate(calls if isinstance(calls, list) else [{"function": message.get("function_call")}]):
            self._add_call(i, call)
        self.finish = _string(choice.get("finish_reason")) or self.finish

    def text(self) -> str:
        """What the model said: content and tool calls, and its reasoning where the code is found there alone.

        An answer that was cut off in its reasoning holds drafts alone.
        """
        said = "\n\n".join(part for part in (self.content, *map(_code, self.calls.values())) if part.strip())
        if self.finish == "length" and not without_thoughts(said).strip():
            return said
        if not said or (_CONTRACT.search(self.reasoning) and not _CODE.search(said)):
            said = f"{self.reasoning}\n\n{said}".strip()
        return said

    def _require_no_error(self, fields: dict[str, Any], choice: Any) -> None:
        error = fields.get("error") or (choice.get("error") if isinstance(choice, dict) else None)
        if not error and choice is None and not fields.get("usage"):
            error = next((fields[name] for name in _ERRORS if fields.get(name)), None)
        if not error:
            return
        about = error if isinstance(error, dict) else {}
        said = _string(about.get("message")) or (error if isinstance(error, str) else json.dumps(error))
        code = next((about[name] for name in ("code", "status") if about.get(name)), fields.get("code"))
        if isinstance(code, str) and not code.isdigit():
            said = f"{said} ({code})"
        status = int(str(code)) if re.fullmatch(r"\d{3}", str(code)) else 0
        raise ErrorInBody(said, status, begun=bool(self.content or self.reasoning or self.calls))

    def _add_content(self, content: Any) -> None:
        """A text, or parts of several types, as some servers send them."""
        for part in content if isinstance(content, list) else [content]:
            if not isinstance(part, dict):
                self.content += _string(part)
                continue
            kind = part.get("type")
            if kind in ("thinking", "reasoning"):
                inner = part.get(kind) or part.get("text")
                pieces = inner if isinstance(inner, list) else [inner]
                self.reasoning += "".join(_string(p.get("text") if isinstance(p, dict) else p) for p in pieces)
            else:
                self.content += _string(part.get("text"))
                self.refusal += _string(part.get("refusal"))

    def _add_call(self, position: int, call: Any) -> None:
        if not isinstance(call, dict):
            return
        about = call.get("function") or call.get("custom")
        given = about.get("arguments") or about.get("input") if isinstance(about, dict) else None
        if given:
            index = call.get("index", position)
            index = index if isinstance(index, int) else position
            self.calls[index] = self.calls.get(index, "") + (given if isinstance(given, str) else json.dumps(given))


def read(body: bytes) -> Reply:
    """The reply in a response's body; NotAnAnswer or ErrorInBody where it holds none."""
    parts = _Parts()
    try:
        for fields in _events(body) if _STREAM.match(body) else [json.loads(body)]:
            parts.add(fields)
    except (ValueError, RecursionError):
        raise NotAnAnswer(body.decode(errors="replace")) from None
    if not parts.choices:
        raise NotAnAnswer(body.decode(errors="replace"))
    text = parts.text()
    reason = ""
    if not text and parts.refusal:
        reason = f"the model declined to answer: {one_line(parts.refusal, 160)}"
    elif not text and parts.finish in _WITHHELD:
        reason = f"the server withheld the answer ({parts.finish})"
    return Reply(
        Outcome.DECLINED if reason else Outcome.ANSWERED,
        text=text,
        finish=parts.finish,
        prompt_tokens=_count(parts.usage, "prompt_tokens"),
        answer_tokens=_count(parts.usage, "completion_tokens"),
        reason=reason,
        billed=bool(reason),
    )


def _events(body: bytes) -> Iterator[Any]:
    """The objects of a stream of server-sent events, as the HTML standard defines them."""
    for event in re.split(r"\r\n\r\n|\n\n|\r\r", body.decode(errors="replace")):
        lines = [line.partition(":")[2] for line in event.splitlines() if line.startswith("data:")]
        data = "\n".join(line.removeprefix(" ") for line in lines).strip()
        if data and data != "[DONE]":
            yield json.loads(data)


def _reasoning(message: Mapping[str, Any]) -> str:
    """A message's reasoning under whichever name; its parts where no field holds it whole."""
    names = ("reasoning_content", "reasoning", "thinking")
    whole = next((text for name in names if (text := _string(message.get(name)))), "")
    details = message.get("reasoning_details")
    parts = [part for part in details if isinstance(part, dict)] if isinstance(details, list) else []
    return whole or "".join(_string(part.get("text") or part.get("summary")) for part in parts)


def _code(arguments: str) -> str:
    """The texts of several lines among a tool call's arguments, each in a fence; the arguments as they are if none."""
    try:
        found = list(_strings(json.loads(arguments, strict=False)))
    except (ValueError, RecursionError):  # cut off, or the plain input of a custom tool
        found = [arguments.replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")]
    files = [text for text in found if "\n" in text.strip()]
    return "\n\n".join(text if "```" in text else f"```\n{text}\n```" for text in files) or arguments


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and 0 <= value < 1 << 40 else 0


_N = r"(\d[\d,]*\d)"
_WINDOW = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"context limit: {_N} \+ {_N} > {_N}",
        rf"(?:context|sequence|model)[ _]?(?:length|window|size|limit|len)\b[^\d.,;]{{0,40}}{_N}",
        rf"{_N} (?:tokens )?(?:maximum context|maximum$|maximum\b(?! value))",
        rf"n_ctx\W{{1,4}}{_N}",
        rf"max_new_tokens`? must be <= {_N}",
        rf"maximum number of (?:input )?tokens allowed\W{{1,3}}{_N}",
    )
]
_ANSWER = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"at most {_N} (?:completion|output) tokens",
        rf"max(?:_completion|_output)?_tokens`?'? must be (?:less than or equal to|at most|<=) [`']?{_N}",
        rf"valid range of max_tokens is \[\d+, ?{_N}\]",
        rf"{_N}, which is the maximum allowed number of output tokens",
    )
]
_TOO_LONG = re.compile(
    r"(context|prompt|input|sequence|tokens?\b).{0,60}(exceed|too (long|large|many)|longer than|larger than)"
    r"|(exceed|too long|too large).{0,60}(context|window|tokens)",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a refusal names, in tokens; both None where it says that a question is too long without a number."""

    window: int | None = None  # prompt and answer together
    answer: int | None = None


def limits_in(refusal: str) -> Limits | None:
    """None where the refusal is about something else."""
    answer = _first(_ANSWER, refusal)
    window = None if answer else _first(_WINDOW, refusal)
    if answer or (window and (_TOO_LONG.search(refusal) or "context" in refusal.lower() or "<=" in refusal)):
        return Limits(window, answer)
    return Limits() if _TOO_LONG.search(refusal) else None


def _first(patterns: list[re.Pattern[str]], text: str) -> int | None:
    found = next((match for pattern in patterns if (match := pattern.search(text))), None)
    return int(found.groups()[-1].replace(",", "")) if found else None
