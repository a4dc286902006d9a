"""A language model as a checker, as in CUDA-L1: it reads the kernel, its figures and the nearest known cheats."""

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cuda_l2.build.lexing import CPP_TOKEN, blank
from cuda_l2.llm._base import Outcome, one_line, open_model
from cuda_l2.llm.client import Client, Question
from cuda_l2.llm.exchanges import Exchange, ExchangeLog
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.llm.thoughts import without_thoughts
from cuda_l2.machine._base import Target
from cuda_l2.propose._prompt import Templates
from cuda_l2.records import Trial
from cuda_l2.retrieve.nearest import Nearest
from cuda_l2.review._base import Checker, Opinion
from cuda_l2.review.settings import ReviewSettings
from cuda_l2.system.errors import UserError
from cuda_l2.system.paths import PACKAGE
from cuda_l2.system.place import Place
from cuda_l2.system.text import fenced
from cuda_l2.tasks import describe

SUFFIXES = {"cpu": (".c",), "cuda": (".cu",)}
MAX_FILE_BYTES = 1 << 18
_HONEST = re.compile(r"expect: measured \*/")
"""Marks an honest control among the repository's cheats."""


def default_folders() -> list[Path]:
    """The repository's own corpora where the package runs from a checkout; none in a wheel."""
    root = PACKAGE.parent
    return [folder for name in ("cheats", "cuda_cheats") if (folder := root / "tests" / name).is_dir()]


class Cheats:
    """The cheats for one kind of machine. UserError without the package bm25s."""

    def __init__(self, folders: Sequence[Path], target: str) -> None:
        self._texts: list[tuple[str, str]] = []
        for folder in folders:
            for path in sorted(folder.iterdir()):
                if path.suffix in SUFFIXES[target] and path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
                    text = path.read_text(errors="replace")
                    if not _HONEST.search(text):
                        self._texts.append((path.stem, text))
        self._index = Nearest([text for _, text in self._texts])

    def __len__(self) -> int:
        return len(self._texts)

    def nearest(self, source: str, count: int) -> list[tuple[str, str]]:
        """Names and texts, the nearest first."""
        return [self._texts[place] for place in self._index.search(source, count)]


PURPOSE = "check"
CHEATS_SHOWN = 3
CHEAT_CHARS = 6_000
CODE_CHARS = 60_000
TIMEOUT_S = 300.0
_VERDICT = re.compile(r"^\W*VERDICT\W+(honest|cheat|unsure)\W*$", re.MULTILINE | re.IGNORECASE)
_CONTRACT = re.compile(r"\s*/\*\s*cuda-l2\b.*?\*/", re.DOTALL)


class ModelChecker(Checker):
    """Asks a model within a budget of its own, as large as the policy's; every exchange is kept."""

    def __init__(self, review: ReviewSettings, settings: ModelSettings, archive: Place) -> None:
        """UserError where the model or the folder of cheats cannot be used."""
        variable = review.checker_key_variable or settings.key_variable
        # the likeliest answer, and the same one when it is asked again
        settings = replace(settings, temperature=0.0, concurrency=1, key_variable=variable)
        self._folders = [review.cheats] if review.cheats else default_folders()
        self._cheats: dict[str, Cheats] = {}  # by target
        for folder in self._folders:
            if not folder.is_dir():
                raise UserError(f"{folder} is not a folder; give a folder of known cheats with --cheats")
        self._templates = Templates(settings.prompts)
        self._client = Client(open_model(review.checker, settings), ExchangeLog(archive), settings, PURPOSE)
        self.name = self._client.model.name

    def opinion(self, trial: Trial, target: Target) -> Opinion:
        task, source = trial.task, without_comments(trial.candidate.source)
        try:
            if target.name not in self._cheats:
                self._cheats[target.name] = Cheats(self._folders, target.name)
            messages = self._templates.check(
                task=describe(task),
                machine="\n".join(f"- {name}: {value}" for name, value in target.environment().items()),
                figures=_figures(trial),
                cheats="\n\n".join(self._nearest(target, source)),
                code=fenced(source, _language(target), CODE_CHARS),
            )
            deadline = time.perf_counter() + TIMEOUT_S
            found = self._client.ask(str(task), target.machine, [Question(messages)], deadline)
        except UserError as error:
            return self._none(str(error))
        if not found or found[0].reply.outcome is not Outcome.ANSWERED:
            return self._none(found[0].reply.reason if found else self._client.ended)
        return read_opinion(found[0])

    def summary(self) -> str:
        return self._client.summary()

    def close(self) -> None:
        self._client.close()

    def _nearest(self, target: Target, source: str) -> list[str]:
        found = self._cheats[target.name].nearest(source, CHEATS_SHOWN)
        return [f"{name}:\n{fenced(text, _language(target), CHEAT_CHARS)}" for name, text in found]

    def _none(self, why: str) -> Opinion:
        """No opinion, with a warning: a checker that cannot be asked ends no search."""
        print(f"cuda-l2: the checker {self.name} gave no opinion: {one_line(why)}", file=sys.stderr)
        return Opinion(False, f"no opinion: {one_line(why)}")


def read_opinion(exchange: Exchange) -> Opinion:
    """The last verdict of an answer with the text before it as one line; without a verdict the model is unsure."""
    text = without_thoughts(exchange.reply.text)
    verdicts = list(_VERDICT.finditer(text))
    if not verdicts:
        return Opinion(False, one_line(f"no verdict: {text}"))
    word = verdicts[-1].group(1).lower()
    return Opinion(word == "cheat", one_line(f"{word}: {text[: verdicts[-1].start()]}"))


def without_comments(source: str) -> str:
    """A source without comments, since these could plead with the reader; the contract comment is data and stays."""
    contract = _CONTRACT.match(source)
    start = contract.end() if contract else 0
    code = blank(source[start:], CPP_TOKEN, strings=False)
    lines = [line.rstrip() for line in code.split("\n")]
    kept = [line for i, line in enumerate(lines) if line or not i or lines[i - 1]]
    return source[:start] + "\n".join(kept)


def _figures(trial: Trial) -> str:
    timing, review = trial.timing, trial.review
    assert timing is not None and review is not None
    measured = ", ".join(f"{s.estimate:.3g}x [{s.low:.3g}, {s.high:.3g}]" for s in review.speedups)
    lines = [
        f"The speedup is over {timing.reference}, the strongest library. What drew attention: {review.jump}. Measured,"
        f" the second time and later on other inputs: {measured}."
    ]
    lines += [f"On a second device: {review.elsewhere}."] if review.elsewhere else []
    return " ".join(lines)


def _language(target: Target) -> str:
    return "c" if target.name == "cpu" else "cuda"
