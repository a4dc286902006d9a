"""The workshop as a coding agent sees it: tasks given at the start, submissions within a budget, all in the archive.

Everything here runs in one thread, which owns the evaluator and the archive. Nothing an agent gives is a path.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cuda_l2.agents import MOST_EXEMPLARS, MOST_SOURCES, WORDS_CHARS
from cuda_l2.contract.text import contract_text
from cuda_l2.evaluator import Evaluator
from cuda_l2.llm._base import AGENT, Outcome, Reply
from cuda_l2.llm.exchanges import Exchange, ExchangeLog
from cuda_l2.measure.profile import summary
from cuda_l2.measure.protocols import OFFLINE, SEARCH
from cuda_l2.optimizer import Optimizer
from cuda_l2.propose import _prompt, _question
from cuda_l2.propose._references import PIECES, excerpts
from cuda_l2.records import Candidate, Interval, Task, TimingStatus, Trial
from cuda_l2.retrieve.index import Index
from cuda_l2.search import Progress, comparable, judge_group
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.text import counted, fenced
from cuda_l2.tasks import describe

PURPOSE = "agent"
"""Purpose of the exchanges that keep what agents submitted."""
REFERENCE_TOKENS = 6_000
"""Limit of one answer about headers, at three characters a token."""


class Workshop(Closing):
    """What agents may do with some tasks on one machine. A context manager.

    The optimizer's settings hold the budget: seconds from the first submission on, and the number of candidates, over
    all tasks together. UserError where a task cannot be judged here.
    """

    def __init__(self, optimizer: Optimizer, tasks: Sequence[Task]) -> None:
        self._optimizer, self.target, self._clock = optimizer, optimizer.target, optimizer.clock
        self.tasks = {str(task): task for task in tasks}
        for task in tasks:
            optimizer.require_feasible(task)
        self._progress = {text: Progress() for text in self.tasks}
        self._concluded: dict[str, tuple[int, dict[str, Any]]] = {}  # by task: candidates until then, and the report
        self._profiles: dict[tuple[str, str], str] = {}  # by task and candidate: reading counters takes time
        self._evaluator: Evaluator | None = None
        self._began: float | None = None
        self._queued_s = 0.0  # of evaluators that are closed
        self._rng = np.random.default_rng()
        self._log = ExchangeLog(optimizer.archive.path)

    @property
    def submitted(self) -> int:
        """Number of candidates of all tasks so far."""
        return sum(progress.proposed for progress in self._progress.values())

    def left(self) -> dict[str, float]:
        """What is left of the budget: candidates, seconds."""
        settings = self._optimizer.settings
        spent_s = 0.0 if self._began is None else self._clock.now() - self._began - self._waited_s()
        return {
            "candidates": max(0, (settings.trials or 0) - self.submitted),
            "seconds": round(max(0.0, settings.budget_s - spent_s), 1),
        }

    def read_task(self, task: str) -> str:
        """The instruction, how fast the best kernel is, and what is left of the budget."""
        wanted, left = self._task(task), self.left()
        others = [text for text in self.tasks if text != str(wanted)]
        parts = [
            f"# Task {wanted}",
            describe(wanted),
            "## Where we stand",
            _prompt.describe_standing(self._best(wanted), self.target),
            f"Left of the budget: {counted(int(left['candidates']), 'candidate')}, {left['seconds']:.0f} s.",
        ]
        return "\n\n".join([*parts, *([f"Other tasks here: {', '.join(others)}"] if others else [])])

    def read_machine(self, task: str) -> str:
        return _prompt.describe_machine(self.target, self._task(task))

    def read_contract(self, task: str, *, full: bool = False) -> str:
        return contract_text(self.target.name, self._task(task), full=full)

    def submit(self, task: str, sources: Sequence[str], agent: str) -> dict[str, Any]:
        """Judge sources as a search judges its candidates: from the archive where it knows them, else into it.

        agent: the client's name. UserError where the budget is spent.
        """
        wanted = self._task(task)
        if not 1 <= len(sources) <= MOST_SOURCES:
            raise UserError(f"submit 1 to {MOST_SOURCES} sources at once, not {len(sources)}")
        self._began = self._clock.now() if self._began is None else self._began
        left = self.left()
        if not left["candidates"] or not left["seconds"]:
            raise UserError(
                f"the budget is spent: {counted(self.submitted, 'candidate')} judged. Ask for the report; the user can"
                " start cuda-l2 mcp again, which goes on from the same archive"
            )
        chosen = sources[: int(left["candidates"])]
        candidates = [Candidate(source, f"{AGENT}{agent}") for source in chosen]
        self._log.require_space(len(candidates))
        for candidate in candidates:
            self._keep(wanted, candidate)
        judged, progress = [], self._progress[str(wanted)]
        met = {trial.candidate.id for trial in progress.trials}
        with self._opened(wanted) as evaluator:
            evaluator.ends = self._clock.now() + left["seconds"]
            for trial, known in judge_group(evaluator, self._optimizer.archive, candidates):
                progress.count(trial, known, repeated=known and trial.candidate.id in met)
                judged.append(self._outcome(trial, known))
                if not self.left()["seconds"]:
                    break
        said = {"not_judged": len(sources) - len(judged)} if len(judged) < len(sources) else {}
        return {"results": judged, **said, "left": self.left()}

    def profile(self, task: str, candidate: str) -> str:
        """The GPU's counters of a correct kernel, by its id or of the best; UserError where there are none to read."""
        wanted = self._task(task)
        if self.target.name != "cuda":
            raise UserError("there are no counters to read: only CUDA kernels on an NVIDIA GPU can be profiled")
        known = self._trial(wanted, candidate).candidate
        if (str(wanted), known.id) not in self._profiles:
            with self._opened(wanted) as evaluator:
                evaluator.ends = math.inf
                (trial,) = evaluator.evaluate([known], self._optimizer.rig.protocols[OFFLINE.name])
                if not (trial.timing and trial.timing.status is TimingStatus.MEASURED):
                    raise UserError(f"{known.id} failed when judged again: {trial.status}: {trial.reason}")
                trial = evaluator.profile(trial)
            self._optimizer.archive.append(trial)
            self._profiles[str(wanted), known.id] = summary(trial.profile)
        return self._profiles[str(wanted), known.id]

    def best(self, task: str) -> str:
        """The fastest kernel known, with its source."""
        wanted = self._task(task)
        best = self._best(wanted)
        if best is None:
            return _prompt.describe_standing(None, self.target)
        return f"{best.candidate.id}, by {best.candidate.proposer}. {_prompt.describe_exemplar(best)}"

    def exemplars(self, task: str, count: int) -> str:
        """Scored kernels of the archive from distinct score buckets, the best first, and the latest failures."""
        history = self._history(self._task(task))
        found = _question.drawn_exemplars(history, min(max(count, 1), MOST_EXEMPLARS), self._rng)
        failures = _question.latest_failures(history)
        shown = [f"## {trial.candidate.id}\n\n{_prompt.describe_exemplar(trial)}" for trial in found]
        shown += ["## What failed before", *map(_prompt.describe_failure, failures)] if failures else []
        return "\n\n".join(shown) or "The archive holds no kernel for this task on this machine yet."

    def look_up(self, words: str) -> str:
        """Pieces of the indexed headers nearest to some words. UserError where there is no index."""
        with contextlib.closing(Index()) as index:
            found = excerpts(index, self.target, words[:WORDS_CHARS], REFERENCE_TOKENS, lambda text: len(text) // 3)
        return "\n\n".join(found) or f"Nothing among the {PIECES} nearest pieces of the index is about these words."

    def report(self, task: str) -> dict[str, Any]:
        """The best kernels timed side by side, the winner reported from another run on other inputs.

        The same report as before where nothing was submitted since. UserError where nothing correct is known.
        """
        wanted = self._task(task)
        text, progress = str(wanted), self._progress[str(wanted)]
        if text not in self._concluded or self._concluded[text][0] != progress.proposed:
            progress.ended = self._clock.now()
            with self._opened(wanted) as evaluator:
                winner = self._optimizer.decide(evaluator, progress)
            self._close_evaluator()  # the report has one of its own
            if winner is None:
                raise UserError(f"no correct kernel is known for {text}: nothing can be reported")
            result = self._optimizer.conclude(wanted, progress, winner)
            if progress.interrupted:
                raise KeyboardInterrupt
            said = {
                "best": winner.candidate.id,
                "wins": result.wins,
                "why_no_win": result.why_no_win,
                "protocols": {name: self._outcome(trial, False) for name, trial in result.reports.items()},
                "not_reported": result.not_reported,
            }
            self._concluded[text] = (progress.proposed, said)
        return self._concluded[text][1]

    def close(self) -> None:
        self._close_evaluator()
        self._log.close()

    def _task(self, text: str) -> Task:
        """One of the tasks by its text, the first where it is empty; UserError where there is none."""
        found = self.tasks.get(text.strip() or next(iter(self.tasks)))
        if found is None:
            raise UserError(f"there is no task {text[:80]!r} here; choose from {', '.join(self.tasks)}")
        return found

    def _history(self, task: Task) -> list[Trial]:
        """The latest trial of each candidate by which searches chose."""
        trials = comparable(self._optimizer.archive, task, self.target.machine)
        return [*{trial.candidate.id: trial for trial in trials}.values()]

    def _best(self, task: Task) -> Trial | None:
        return next(iter(self._optimizer.archive.best(task, self.target.machine, SEARCH.name)), None)

    def _trial(self, task: Task, candidate: str) -> Trial:
        """The latest measured trial of a candidate, of the best where the id is empty."""
        trials = self._optimizer.archive.standing(task, self.target.machine, SEARCH.name)
        found = [trial for trial in trials if trial.speedup and trial.candidate.id == candidate.strip()]
        trial = found[-1] if found else None if candidate.strip() else self._best(task)
        if trial is None:
            raise UserError(f"no correct kernel {candidate.strip()[:40]!r} is known for {task}; submit it first")
        return trial

    def _waited_s(self) -> float:
        """Time spent waiting for other users of the machine, which the budget does not pay for."""
        return self._queued_s + (self._evaluator.queued_s if self._evaluator else 0.0)

    @contextlib.contextmanager
    def _opened(self, task: Task) -> Iterator[Evaluator]:
        """The task's evaluator, kept for the next call; a new one after an error that nobody foresaw."""
        if self._evaluator is None or self._evaluator.task != task:
            self._close_evaluator()
            self._evaluator = self._optimizer.evaluator(task)
            self._evaluator.recall(comparable(self._optimizer.archive, task, self.target.machine))
        try:
            yield self._evaluator
        except UserError:
            raise
        except BaseException:
            self._close_evaluator()
            raise

    def _close_evaluator(self) -> None:
        if self._evaluator:
            self._queued_s += self._evaluator.queued_s
            self._evaluator.close()
            self._evaluator = None

    def _keep(self, task: Task, candidate: Candidate) -> None:
        """Record what is submitted before it is judged: an agent may leave, or the process be killed, in between."""
        language = "c" if self.target.name == "cpu" else "cuda"
        text = fenced(candidate.source, language, len(candidate.source))
        self._log.append(
            Exchange(
                key=f"{candidate.id}-{self.submitted}",
                purpose=PURPOSE,
                task=str(task),
                machine=self.target.machine,
                model=candidate.proposer,
                address="mcp",
                messages=(),
                reply=Reply(Outcome.ANSWERED, text),
            )
        )

    def _outcome(self, trial: Trial, known: bool) -> dict[str, Any]:
        """A trial in figures and words, without paths: times in us, speedups with their 95 % intervals."""
        outcome: dict[str, Any] = {"candidate": trial.candidate.id, "status": trial.status, "known": known}
        outcome["reward"] = None if math.isnan(trial.reward) else round(trial.reward, 4)
        timing, element = trial.timing, trial.verdict.element if trial.verdict else None
        if timing and timing.candidate and timing.speedup:
            outcome["latency_us"] = _interval(timing.candidate.latency_us)
            outcome["speedup"] = _interval(timing.speedup)
            outcome["against"] = timing.reference
            outcome["baselines_us"] = {arm.name: round(arm.latency_us.estimate, 3) for arm in timing.baselines}
            return outcome
        if element:
            outcome["element"] = {
                "tensor": element.matrix,
                "at": [element.row, element.column],
                "found": _number(element.found),
                "expected": _number(element.expected),
            }
        hint = "\n\nThe tool contract states every rule with long=true." if _question.breaks_contract(trial) else ""
        return outcome | {"feedback": _prompt.feedback(trial) + hint}


def _interval(interval: Interval) -> list[float | str]:
    """Estimate, lower and upper bound."""
    return [_number(value) for value in (interval.estimate, interval.low, interval.high)]


def _number(value: float) -> float | str:
    """A number that JSON has; infinities and NaN by their names."""
    return round(value, 4) if math.isfinite(value) else str(value)
