"""A language model from scratch, in miniature: all stages on this CPU with measured rewards, and a table.

    python examples/miniature/run.py --out miniature --seeds 0 1 2

A model of half a million weights with random values and a tokenizer of its own is pretrained, fine-tuned, learns from
itself, and is trained by contrastive GRPO, all through `cuda-l2 train`. It writes whole candidate files of a small
family (kernels/). The best decile of the measured schedules and two shapes are in no training text. Interrupted, it
goes on. docs/learning.md has results.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads of torch would disturb timings

import examine
import teacher

from cuda_l2.archive import Archive
from cuda_l2.commands.train import TrainSettings
from cuda_l2.commands.train import command as train
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.records import Candidate, Gemm
from cuda_l2.rigs import Rig, open_rig

HERE = Path(__file__).parent
PROMPTS = HERE / "prompts"
SHAPES = ("48x192x128", "96x384x64")
HELD_SHAPES = ("72x192x96", "24x384x128")
SCHEDULES = 80
SFT_STEPS, OWN_STEPS, RL_STEPS = 150, 12, 40
ANSWERS = 16
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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with open_rig("cpu") as rig, Archive(given.out / "teacher.db") as archive:
        gemms = [Gemm.parse(shape) for shape in SHAPES]
        taught = teacher.measure(gemms, SCHEDULES, rig, archive)
        for seed in given.seeds:
            out = given.out / f"seed-{seed}"
            _train_and_examine(out, seed, taught, rig)
            _contest(out, taught, rig)
            _print(f"Seed {seed}", [out], taught)
    if len(given.seeds) > 1:
        _print(f"{len(given.seeds)} seeds", [given.out / f"seed-{seed}" for seed in given.seeds], taught)


def _train_and_examine(out: Path, seed: int, taught: teacher.Teacher, rig: Rig) -> None:
    out.mkdir(exist_ok=True)
    hold_out = out / "held.txt"
    hold_out.write_text("\n".join([*HELD_SHAPES, *(candidate.id for candidate in taught.held_out)]) + "\n")
    if not (out / "data" / "collected").exists():
        teacher.write_data(out / "data", taught, rig, PROMPTS, seed)
    for name in ("own", "rl", "control"):  # exemplars begin with what fine-tuning saw
        with Archive(out / f"{name}.db") as archive:
            if not archive.trials():
                for trials in taught.trials.values():
                    for trial in trials:
                        archive.append(trial)

    def stage(stage: str, name: str, model: str, *changes: str, data: str = "", archive: str = "rl") -> None:
        on_tasks = stage in ("self-supervised", "hgemm-rl")
        settings = TrainSettings(
            model=model if model == "scratch" else str(out / model / "model"),
            data=[out / "data" / data] if data else None,
            out=out / name,
            config=HERE / ("tasks.toml" if on_tasks else "small.toml"),
            set=[f"tuning.seed={seed}", *changes],
            archive=out / f"{archive}.db",
            target="cpu",
            hold_out=hold_out if on_tasks else None,
            prompts=PROMPTS,
        )
        train(list(SHAPES) if on_tasks else None, stage=stage, settings=settings)
        for shown in (0, 2):
            _examine(out, name, shown, archive if on_tasks else "", taught, rig, seed)

    stage("pretrain", "pretrained", "scratch", "tuning.batch=8", "tuning.micro_batch=8", data="corpus")
    stage("sft", "tuned", "pretrained", f"tuning.steps={SFT_STEPS}", data="collected")
    own = ["collecting.rounds=1", "collecting.tries=40", "collecting.keep=24", "tuning.learning_rate=2e-4"]
    stage("self-supervised", "own", "tuned", *own, f"tuning.steps={OWN_STEPS}", archive="own")
    rl = ["rl.group=8", "tuning.learning_rate=3e-4", f"tuning.steps={RL_STEPS}"]
    stage("hgemm-rl", "rl", "own", *rl)
    stage("hgemm-rl", "control", "own", *rl, "sampling.exemplars=0", archive="control")
    same = [f"tuning.steps={OWN_STEPS + RL_STEPS}", "tuning.learning_rate=3e-4"]
    stage("sft", "longer", "tuned", *same, data="collected")


def _examine(out: Path, name: str, shown: int, archive: str, taught: teacher.Teacher, rig: Rig, seed: int) -> None:
    path = out / f"{name}-{shown}.json"
    if path.exists():
        return
    gemms = [Gemm.parse(shape) for shape in (SHAPES if shown else (*SHAPES, *HELD_SHAPES))]
    histories = {gemm: list(trials) for gemm, trials in taught.trials.items()}
    if archive:
        with Archive(out / f"{archive}.db") as kept:
            held = {candidate.id for candidate in taught.held_out}
            for gemm in histories:
                found = kept.trials(gemm, rig.target.machine, SEARCH.name)
                histories[gemm] = [trial for trial in found if trial.candidate.id not in held]
    with Archive(out / "examined.db") as examined:
        found = examine.examine(
            out / name / "model",
            gemms,
            histories,
            taught,
            rig,
            examined,
            PROMPTS,
            answers=ANSWERS,
            exemplars=shown,
            seed=seed,
        )
    examine.save(path, found)


def _contest(out: Path, taught: teacher.Teacher, rig: Rig) -> None:
    """Time the best answers of all stages, and the best training kernels, beside one another; kept by shape and id."""
    path = out / CONTEST
    if not path.exists():
        found = [
            answers for name in NAMES for shown in (0, 2) for answers in examine.load(out / f"{name}-{shown}.json")
        ]
        timed = {}
        for shape in (*SHAPES, *HELD_SHAPES):
            bests = [Candidate(answers.best) for answers in found if answers.shape == shape and answers.best]
            timed[shape] = examine.contest(shape, [*taught.best(YARDSTICKS), *bests], rig)
        path.write_text(json.dumps(timed, indent=1) + "\n")


def _print(title: str, outs: Sequence[Path], taught: teacher.Teacher) -> None:
    training = [candidate.id for candidate in taught.best(YARDSTICKS)]
    for where, shapes, shown in (
        ("trained shapes", SHAPES, 0),
        ("trained shapes", SHAPES, 2),
        ("held-out shapes", HELD_SHAPES, 0),
    ):
        print(f"\n{title}, {where}, {shown} exemplars in the question:\n\n{examine.head()}")
        for name, words in NAMES.items():
            seeds = []
            for out in outs:
                timed = json.loads((out / CONTEST).read_text())
                seeds.append(examine.figures(examine.load(out / f"{name}-{shown}.json"), shapes, timed, training))
            print(examine.row(words, seeds), flush=True)


if __name__ == "__main__":
    main()
