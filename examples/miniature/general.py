"""The stage general-rl in miniature: three tasks that are no matrix products, measured rewards, on this CPU; a table.

    python examples/miniature/general.py --out general --seeds 0

A model of half a million random weights learns to write kernels of a small family (kernels/) from measured ones, fast
and slow, then from rewards, all through `cuda-l2 train`. The best decile of the measured schedules is in no training
text. Interrupted, it goes on. docs/learning.md has results.
"""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads of torch would disturb timings

import examine
import teacher

from cuda_l2 import tasks
from cuda_l2.archive import Archive
from cuda_l2.commands.train import TrainSettings
from cuda_l2.commands.train import command as train
from cuda_l2.rigs import Rig, open_rig

HERE = Path(__file__).parent
PROMPTS = HERE / "prompts"
TASKS = tuple(f"{name}:rows=32,columns=1000" for name in ("sum_rows", "variance_rows", "relu_squared"))
SCHEDULES = 30
SFT_STEPS, RL_STEPS = 400, 30
ANSWERS, ANSWER_TOKENS = 16, 320
NAMES = {
    "tuned": "SFT",
    "rl": "general-rl, contrastive",
    "control": "control: general-rl without exemplars",
    "longer": "control: SFT alone, same steps",
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with open_rig("cpu") as rig, Archive(given.out / "teacher.db") as archive:
        taught = teacher.measure([tasks.parse(text) for text in TASKS], SCHEDULES, rig, archive)
        outs = [given.out / f"seed-{seed}" for seed in given.seeds]
        for out, seed in zip(outs, given.seeds, strict=True):
            _train_and_examine(out, seed, taught, rig)
            _print(f"Seed {seed}", [out])
        if len(outs) > 1:
            _print(f"{len(outs)} seeds", outs)


def _train_and_examine(out: Path, seed: int, taught: teacher.Teacher, rig: Rig) -> None:
    out.mkdir(exist_ok=True)
    hold_out = out / "held.txt"
    hold_out.write_text("".join(f"{candidate.id}\n" for candidate in taught.held_out))
    if not (out / "data" / "collected").exists():
        teacher.write_data(out / "data", taught, rig, teacher.Asking(PROMPTS), seed)
    for name in ("rl", "control"):  # exemplars begin with what fine-tuning saw
        with Archive(out / f"{name}.db") as archive:
            if not archive.trials():
                for trials in taught.trials.values():
                    for trial in trials:
                        archive.append(trial)

    def stage(stage: str, name: str, model: str, *changes: str) -> None:
        on_tasks = stage == "general-rl"
        settings = TrainSettings(
            model=model if model == "scratch" else str(out / model / "model"),
            data=None if on_tasks else [out / "data" / "collected"],
            out=out / name,
            config=HERE / ("general.toml" if on_tasks else "small.toml"),
            set=[f"tuning.seed={seed}", *changes],
            archive=out / f"{name}.db" if on_tasks else None,
            target="cpu",
            hold_out=hold_out if on_tasks else None,
            prompts=PROMPTS,
        )
        train(list(TASKS) if on_tasks else None, stage=stage, settings=settings)
        for shown in (0, 2):
            _examine(out, name, shown, on_tasks, taught, rig, seed)

    length = "tuning.sequence_tokens=1024"
    stage("sft", "tuned", "scratch", f"tuning.steps={SFT_STEPS}", length)
    rl = ["rl.group=8", "tuning.learning_rate=3e-4", f"tuning.steps={RL_STEPS}"]
    stage("general-rl", "rl", "tuned", *rl)
    stage("general-rl", "control", "tuned", *rl, "sampling.exemplars=0")
    stage("sft", "longer", "tuned", f"tuning.steps={RL_STEPS}", "tuning.learning_rate=3e-4", length)


def _examine(out: Path, name: str, shown: int, on_tasks: bool, taught: teacher.Teacher, rig: Rig, seed: int) -> None:
    path = out / f"{name}-{shown}.json"
    if path.exists():
        return
    histories = examine.histories(taught, rig.target.machine, out / f"{name}.db" if on_tasks else None)
    exam = examine.Exam(teacher.Asking(PROMPTS), ANSWERS, ANSWER_TOKENS, seed)
    with Archive(out / "examined.db") as examined:
        found = examine.examine(out / name / "model", {shown: histories}, exam, taught, rig, examined)
        examine.save(path, found[shown])


def _print(title: str, outs: Sequence[Path]) -> None:
    """Shares of all answers; of correct ones each task's median speedup, and the share that no training text has.

    Of several seeds the means.
    """
    names = [text.partition(":")[0] for text in TASKS]
    for shown in (0, 2):
        print(f"\n{title}, {shown} exemplars in the question:\n")
        print(f"| stage | builds | correct | {' | '.join(names)} | new schedule |\n|{'---|' * (4 + len(names))}")
        for name, words in NAMES.items():
            rows = [_figures(examine.load(out / f"{name}-{shown}.json")) for out in outs]
            means = [fmean(column) for column in zip(*rows, strict=True)]
            forms = ["{:.0%}", "{:.0%}", *["{:.2f}"] * len(names), "{:.0%}"]
            cells = [form.format(value) for form, value in zip(forms, means, strict=True)]
            print(f"| {' | '.join([words, *cells])} |", flush=True)


def _figures(found: Sequence[examine.Answers]) -> list[float]:
    asked, built, correct, new = (
        sum(getattr(answers, part) for answers in found) for part in ("asked", "built", "correct", "novel_text")
    )
    medians = [median(answers.speedups) if answers.speedups else math.nan for answers in found]
    return [built / asked, correct / asked, *medians, new / correct if correct else math.nan]


if __name__ == "__main__":
    main()
