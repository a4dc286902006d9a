"""The data pipeline of section 3.2.1: collect code, cut it, drop duplicates and the held out, add words and context.

The dataset has two parts from the same snippets: `triplets`, a row a snippet, and `text`, a row a file or kernel.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cuda_l2.corpus import segment as segmenting
from cuda_l2.corpus.duplicates import Duplicates, digest
from cuda_l2.corpus.holdout import HoldOut
from cuda_l2.corpus.instruct import Instruction, by_model, fingerprint, for_task, from_code
from cuda_l2.corpus.segment import File
from cuda_l2.corpus.snippets import Snippet, clean, licence, snippets
from cuda_l2.families._base import families_for
from cuda_l2.llm.client import Client
from cuda_l2.machine._base import Target
from cuda_l2.propose._base import FamilySpace, draw
from cuda_l2.records import Task
from cuda_l2.retrieve.nearest import Nearest
from cuda_l2.retrieve.sources import Source, files
from cuda_l2.system.errors import UserError
from cuda_l2.system.text import fenced

Segment = Literal["rules", "hard", "all"]
"""rules: rules cut all files. hard: a model cuts what rules cut badly. all: a model cuts all files."""
RENDERED = "rendered"
LICENCES = {
    "cuda": "proprietary, NVIDIA",
    "cccl": "Apache-2.0 WITH LLVM-exception",
    "cutlass": "BSD-3-Clause",
    "aten": "BSD-3-Clause",
    "user": "not stated",
}
"""Licences of packages whose files name none."""
OWN_LICENCE = "Apache-2.0"
CONTEXT_PIECES = 4
CHARS_A_TOKEN = 3
"""The count of language models here without a tokenizer: rather too few characters."""
TEXT_CHARS = 24_000
"""A longer file gives several rows of text."""
DRAWS = 20
"""Largest number of draws for one new rendered kernel."""


@dataclass
class Counts:
    """Numbers of files, and of snippets by outcome."""

    files: int = 0
    found: int = 0
    same: int = 0
    near: int = 0
    held_out: int = 0
    unworthy: int = 0  # a model found them useless


@dataclass
class Corpus:
    """Both parts as rows of a dataset. segmented: a record of each window that a model was asked to cut."""

    triplets: list[dict[str, Any]]
    text: list[dict[str, Any]]
    counts: Counts
    segmented: list[dict[str, Any]] | None = None

    def by(self, column: str) -> collections.Counter[str]:
        """Numbers of triplets by a column's value up to the first colon."""
        return collections.Counter(row[column].partition(":")[0] for row in self.triplets)


@dataclass(frozen=True)
class Rendered:
    """Kernels of our families to render: `count` different ones a task, schedules drawn at random."""

    count: int
    tasks: Sequence[Task]
    target: Target
    seed: int = 0


@dataclass(frozen=True)
class _Item:
    snippet: Snippet
    source: str  # "package: path in it", "user: path in the folder", "cuda-l2: family"
    license: str
    instruction: Instruction | None = None  # where it is known already
    schedule: str = ""  # of a rendered kernel: NAME=VALUE ...

    def row(self, context: str) -> dict[str, Any]:
        """The triplet with its origin. context: excerpts of other snippets that the instruction finds; may be empty."""
        assert self.instruction
        return {
            "instruction": self.instruction.text,
            "context": context,
            "code": self.snippet.code,
            "source": self.source,
            "license": self.license,
            "kind": self.snippet.kind,  # kernel, template, function, type, macro, or RENDERED
            "sha": fingerprint(self.snippet.code),  # a rendered kernel's is its candidate's id
            "name": self.snippet.name,
            "line": self.snippet.line,  # in the cleaned file
            "worded_by": self.instruction.by,
            "schedule": self.schedule,
            "cut_by": self.snippet.cut_by,
        }


