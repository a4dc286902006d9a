"""What a model of the miniature writes: how much builds, is correct, is new, and how fast it is."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch
from teacher import Asking, Teacher, question

from cuda_l2.archive import Archive
from cuda_l2.corpus.duplicates import digest, tokens
from cuda_l2.evaluator import Evaluator
from cuda_l2.learn import models
from cuda_l2.learn.settings import Sampling
from cuda_l2.learn.writer import Writer
from cuda_l2.llm._base import one_line
from cuda_l2.measure.protocols import FINALS, SEARCH
from cuda_l2.propose._answer import parse_answer
from cuda_l2.records import BuildStatus, Candidate, Task, Trial
from cuda_l2.rigs import Rig
from cuda_l2.search import judge_group
from cuda_l2.tasks import parse

TIMINGS = 3


@dataclass(frozen=True)
class Answers:
    """Answers of one model to one shape's question. Shares are of all answers, those of novelty of the correct ones."""

    shape: str
    asked: int
    built: int
    correct: int
    speedups: list[float]  # of correct answers, under the search's protocol
    novel_text: int  # normalised text that no training text has
    novel_tree: int  # numbers left out as well
    held: int  # schedules of the best decile, which was held out
    best: str  # source of the fastest answer; empty where none is correct
    wrong: list[str] = field(default_factory=list)  # status and reason of each answer that is not correct


@dataclass(frozen=True)
class Exam:
    """How a model is asked, and how often each question."""

    asking: Asking
    answers: int
    answer_tokens: int
    seed: int


def histories(teacher: Teacher, machine: str, path: Path | None = None) -> dict[Task, Sequence[Trial]]:
    """Whose scored kernels questions show: the teacher's, or all of an archive's but those held out."""
    if path is None:
        return dict(teacher.trials)
    held = {candidate.id for candidate in teacher.held_out}
    with Archive(path) as archive:
        found = {task: archive.trials(task, machine, SEARCH.name) for task in teacher.trials}
    return {task: [trial for trial in trials if trial.candidate.id not in held] for task, trials in found.items()}


def examine(
    folder: Path,
    shown: Mapping[int, Mapping[Task, Sequence[Trial]]],
    exam: Exam,
    teacher: Teacher,
    rig: Rig,
    archive: Archive,
) -> dict[int, list[Answers]]:
    """Ask the model of the folder for tasks, once for each number of exemplars.

    shown: by that number, the tasks, and whose scored kernels their questions show. A task's evaluator is opened once,
    as libraries choose algorithms then.
    """
    pupil = models.load(str(folder), "float32")
    sampling = Sampling(
        temperature=1.0,
        prompt_tokens=1,
        answer_tokens=exam.answer_tokens,
        exemplars=0,
        at_once=exam.answers * max(map(len, shown.values())),
    )
    writer = Writer(pupil.model.to(models.device()).eval(), pupil.tokenizer, sampling)
    texts: dict[int, dict[Task, list[str]]] = {}
    for exemplars, tasks in shown.items():
        torch.manual_seed(exam.seed)
        asked = [
            question(task, history, rig, exam.asking, exemplars, exam.seed + number)
            for task, history in tasks.items()
            for number in range(exam.answers)
        ]
        written = iter(writer.write([writer.prompt_ids(text) for text in asked]))
        texts[exemplars] = {
            task: [writer.text(ids) for ids in itertools.islice(written, exam.answers)] for task in tasks
        }
    found: dict[int, list[Answers]] = {exemplars: [] for exemplars in shown}
    for task in dict.fromkeys(task for tasks in shown.values() for task in tasks):
        with Evaluator(task, rig) as evaluator:
            for exemplars in (number for number, tasks in shown.items() if task in tasks):
                found[exemplars].append(_judged(texts[exemplars][task], evaluator, archive, teacher))
    return found


def _judged(answers: Sequence[str], evaluator: Evaluator, archive: Archive, teacher: Teacher) -> Answers:
    known = [trial.candidate.source for trials in teacher.trials.values() for trial in trials]
    texts, trees = {digest(text) for text in known}, {tree(text) for text in known}
    held = {digest(candidate.source) for candidate in teacher.held_out}
    sources = [parse_answer(answer).source for answer in answers]
    judged = judge_group(evaluator, archive, [Candidate(source, "miniature") for source in sources if source])
    trials = [trial for trial, _ in judged]
    right = [trial for trial in trials if trial.speedup]
    best = max(right, key=lambda trial: trial.speedup, default=None)
    return Answers(
        str(evaluator.task),
        len(answers),
        sum(trial.build.status is BuildStatus.BUILT for trial in trials),
        len(right),
        [round(trial.speedup, 4) for trial in right],
        sum(digest(trial.candidate.source) not in texts for trial in right),
        sum(tree(trial.candidate.source) not in trees for trial in right),
        sum(digest(trial.candidate.source) in held for trial in right),
        best.candidate.source if best else "",
        [f"{trial.candidate.id} {trial.status}: {one_line(trial.reason, 300)}" for trial in trials if not trial.speedup]
        + [
            f"no code: {one_line(answer[-300:], 300)}"
            for answer, source in zip(answers, sources, strict=True)
            if not source
        ],
    )


