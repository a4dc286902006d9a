"""Does the verifier notice? Judges the corpus of CUDA cheats and the mutants of the GPU families on this machine's GPU.

    python tests/verify_the_verifier.py --out results/h200
    python tests/verify_the_verifier.py --kernels cpu --out FOLDER    # mutants of the CPU's families, without a GPU

Every candidate takes the real path: build, verification in full, timing. Results are written one by one to
verification.jsonl, so that a run that was interrupted goes on where it stopped; what has been judged is judged again
once the text or the verifier has changed. Tables are printed and figures written to verification.json and
verification.csv. Exits with 1 where a cheat was accepted, an honest kernel rejected, or a mutant survived.
"""

import argparse
import collections
import contextlib
import csv
import dataclasses
import hashlib
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from cuda_cheats import ACCEPTED, Cheat, all_cheats
from mutation import on_cpu, on_gpu, report, sampling
from mutation.report import Judged
from mutation.sampling import Mutant
from mutation.source import Source
from mutation.subjects import KERNELS, Subject

import cuda_l2
from cuda_l2 import search
from cuda_l2.evaluator import Evaluator
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.records import Build, Candidate, Gemm, Trial
from cuda_l2.rigs import Rig, open_rig
from cuda_l2.runs.judging import JudgePool
from cuda_l2.runs.workers import gpus
from cuda_l2.search import begin, taken
from cuda_l2.system.errors import UserError
from cuda_l2.system.values import now

PACKAGE, TESTS = Path(cuda_l2.__file__).parent, Path(__file__).parent
VERIFIER = tuple(
    PACKAGE / name for name in ("build", "contract", "evaluator.py", "machine", "measure", "rigs", "verify")
)
AHEAD = 2
"""Mutants a process that judges, which are given to it before results are waited for."""
MUTATING = (PACKAGE / "families", TESTS / "mutation")