def build(
    sources: Sequence[Source],
    hold_out: HoldOut = HoldOut(),
    *,
    client: Client | None = None,
    segment: Segment = "rules",
    prompts: Path | None = None,
    context_tokens: int = 1000,
    rendered: Rendered | None = None,
    on_stage: Callable[[str, int, int], None] = lambda stage, done, of: None,
) -> Corpus:
    """The corpus of the sources, and of kernels rendered from our families' schedules.

    client: the model that words instructions; without one, or after its budget, comments and signatures give them.
    segment: which files the model cuts. prompts: folder of the user's templates. on_stage: called with the stage, the
    number of items done and their total.
    """
    counts = Counts()
    collected = _collected(sources, hold_out, counts, on_stage)
    segmented = None
    if client is not None and segment != "rules":
        pieces, segmented = segmenting.by_model(
            client,
            collected,
            hard_only=segment == "hard",
            prompts=prompts,
            on_answer=lambda done, of: on_stage("asking where to cut", done, of),
        )
        collected = [replace(file, pieces=own) for file, own in zip(collected, pieces, strict=True)]
    items = [*_kept(collected, hold_out, counts)]
    if rendered:
        items += _rendered(rendered, hold_out, counts)
    if not items:
        raise UserError(
            "there is nothing to make a corpus of: no known headers are installed, and no --folder has code"
        )
    items = _worded(items, client, prompts, counts, on_stage)
    contexts = _contexts(items, context_tokens, on_stage)
    rows = [item.row(context) for item, context in zip(items, contexts, strict=True)]
    return Corpus(rows, _texts(items), counts, segmented)


def _collected(
    sources: Sequence[Source], hold_out: HoldOut, counts: Counts, on_stage: Callable[[str, int, int], None]
) -> list[File]:
    """The files that hold nothing held out, cleaned, cut by rules; one of those alike but for comments and layout."""
    found = [file for source in sources for file in files(source)]
    read = []
    met: set[str] = set()
    for number, file in enumerate(found, 1):
        on_stage("reading", number, len(found))
        try:
            raw = file.path.read_text(errors="replace")
        except OSError:
            continue
        counts.files += 1
        text = clean(raw)
        pieces = snippets(text)
        same = digest(text)
        if hold_out.text(raw):  # a held-out kernel's parts go with it
            counts.found += len(pieces)
            counts.held_out += len(pieces)
        elif same in met:
            counts.found += len(pieces)
            counts.same += len(pieces)
        else:
            met.add(same)
            read.append(File(file.name, text, pieces, licence(raw, LICENCES[file.source])))
    return read


def _kept(collected: Sequence[File], hold_out: HoldOut, counts: Counts) -> Iterator[_Item]:
    duplicates = Duplicates()
    for file in collected:
        counts.found += len(file.pieces)
        for snippet in file.pieces:
            if hold_out.text(snippet.code):
                counts.held_out += 1
                continue
            met = duplicates.met(snippet.code)
            counts.same += met == "same"
            counts.near += met == "near"
            if not met:
                yield _Item(snippet, file.name, file.license)


def _rendered(wanted: Rendered, hold_out: HoldOut, counts: Counts) -> Iterator[_Item]:
    """Rendered kernels. They differ in few tokens, which matter, so only equal ones are duplicates."""
    duplicates, rng = Duplicates(), np.random.default_rng(wanted.seed)
    for task in wanted.tasks:
        if hold_out.task(task):
            counts.held_out += wanted.count
            continue
        spaces = [FamilySpace(family, task, wanted.target) for family in families_for(task, wanted.target)]
        for i in range(wanted.count if spaces else 0):
            item = _one(spaces[i % len(spaces)], hold_out, counts, duplicates, rng)
            if item is not None:
                yield item


def _one(
    space: FamilySpace, hold_out: HoldOut, counts: Counts, duplicates: Duplicates, rng: np.random.Generator
) -> _Item | None:
    """A new kernel; None where DRAWS draws gave none."""
    family, task = space.family, space.task
    for _ in range(DRAWS):
        candidate = space.render(draw(space, rng), "random")
        counts.found += 1
        if hold_out.candidate(candidate):
            counts.held_out += 1
        elif duplicates.met(f"{task}\n{candidate.source}", nearly=False):
            counts.same += 1
        else:
            schedule = " ".join(f"{name}={value}" for name, value in candidate.schedule)
            snippet = Snippet(RENDERED, family.name, "", "", candidate.source, 1)
            instruction = for_task(task, space.target)
            return _Item(snippet, f"cuda-l2: {family.name}", OWN_LICENCE, instruction, schedule)
    return None


