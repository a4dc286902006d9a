"""Prompts: templates that a user may change, and how their places are filled within a limit of tokens.

A template is Markdown with places in braces. A section, from one heading of two hashes to the next, is left out where
all of its places are empty. Text of others (sources, compilers' messages, headers) is fenced and cut to a length.
"""

import collections
import hashlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from cuda_l2.llm._base import Message, Messages
from cuda_l2.machine._base import Target
from cuda_l2.machine.cpu.target import PEAK_IN_QUIET
from cuda_l2.records import BuildStatus, Task, Trial
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import read_text
from cuda_l2.system.text import fenced


def read_template(packaged: Path, folder: Path | None) -> str:
    """The user's template of the same name where the folder has one, else the packaged one.

    UserError where the folder is not there or the file cannot be read.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(f"there is no folder {folder}; `cuda-l2 prompts {folder}` makes one with the templates")
    own = folder / packaged.name if folder else packaged
    return read_text(own if own.exists() else packaged)


PACKAGED = Path(__file__).with_name("prompts")
IRRELEVANT = ("sandbox", "system", "python", PEAK_IN_QUIET)
"""Facts of a machine that no kernel depends on."""
WIDE = 0.05
"""Half the width of a speedup's interval, relative to the speedup, from which on a prompt gives the interval."""
DESIGN_CHARS = 240
"""Characters of a model's words on its design that later prompts repeat."""
_PLACE = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True)
class Parts:
    """Texts for the places of ask.md."""

    contract: str
    machine: str
    task: str
    standing: str = ""
    profile: str = ""
    exemplars: Sequence[str] = field(default_factory=tuple)  # the most telling first
    failures: Sequence[str] = field(default_factory=tuple)
    references: Sequence[str] = field(default_factory=tuple)
    history: Sequence[str] = field(default_factory=tuple)  # what became of the latest answers, all in one text


PLACES = {
    "system.md": frozenset[str](),
    "ask.md": frozenset(item.name for item in fields(Parts)),
    "repair.md": frozenset({"feedback"}),
    "check.md": frozenset({"task", "machine", "figures", "cheats", "code"}),
}


