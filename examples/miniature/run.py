"""A language model from scratch, in miniature: all stages on one machine with measured rewards, and a table.

    python examples/miniature/run.py --out miniature --seeds 0 1 2                  # on this CPU
    python examples/miniature/run.py --out miniature --seeds 0 1 2 --target cuda    # on an NVIDIA GPU

A model of random values and a tokenizer of its own is pretrained, fine-tuned, learns from itself, and is trained by
contrastive GRPO, all through `cuda-l2 train`. It writes whole candidate files of a small family (kernels/). The best
decile of the measured schedules and two shapes are in no training text. Interrupted, it goes on. docs/learning.md has
results. --few is a dry run: a few of everything, and figures that say nothing.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads of torch would disturb timings

import examine
import family
import teacher

from cuda_l2.archive import Archive
from cuda_l2.commands.train import TrainSettings
from cuda_l2.commands.train import command as train
from cuda_l2.families._base import Family
from cuda_l2.machine._base import Target
from cuda_l2.records import Candidate, Gemm, Task, Trial
from cuda_l2.rigs import open_rig
from cuda_l2.system.errors import MachineError, UserError

HERE = Path(__file__).parent
PROMPTS = HERE / "prompts"
CONTEST = "contest.json"
YARDSTICKS = 3  # best training kernels that are timed with the answers
NAMES = {
    "pretrained": "pretrain",
    "tuned": "SFT",
    "own": "self-supervised",
    "rl": "contrastive GRPO",
    "control": "control: GRPO without exemplars",
    "longer": "control: SFT alone, same steps",
}
BEGINS_FROM = {"tuned": "pretrained", "longer": "tuned", "own": "tuned", "rl": "own", "control": "own"}


@dataclass(frozen=True)
class Miniature:
    """How large it is on one kind of machine.

    stages: names of those that it goes through, model: what the first begins from. data: settings of stages on data,
    tasks: of those that write kernels, rl: of GRPO besides.
    """

    target: str
    shapes: tuple[str, ...]
    held_shapes: tuple[str, ...]
    families: Callable[[Task, Target], Sequence[Family]] = family.families_for
    stages: tuple[str, ...] = tuple(NAMES)
    model: str = "scratch"
    schedules: int = 80
    sft_steps: int = 150
    sft_rate: float = 3e-3
    longer_rate: float = 3e-4
    own_steps: int = 12
    rl_steps: int = 40
    rl_rate: float = 3e-4
    tries: int = 40
    keep: int = 24
    group: int = 8
    groups: int = 2
    micro_batch: int = 0  # 0 for all answers of a step
    iterations: int = 1
    answers: int = 16
    shown: tuple[int, ...] = (0, 2, 2)
    exemplar_lines: int = 0
    answer_tokens: int = 160
    rl: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()

    def begins_from(self, name: str) -> str:
        """The stage whose model a stage begins from, of those that it goes through; empty for `model`."""
        begins = BEGINS_FROM.get(name, "")
        return begins if not begins or begins in self.stages else self.begins_from(begins)

    @property
    def asking(self) -> teacher.Asking:
        return teacher.Asking(PROMPTS, self.exemplar_lines, self.shown)

    def few(self) -> "Miniature":
        """A dry run; with fewer steps of fine-tuning the model would have no right kernels to learn from."""
        return replace(self, schedules=20, own_steps=2, rl_steps=2, tries=16, keep=4, group=4, answers=4)


MINIATURES = {
    "cpu": Miniature("cpu", ("48x192x128", "96x384x64"), ("72x192x96", "24x384x128")),
    # a GPU judges and writes many at once: groups of 16, two gradient steps on each
    "cuda": Miniature(
        "cuda",
        ("768x768x512:tn", "1536x768x256:tn"),
        ("768x1536x256:tn", "1536x1536x512:tn"),
        sft_steps=900,
        rl_rate=2e-4,
        group=16,
        iterations=2,
        answer_tokens=320,
        # a wrong file costs what a slow one does: beside -1 speeds that differ by 0.1 count little. At a weight of the
        # divergence of 0.01 answers lost their form as they won speed, most where the question shows no exemplars
        rl=("rl.unbuildable=-0.02", "rl.incorrect=-0.01", "rl.kl_weight=0.1"),
        data=("scratch.layers=4", "scratch.width=192", "tuning.sequence_tokens=1024"),  # 2.2 million weights
        # at 3e-4 from the first step half of the answers had lost their form at the fifth; 1e-4 moved little
        tasks=("sampling.at_once=32", "sampling.prompt_tokens=800", "sampling.answer_tokens=320", "tuning.warmup=0.2"),
    ),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--target", choices=MINIATURES, default="cpu")
    options.add_argument("--few", action="store_true", help="a dry run")
    options.add_argument("--without-sandbox", action="store_true", help="as for cuda-l2 train")
    given = options.parse_args()
    size = MINIATURES[given.target]
    with one_line():
        run(size.few() if given.few else size, given.out, given.seeds, given.without_sandbox)


@contextmanager
def one_line() -> Iterator[None]:
    """What a user or the machine can mend ends the program with one line."""
    try:
        yield
    except (UserError, MachineError, OSError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def run(size: Miniature, folder: Path, seeds: Sequence[int], without_sandbox: bool = False, until: str = "") -> None:
    """All of its stages for every seed, and the tables; up to stage `until` without tables.

    What is done already is not done again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outs = [folder / f"seed-{seed}" for seed in seeds]
    with open_rig(size.target) as rig, Archive(folder / "teacher.db") as archive:
        tasks = [Gemm.parse(shape) for shape in size.shapes]
        taught = teacher.measure(tasks, size.schedules, rig, archive, size.families)
        for out, seed in zip(outs, seeds, strict=True):
            if not (out / "data" / "collected").exists():
                corpus = "pretrained" in size.stages
                teacher.write_data(out / "data", taught, rig, size.asking, seed, corpus=corpus)
    for out, seed in zip(outs, seeds, strict=True):
        if not all(_examined(out, name) for name in size.stages):
            _train_and_examine(size, out, seed, taught, without_sandbox, until)
        if until:
            continue
        if not _contested(size, out):
            _contest(size, out, taught)
        _print(size, f"Seed {seed}", [out], taught)
    if len(outs) > 1 and not until:
        _print(size, f"{len(outs)} seeds", outs, taught)