def _worded(
    items: list[_Item],
    client: Client | None,
    prompts: Path | None,
    counts: Counts,
    on_stage: Callable[[str, int, int], None],
) -> list[_Item]:
    """The items with their instructions, without those that the model finds useless."""
    answers: dict[int, Instruction | None] = {}
    if client is not None:
        asked = [i for i, item in enumerate(items) if item.instruction is None]
        pairs = [(items[i].source, items[i].snippet) for i in asked]
        said = by_model(client, pairs, lambda done: on_stage("asking for instructions", done, len(asked)), prompts)
        answers = {asked[i]: instruction for i, instruction in said.items()}
    worded = [
        replace(item, instruction=item.instruction or answers.get(i, from_code(item.snippet)))
        for i, item in enumerate(items)
    ]
    kept = [item for item in worded if item.instruction]
    counts.unworthy += len(worded) - len(kept)
    return kept


def _contexts(items: Sequence[_Item], tokens: int, on_stage: Callable[[str, int, int], None]) -> list[str]:
    """For each instruction the nearest other snippets, quoted as prompts quote headers."""
    if not tokens:
        return [""] * len(items)
    places = [i for i, item in enumerate(items) if item.snippet.kind != RENDERED]
    try:
        index = Nearest([items[i].snippet.code for i in places])
    except UserError as error:
        raise UserError(f"{error}; or no context with --context-tokens 0") from None
    contexts = []
    for i, item in enumerate(items):
        assert item.instruction
        if i % 100 == 0:
            on_stage("retrieving context", i, len(items))
        nearest = [places[place] for place in index.search(item.instruction.text, 2 * CONTEXT_PIECES)]
        found = [items[place] for place in nearest if place != i]
        contexts.append(_excerpts(item, found, tokens))
    return contexts


def _excerpts(own: _Item, found: Sequence[_Item], tokens: int) -> str:
    """Excerpts within a number of tokens, without any that holds the answer."""
    chosen: list[str] = []
    left = tokens * CHARS_A_TOKEN
    for item in found:
        code = item.snippet.code
        excerpt = f"{item.source}, line {item.snippet.line}:\n{fenced(code, 'cpp', len(code))}"
        holds = own.snippet.code.strip() in code
        if len(excerpt) <= left and not holds and len(chosen) < CONTEXT_PIECES:
            chosen.append(excerpt)
            left -= len(excerpt)
    return "\n\n".join(chosen)


def _texts(items: Sequence[_Item]) -> list[dict[str, Any]]:
    """The kept snippets of a file as one text, several for a large file; in its order, each line once."""
    rows: list[dict[str, Any]] = []
    shown: set[int] = set()  # lines of the file at hand that a text has already: a model's pieces share some
    for item in items:
        last = rows[-1] if rows else None
        whole = item.snippet.kind == RENDERED
        if not last or last["source"] != item.source:
            shown = set()
        code = _unseen(item.snippet, shown)
        if not whole and last and last["source"] == item.source and len(last["text"]) + len(code) < TEXT_CHARS:
            last["text"] += f"\n{code}"
        else:
            kind = item.snippet.kind if whole else "file"
            rows.append({"text": code, "source": item.source, "license": item.license, "kind": kind})
    for row in rows:
        row["sha"] = fingerprint(row["text"])
    return rows


def _unseen(snippet: Snippet, shown: set[int]) -> str:
    """The snippet's code without the lines that were shown before; they count as shown from here on."""
    if not snippet.lines:
        return snippet.code
    lines = zip(snippet.lines, snippet.code.split("\n"), strict=False)
    code = "\n".join(line for number, line in lines if number not in shown)
    shown.update(number for number in snippet.lines if number)
    return code.strip("\n") + "\n"