class Templates:
    """The templates, from the package or the user's folder. UserError where they cannot be used."""

    def __init__(self, folder: Path | None = None) -> None:
        self._texts = {name: _read(name, folder) for name in PLACES}

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the templates that begin a conversation."""
        texts = self._texts["system.md"] + "\0" + self._texts["ask.md"]
        return hashlib.sha256(texts.encode()).hexdigest()[:16]

    def ask(
        self,
        parts: Parts,
        limit_tokens: int,
        count_tokens: Callable[[str], int],
        left_out: "collections.Counter[str] | None" = None,
    ) -> Messages:
        """The beginning of a conversation within about `limit_tokens`; less important parts are left out first.

        left_out: counts them, by the names of their places.
        """
        chosen: dict[str, list[str]] = {"exemplars": [], "failures": [], "history": [], "references": []}

        def render() -> Messages:
            texts = {item.name: getattr(parts, item.name) for item in fields(Parts)}
            texts |= {name: "\n\n".join(found) for name, found in chosen.items()}
            question = _filled(self._texts["ask.md"], texts)
            return Message("system", self._texts["system.md"]), Message("user", question)

        used = sum(count_tokens(message.text) for message in render())
        if used > limit_tokens:
            raise UserError(
                f"task, machine and contract alone take {used} tokens of prompt, more than {limit_tokens}; raise"
                " --prompt-tokens, or take a model with a larger window"
            )
        # the best exemplar and what became of others before a second exemplar, references last
        wanted = [("exemplars", text) for text in parts.exemplars[:1]]
        wanted += [("failures", text) for text in parts.failures] + [("history", text) for text in parts.history]
        wanted += [("exemplars", text) for text in parts.exemplars[1:]]
        wanted += [("references", text) for text in parts.references]
        for name, text in wanted:
            if f"{{{name}}}" not in self._texts["ask.md"]:
                continue
            tokens = count_tokens(text)
            if used + tokens <= limit_tokens:
                chosen[name].append(text)
                used += tokens
            elif left_out is not None:
                left_out[name] += 1
        return render()

    def sizes(self, parts: Parts, count_tokens: Callable[[str], int]) -> dict[str, tuple[int, int]]:
        """Characters and tokens of each part of a conversation's beginning, by its place."""
        own = self._texts["system.md"] + _PLACE.sub("", self._texts["ask.md"])
        texts = {"the templates' own words": [own]}
        for item in fields(Parts):
            part = getattr(parts, item.name)
            if f"{{{item.name}}}" in self._texts["ask.md"]:
                texts[item.name] = [part] if isinstance(part, str) else [*part]
        return {
            name: (sum(map(len, found)), sum(map(count_tokens, filter(None, found)))) for name, found in texts.items()
        }

    def repair(
        self, conversation: Messages, answer: str, feedback: str, limit_tokens: int, count_tokens: Callable[[str], int]
    ) -> Messages:
        """The conversation with the model's answer and its outcome, within about `limit_tokens`.

        The oldest repairs are left out first; empty where even without them it is too long. An empty answer is no
        turn, which servers refuse: its feedback goes to the question before.
        """
        question = _filled(self._texts["repair.md"], {"feedback": feedback})
        if answer.strip():
            conversation = (*conversation, Message("assistant", answer), Message("user", question))
        else:
            *before, last = conversation
            conversation = (*before, Message(last.role, f"{last.text}\n\n{question}"))
        first = next(i for i, message in enumerate(conversation) if message.role == "user") + 1
        beginning, turns = conversation[:first], conversation[first:]
        for start in range(0, max(1, len(turns)), 2):
            messages = (*beginning, *turns[start:])
            if sum(count_tokens(message.text) for message in messages) <= limit_tokens:
                return messages
        return ()

    def check(self, **texts: str) -> Messages:
        """The question to a checker about a kernel. texts: one for every place of check.md."""
        return (Message("user", _filled(self._texts["check.md"], texts)),)


def copy_templates(folder: Path, others: Sequence[Path] = ()) -> list[Path]:
    """Write the packaged templates for a user to change; UserError where one of them is there already.

    others: templates of other rooms, copied beside them.
    """
    sources = {folder / path.name: path for path in (*(PACKAGED / name for name in PLACES), *others)}
    paths = [*sources]
    there = next((path for path in paths if path.exists()), None)
    if there:
        raise UserError(f"{there} exists already; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            shutil.copyfile(sources[path], path)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; choose another place") from None
    return paths


def describe_machine(target: Target, task: Task) -> str:
    """Target facts and the roofline bound of the task."""
    unit, _ = target.unit
    peak, gbytes = target.ceilings(task.dtype)
    doubt, cached = target.ceilings_doubt(task.dtype), target.cache_may_beat_bound(task)
    lines = [f"- {name}: {value}" for name, value in target.facts().items() if name not in IRRELEVANT]
    lines.append(
        f"- roofline bound of this task: {target.bound_us(task):.2f} us, from the measured peak of {peak:.0f} {unit}"
        f" and {gbytes:.0f} GB/s of memory{f' ({doubt})' if doubt else ''}"
        f"{'; a cache holds its tensors, so runs back to back may take less' if cached else ''}"
    )
    lines.append(f"- how kernels are timed: {target.timed_as}")
    return "\n".join(lines)


def describe_standing(best: Trial | None, target: Target) -> str:
    """How fast the best kernel is, against libraries and the roofline bound."""
    timing = best.timing if best else None
    if best is None or timing is None or timing.candidate is None:
        return "No correct kernel is known yet: correctness first, then speed."
    latency = timing.candidate.latency_us.estimate
    baselines = ", ".join(f"{arm.name} {arm.latency_us.estimate:.2f} us" for arm in timing.baselines)
    reached = target.bound_us(best.task) / latency
    said = "" if reached > 1 or target.cache_may_beat_bound(best.task) else f"; {reached:.0%} of the roofline bound"
    return f"The best kernel so far takes {latency:.2f} us, {_speed_words(best)}{said}. Libraries: {baselines}."