def _train_and_examine(
    size: Miniature, out: Path, seed: int, taught: teacher.Teacher, without_sandbox: bool, until: str
) -> None:
    stages = size.stages[: size.stages.index(until) + 1] if until else size.stages
    hold_out = out / "held.txt"
    hold_out.write_text("\n".join([*size.held_shapes, *(candidate.id for candidate in taught.held_out)]) + "\n")
    for name in ("own", "rl", "control"):  # exemplars begin with what fine-tuning saw
        with Archive(out / f"{name}.db") as archive:
            if not archive.trials():
                for trials in taught.trials.values():
                    for trial in trials:
                        archive.append(trial)

    def stage(stage: str, name: str, *changes: str, data: str = "", archive: str = "") -> None:
        if name not in stages or _examined(out, name):
            return
        begins = size.begins_from(name)
        settings = TrainSettings(
            model=str(out / begins / "model") if begins else size.model,
            data=[out / "data" / data] if data else None,
            out=out / name,
            config=HERE / ("tasks.toml" if archive else "small.toml"),
            set=[f"tuning.seed={seed}", *(size.tasks if archive else size.data), *changes],
            archive=out / f"{archive}.db" if archive else None,
            target=size.target,
            hold_out=hold_out if archive else None,
            prompts=PROMPTS,
            without_sandbox=without_sandbox,
        )
        train(list(size.shapes) if archive else None, stage=stage, settings=settings)
        _examine(size, out, name, archive, taught, seed)
        _drop(size, out)

    stage("pretrain", "pretrained", "tuning.batch=8", "tuning.micro_batch=8", data="corpus")
    first = [f"tuning.steps={size.sft_steps}", f"tuning.learning_rate={size.sft_rate}"]
    stage("sft", "tuned", *first, data="collected")
    own = ["collecting.rounds=1", f"collecting.tries={size.tries}", f"collecting.keep={size.keep}"]
    own += ["tuning.learning_rate=2e-4", f"tuning.steps={size.own_steps}"]
    stage("self-supervised", "own", *own, archive="own")
    step = size.groups * size.group  # answers
    rl = [f"rl.group={size.group}", f"rl.iterations={size.iterations}", f"tuning.batch={step}"]
    rl += [
        f"tuning.micro_batch={size.micro_batch or step}",
        f"tuning.learning_rate={size.rl_rate}",
        f"tuning.steps={size.rl_steps}",
        f"sampling.exemplar_lines={size.exemplar_lines}",
    ]
    rl += size.rl
    stage("hgemm-rl", "rl", *rl, archive="rl")
    stage("hgemm-rl", "control", *rl, "sampling.exemplars=0", archive="control")
    same = [f"tuning.steps={size.own_steps + size.rl_steps}", f"tuning.learning_rate={size.longer_rate}"]
    stage("sft", "longer", *same, data="collected")