class Book:
    """Results on disk, one line each. Those count that were got with the verifier, families and operators of now.

    stricter: the verifier has only learnt to reject more, so what others rejected counts too, and equivalent mutants do.
    """

    def __init__(self, folder: Path, *, stricter: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "verification.jsonl"
        self.version = _digest(*VERIFIER)
        mutating = _digest(*VERIFIER, *MUTATING)
        self._versions = {"cheat": self.version, "original": mutating, "mutant": mutating}
        self.judged: dict[tuple[str, str], Judged] = {}
        equivalent = sampling.equivalents()
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                fields = json.loads(line)
                current = fields.pop("version") == self._versions[fields["kind"]]
                judged = Judged(**fields)
                if current or (stricter and (not judged.accepted or judged.id in equivalent)):
                    self._keep(judged)

    def known(self, kind: str, where: str, source: str) -> bool:
        found = self.judged.get((kind, where))
        return found is not None and found.source_id == Candidate(source).id

    def add(self, judged: Judged) -> None:
        self._keep(judged)
        with self.path.open("a") as file:
            file.write(json.dumps({"version": self._versions[judged.kind], **dataclasses.asdict(judged)}) + "\n")

    def of(self, kind: str) -> list[Judged]:
        return [item for (known, _), item in self.judged.items() if known == kind]

    def _keep(self, judged: Judged) -> None:
        self.judged[judged.kind, judged.id] = judged


def judge_cheats(rig: Rig, book: Book, cheats: Sequence[Cheat]) -> None:
    """Every file of the corpus, shape by shape."""
    groups: dict[tuple[str, bool], list[Cheat]] = defaultdict(list)
    for cheat in cheats:
        if not book.known("cheat", cheat.name, cheat.source):
            groups[cheat.shape, cheat.full].append(cheat)
    for (shape, full), group in groups.items():
        with Evaluator(Gemm.parse(shape), rig) as evaluator:
            candidates = [Candidate(cheat.source) for cheat in group]
            trials = evaluator.evaluate(candidates, rig.protocols[SEARCH.name], full=full)
            for cheat, trial in _timed(zip(group, trials, strict=True)):
                book.add(_judged("cheat", cheat.name, shape, trial[0], trial[1]))
                right = cheat.accepts(trial[0].status, trial[0].reason)
                _say("cheat", cheat.name, trial[0], "" if right else "  UNEXPECTED")


def judge_mutants(
    rig: Rig, book: Book, subjects: Sequence[Subject], part: tuple[int, int], pool: JudgePool | None = None
) -> None:
    """The subjects as they are, then their mutants; part: the first of two takes the even ones, and so on.

    pool: processes that judge in place of this one.
    """
    used: Counter[str] = Counter()
    number, parts = part
    sms = getattr(rig.target, "sms", 0)  # a GPU's
    for subject in subjects:
        original = subject.candidate(rig.target)
        quotas = sampling.PLAIN_QUOTAS if Source(original.source).plain else sampling.QUOTAS
        with Evaluator(subject.task, rig, judges_here=pool is None) as evaluator:
            _wait_for_nobody(evaluator)
            begun: collections.deque[tuple[Mutant, float, Future[search.Judged]]] = collections.deque()

            def add(mutant: Mutant, start: float, trial: Trial, subject: Subject = subject) -> None:
                book.add(_judged("mutant", mutant.id, subject.shape, trial, time.perf_counter() - start, mutant))
                _say("mutant", mutant.id, trial, f"  {mutant.after[:100]}" if trial.timing else "")

            def build(texts: Sequence[str], evaluator: Evaluator = evaluator) -> Iterator[Build]:
                return evaluator.build([Candidate(text) for text in texts])

            if not book.known("original", subject.name, original.source):
                start = time.perf_counter()
                if pool:
                    trial = taken(pool, evaluator, begin(pool, evaluator, original, full=True))
                else:
                    (trial,) = evaluator.evaluate([original], full=True)
                book.add(_judged("original", subject.name, subject.shape, trial, time.perf_counter() - start))
                _say("original", subject.name, trial)
            sample = sampling.select(subject, original.source, sms, build, used, quotas)
            for i, (mutant, built) in enumerate(sample):
                if i % parts != number - 1 or book.known("mutant", mutant.id, mutant.source):
                    continue
                start, candidate = time.perf_counter(), Candidate(mutant.source)
                if not pool:
                    add(mutant, start, evaluator.judge(candidate, built, full=True))
                    continue
                begun.append((mutant, start, begin(pool, evaluator, candidate, partial(_itself, built), full=True)))
                if len(begun) > AHEAD * pool.count:
                    first, since, judged = begun.popleft()
                    add(first, since, taken(pool, evaluator, judged))
            for left, since, judged in begun:
                add(left, since, taken(pool, evaluator, judged))


def _pool(held: contextlib.ExitStack, target: str, judges: int) -> JudgePool | None:
    """Processes that judge on one GPU; None where this one does."""
    return held.enter_context(JudgePool(gpus("1"), target, print, each=judges)) if judges > 1 else None


def _itself(build: Build) -> Build:
    return build


def judge_faults(book: Book, target: str, judges: int) -> bool:
    """Faults that few launches show, in one kernel; whether all were found and the kernel itself was accepted.

    judges: number of processes that judge on one GPU.
    """
    subject = on_cpu.SUBJECT if target == "cpu" else on_gpu.SUBJECT
    with contextlib.ExitStack() as held:
        rig = held.enter_context(open_rig(target))
        evaluator = held.enter_context(Evaluator(subject.task, rig, judges_here=judges == 1))
        pool = _pool(held, target, judges)
        if target == "cpu":
            _wait_for_nobody(evaluator)
            original = subject.candidate(rig.target)
            mutants = on_cpu.mutants(original.source)
        else:
            original, mutants = Candidate(on_gpu.TEXT), on_gpu.mutants()
        chosen = [None, *mutants]
        candidates = [Candidate(mutant.source) if mutant else original for mutant in chosen]
        builds = rig.prefetch(candidates)
        kinds = [("mutant", mutant.id) if mutant else ("original", subject.name) for mutant in chosen]
        left = [
            (kind, where, mutant, candidate, build)
            for (kind, where), mutant, candidate, build in zip(kinds, chosen, candidates, builds, strict=True)
            if not book.known(kind, where, candidate.source)
        ]
        begun = [begin(pool, evaluator, candidate, build) for *_, candidate, build in left] if pool else []
        for number, (kind, where, mutant, candidate, _) in enumerate(left):
            start = time.perf_counter()
            if pool:
                trial = taken(pool, evaluator, begun[number])
            else:
                (trial,) = evaluator.evaluate([candidate], rig.protocols[SEARCH.name])
            book.add(_judged(kind, where, subject.shape, trial, time.perf_counter() - start, mutant))
            _say(kind, where, trial)
    judged_mutants = book.of("mutant")
    found = report.tally(judged_mutants, sampling.equivalents())
    low, high = (100 * end for end in found.interval)
    print(f"{found.killed} of {found.judged - found.equivalent} killed, {found.rate:.1%} [{low:.1f}, {high:.1f}]")
    print("by", dict(Counter(item.check for item in judged_mutants if not item.accepted)))
    print("survivors:", [item.id for item in judged_mutants if item.accepted])
    return not found.survived and all(item.accepted for item in book.of("original"))


def write(book: Book, folder: Path, cheats: Sequence[Cheat], environment: dict[str, object]) -> bool:
    """Print the tables, write the figures; whether everything came out as it must."""
    equivalent = sampling.equivalents()
    corpus = [item for item in book.of("cheat") if item.id in {cheat.name for cheat in cheats}]
    mutants, originals = book.of("mutant"), book.of("original")
    judged = [*corpus, *originals, *mutants]
    figures = report.summary(judged, cheats, equivalent)
    print(report.cheat_table(corpus, cheats), "", sep="\n")
    print(report.operator_table(mutants, equivalent), "", sep="\n")
    left = report.survivors(mutants, equivalent)
    wrong = [item for item in originals if not item.accepted]
    if left:
        print("survivors:", left, "", sep="\n")
    for item in wrong:
        print(f"rejected though not mutated: {item.id}: {item.status}: {item.reason}")
    print(json.dumps(figures, indent=1))
    content = {"figures": figures, "environment": environment, "equivalent": equivalent}
    (folder / "verification.json").write_text(json.dumps(content, indent=1) + "\n")
    with (folder / "verification.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Judged)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(item) for item in judged)
    by_name = {cheat.name: cheat for cheat in cheats}
    return not left and not wrong and all(by_name[item.id].accepts(item.status, item.reason) for item in corpus)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for results; default results/h200 for the GPU's products")
    parser.add_argument("--only", choices=("cheats", "mutants"), help="judge one half")
    parser.add_argument(
        "--kernels", choices=KERNELS, default="products", help="what is mutated; mutants alone where it is not products"
    )
    parser.add_argument(
        "--subject",
        action="append",
        help="mutate this one only (operators take turns over all subjects, so its sample may differ); may be repeated",
    )
    parser.add_argument(
        "--part",
        type=lambda text: tuple(map(int, text.split("/", 1))),
        default=(1, 1),
        help="judge this part of the mutants, as in 1/2: for several GPUs, each with a folder of its own; one's"
        " verification.jsonl put behind the other's is both",
    )
    parser.add_argument("--stricter", action="store_true", help="judge again only what an earlier verifier accepted")
    parser.add_argument("--tables", action="store_true", help="judge nothing: tables of what has been judged")
    parser.add_argument(
        "--faults", choices=("cpu", "cuda"), help="judge faults that few launches show, and nothing else"
    )
    parser.add_argument("--judges", type=int, default=1, help="processes that judge faults or mutants, on one GPU")
    options = parser.parse_args()
    if options.judges > 1 and "cpu" in (options.faults, options.kernels):
        parser.error("--judges goes with a GPU: judgements on a CPU have the whole machine")
    if not options.out:
        if options.faults or options.kernels != "products":
            parser.error("--faults and --kernels need a folder of their own: --out FOLDER")
        options.out = Path("results/h200")
    if options.faults:
        return 0 if judge_faults(Book(options.out), options.faults, options.judges) else 1
    cheats, book = all_cheats(), Book(options.out, stricter=options.stricter)
    environment: dict[str, object] = {"cuda_l2": cuda_l2.__version__, "version": book.version}
    if options.tables:
        known = options.out / "verification.json"
        if known.exists():
            environment = json.loads(known.read_text())["environment"]
    else:
        subjects = [each for each in KERNELS[options.kernels] if not options.subject or each.name in options.subject]
        try:
            with contextlib.ExitStack() as held:
                target = "cpu" if options.kernels == "cpu" else "cuda"
                rig = held.enter_context(open_rig(target))
                environment |= {**rig.environment(), "date": now()[:10]}
                if options.only != "mutants" and options.kernels == "products":
                    judge_cheats(rig, book, cheats)
                if options.only != "cheats":
                    pool = _pool(held, target, options.judges)
                    judge_mutants(rig, book, subjects, options.part, pool)
        except UserError as error:
            parser.exit(2, f"{error}\n")
    return 0 if write(book, options.out, cheats, environment) else 1


def _judged(kind: str, where: str, shape: str, trial: Trial, seconds: float, mutant: Mutant | None = None) -> Judged:
    check = trial.verdict.check if trial.verdict else ""
    if trial.timing and trial.reason:
        check = "timed launches"
    status = ACCEPTED if trial.status == "busy" else trial.status  # right, and nobody waited for quiet to time it
    return Judged(
        *(kind, where, trial.candidate.id, shape, status, check, trial.reason[:300], round(seconds, 3)),
        *((mutant.group, mutant.operator, mutant.line, mutant.before, mutant.after) if mutant else ()),
    )


def _wait_for_nobody(evaluator: Evaluator) -> None:
    """On a CPU check outputs of timed launches, and wait for no quiet to time them."""
    if evaluator.target.name == "cpu":
        evaluator.ends = 0.0


def _timed(items: Iterable[tuple[Cheat, Trial]]) -> Iterator[tuple[Cheat, tuple[Trial, float]]]:
    """Items of a lazy iteration with the seconds each took to come."""
    start = time.perf_counter()
    for cheat, trial in items:
        yield cheat, (trial, time.perf_counter() - start)
        start = time.perf_counter()


def _say(kind: str, where: str, trial: Trial, more: str = "") -> None:
    check = trial.verdict.check if trial.verdict and trial.verdict.check else ""
    print(f"{kind:9} {where:60} {trial.status:12} {check}{more}", flush=True)


def _digest(*places: Path) -> str:
    """Changes with any source in these files and folders."""
    files = sorted(path for place in places for path in [place, *place.rglob("*")] if path.is_file())
    text = b"".join(path.read_bytes() for path in files if path.suffix in (".py", ".cu", ".cuh", ".c"))
    return hashlib.sha256(text).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