def describe_exemplar(trial: Trial) -> str:
    """A scored kernel with its code."""
    assert trial.timing is not None and trial.timing.candidate is not None
    latency = trial.timing.candidate.latency_us.estimate
    head = f"Score {trial.reward:.3f}: {latency:.2f} us, {_speed_words(trial)}."
    return f"{head}\n\n{fenced(trial.candidate.source, _language(trial), len(trial.candidate.source))}"


def describe_answers(history: Sequence[Trial], designs: Mapping[str, str], count: int) -> list[str]:
    """What became of a model's latest answers, a line each in one text, the latest last. designs: by candidate."""
    latest, lines = dict[str, Trial](), list[str]()
    for trial in history:
        if trial.candidate.id in designs:
            latest.pop(trial.candidate.id, None)  # a kernel stands where it was judged last
            latest[trial.candidate.id] = trial
    for name, trial in [*latest.items()][-count:]:
        timing = trial.timing
        timed = timing.candidate if timing and trial.speedup else None
        what = f"score {trial.reward:.3f}, {timed.latency_us.estimate:.2f} us" if timed else trial.status
        design = " ".join(designs[name].replace("`", "'").split())
        lines.append(f"{what}: {design[:DESIGN_CHARS]}{'...' if len(design) > DESIGN_CHARS else ''}")
    text = "\n".join(lines)
    return [fenced(text, limit_chars=len(text))] if lines else []


def _speed_words(trial: Trial) -> str:
    """The speedup, with its 95 % interval where that is wide: a score alone would look sure."""
    assert trial.timing is not None and trial.timing.speedup is not None
    found = trial.timing.speedup
    wide = f" (95 %: {found.low:.2f} to {found.high:.2f})" if found.relative_halfwidth > WIDE else ""
    return f"{trial.speedup:.3f} times as fast as the strongest library{wide}"


def feedback(trial: Trial) -> str:
    """The outcome of a failing kernel for the model that wrote it: stage, reason, element, compiler's message."""
    build, verdict = trial.build, trial.verdict
    lines = [f"Status: {trial.status}"]
    if verdict and verdict.check:
        lines.append(f"Check that failed: {verdict.check}; passed before: {', '.join(verdict.passed) or 'none'}")
    said = trial.reason
    if verdict and verdict.element and str(verdict.element) not in said:
        said += f"\n{verdict.element}"
    if build.status is BuildStatus.FAILED and build.log:
        said += f"\n\n{build.log}"
    return "\n".join(lines) + "\n\n" + fenced(said)


def describe_failure(trial: Trial) -> str:
    """A failure in few words, for models that did not write the kernel."""
    return f"- {trial.status}:\n{fenced(trial.reason, limit_chars=400)}"


def _language(trial: Trial) -> str:
    return "c" if trial.machine.startswith("cpu") else "cuda"


def _read(name: str, folder: Path | None) -> str:
    text = read_template(PACKAGED / name, folder)
    unknown = set(_PLACE.findall(text)) - PLACES[name]
    if unknown:
        path = (folder or PACKAGED) / name
        known = ", ".join(f"{{{place}}}" for place in sorted(PLACES[name])) or "no places"
        raise UserError(f"{path} has a place {{{min(unknown)}}} that nothing fills; {name} may use {known}")
    return text.strip()


def _filled(template: str, texts: Mapping[str, str]) -> str:
    sections = []
    for section in re.split(r"^(?=## )", template, flags=re.MULTILINE):
        places = _PLACE.findall(section)
        if places and not any(texts[place] for place in places):
            continue
        # one pass: a filled text's own braces are left alone
        sections.append(_PLACE.sub(lambda match: texts[match.group(1)], section).strip())
    return "\n\n".join(section for section in sections if section)