def _examined(out: Path, name: str) -> bool:
    return all((out / f"{name}-{shown}.json").exists() for shown in (0, 2))


def _drop(size: Miniature, out: Path) -> None:
    """Models that nothing begins from any more go, so that an interrupted run is small; the last one stays."""
    for name in NAMES:
        after = [later for later in size.stages if size.begins_from(later) == name]
        if name != "rl" and after and all(_examined(out, each) for each in (name, *after)):
            for folder in (out / name).rglob("model"):
                shutil.rmtree(folder)


def _examine(size: Miniature, out: Path, name: str, archive: str, taught: teacher.Teacher, seed: int) -> None:
    """Examine the model without exemplars in the question, and with two."""
    if _examined(out, name):
        return
    with open_rig(size.target) as rig, Archive(out / "examined.db") as examined:
        histories = examine.histories(taught, rig.target.machine, out / f"{archive}.db" if archive else None)
        wanted: dict[int, dict[Task, Sequence[Trial]]] = {}
        for shown in (0, 2):
            asked = [Gemm.parse(shape) for shape in (size.shapes if shown else (*size.shapes, *size.held_shapes))]
            wanted[shown] = {gemm: histories.get(gemm, ()) for gemm in asked}
        exam = examine.Exam(size.asking, size.answers, size.answer_tokens, seed)
        found = examine.examine(out / name / "model", wanted, exam, taught, rig, examined)
    for shown, answers in found.items():
        examine.save(out / f"{name}-{shown}.json", answers)
        for each in answers:
            middle = f", median {median(each.speedups):.3f}" if each.speedups else ""
            counts = f"{each.built} of {each.asked} build, {each.correct} are correct{middle}"
            print(f"{NAMES[name]}, {shown} exemplars, {each.shape}: {counts}", flush=True)


def _bests(size: Miniature, out: Path) -> list[tuple[str, Candidate]]:
    """The best answer of each stage and shape, with the shape."""
    paths = [out / f"{name}-{shown}.json" for name in size.stages for shown in (0, 2)]
    found = [answers for path in paths for answers in examine.load(path)]
    return [(answers.shape, Candidate(answers.best)) for answers in found if answers.best]


def _contested(size: Miniature, out: Path) -> bool:
    """Whether a contest was held and all best answers were in it: more stages may have been examined since."""
    if not (out / CONTEST).exists():
        return False
    timed = json.loads((out / CONTEST).read_text())
    return all(best.id in timed.get(shape, {}) for shape, best in _bests(size, out))


def _contest(size: Miniature, out: Path, taught: teacher.Teacher) -> None:
    """Time the best answers of all stages, and the best training kernels, beside one another; kept by shape and id."""
    found = _bests(size, out)
    timed = {}
    with open_rig(size.target) as rig:
        for shape in (*size.shapes, *size.held_shapes):
            bests = [best for at, best in found if at == shape]
            timed[shape] = examine.contest(shape, [*taught.best(YARDSTICKS), *bests], rig)
    (out / CONTEST).write_text(json.dumps(timed, indent=1) + "\n")


def _print(size: Miniature, title: str, outs: Sequence[Path], taught: teacher.Teacher) -> None:
    training = [candidate.id for candidate in taught.best(YARDSTICKS)]
    for where, shapes, shown in (
        ("trained shapes", size.shapes, 0),
        ("trained shapes", size.shapes, 2),
        ("held-out shapes", size.held_shapes, 0),
    ):
        print(f"\n{title}, {where}, {shown} exemplars in the question:\n\n{examine.head()}")
        for name in size.stages:
            seeds = []
            for out in outs:
                timed = json.loads((out / CONTEST).read_text())
                seeds.append(examine.figures(examine.load(out / f"{name}-{shown}.json"), shapes, timed, training))
            print(examine.row(NAMES[name], seeds), flush=True)
        for name in size.stages[1:] if len(outs) == 1 else ():
            before, after = (examine.load(outs[0] / f"{each}-{shown}.json") for each in (size.begins_from(name), name))
            estimate, low, high = examine.gain(before, after, shapes)
            begins = NAMES[size.begins_from(name)]
            if estimate > 0:
                print(
                    f"{NAMES[name]}: median {estimate:.2f} ({low:.2f} to {high:.2f}) times that of {begins}", flush=True
                )


if __name__ == "__main__":
    main()