def contest(shape: str, candidates: Sequence[Candidate], rig: Rig) -> dict[str, float]:
    """Speedups of kernels, each timed anew several times in turn: the medians, by candidates' ids.

    What was chosen by one timing is reported from others, and all are timed in the same minutes.
    """
    protocol = rig.protocols[FINALS.name]
    unique = {candidate.id: candidate for candidate in candidates}
    with Evaluator(parse(shape), rig) as evaluator:
        rounds = [[t.speedup for t in evaluator.evaluate(list(unique.values()), protocol)] for _ in range(TIMINGS)]
    return {key: round(median(times), 4) for key, times in zip(unique, zip(*rounds, strict=True), strict=True)}


def tree(source: str) -> str:
    """Digest of the normalised text without its numbers: equal where kernels differ in numbers at most."""
    return digest(" ".join("0" if token[0].isdigit() else token for token in tokens(source)))


def save(path: Path, found: Sequence[Answers]) -> None:
    path.write_text(json.dumps([asdict(answers) for answers in found], indent=1) + "\n")


def load(path: Path) -> list[Answers]:
    return [Answers(**fields) for fields in json.loads(path.read_text())]


def figures(
    found: Sequence[Answers], shapes: Sequence[str], timed: Mapping[str, Mapping[str, float]], training: Sequence[str]
) -> list[float]:
    """One line of the table, over some of the shapes, as numbers in COLUMNS' order; NaN where there is nothing.

    timed: the contest's speedups by shape and candidate. training: ids of the best training kernels.
    """
    chosen = [answers for answers in found if answers.shape in shapes]
    asked = sum(answers.asked for answers in chosen)
    built = sum(answers.built for answers in chosen)
    correct = sum(answers.correct for answers in chosen)
    speedups = [speedup for answers in chosen for speedup in answers.speedups]
    bests = [timed[answers.shape][Candidate(answers.best).id] if answers.best else 0.0 for answers in chosen]
    taught = [max(timed[answers.shape][key] for key in training) for answers in chosen]
    ratios = [best / other for best, other in zip(bests, taught, strict=True)]
    new = [sum(getattr(answers, part) for answers in chosen) for part in ("novel_text", "novel_tree", "held")]
    shares = [count / correct if correct else math.nan for count in new]
    usual = [fmean(speedups), median(speedups)] if speedups else [math.nan, math.nan]
    return [built / asked, correct / asked, *usual, fmean(bests), fmean(ratios), *shares]


def gain(before: Sequence[Answers], after: Sequence[Answers], shapes: Sequence[str]) -> tuple[float, float, float]:
    """Ratio of the medians of correct answers, geometric mean over shapes, and its 95 % interval by bootstrap.

    Shapes without a correct answer on either side are left out; NaN where none is left.
    """
    chosen = {answers.shape: answers.speedups for answers in before if answers.shape in shapes and answers.speedups}
    pairs = [(chosen[each.shape], each.speedups) for each in after if each.speedups and each.shape in chosen]
    if not pairs:
        return math.nan, math.nan, math.nan
    rng = np.random.default_rng(0)

    def drawn(values: Sequence[float]) -> float:
        return float(np.median(rng.choice(values, len(values))))

    ratios = [math.exp(fmean(math.log(drawn(new) / drawn(old)) for old, new in pairs)) for _ in range(1000)]
    estimate = math.exp(fmean(math.log(median(new) / median(old)) for old, new in pairs))
    return estimate, *np.percentile(ratios, (2.5, 97.5)).tolist()


COLUMNS = {
    "builds": "{:.0%}",
    "correct": "{:.0%}",
    "mean": "{:.3f}",
    "median": "{:.3f}",
    "best": "{:.3f}",
    "over training's": "{:.2f}",
    "new schedule": "{:.0%}",
    "new tree": "{:.0%}",
    "held-out decile": "{:.0%}",
}


def head() -> str:
    return f"| stage | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}"


def row(name: str, seeds: Sequence[Sequence[float]]) -> str:
    """A line of the table: figures of one seed, or of several the mean with the least and the greatest."""
    cells = [_cell(form, values) for form, values in zip(COLUMNS.values(), zip(*seeds, strict=True), strict=True)]
    return f"| {' | '.join([name, *cells])} |"


def _cell(form: str, values: Sequence[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    text = form.format(fmean(known))
    return text if len(values) == 1 else f"{text} ({form.format(min(known))} to {form.format(max(known))})"
