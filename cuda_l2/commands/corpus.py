"""cuda-l2 corpus: training text from the code that is installed here and your own."""

import contextlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from cuda_l2 import machine, tasks
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.settings import LANGUAGE_MODELS
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place
from cuda_l2.system.text import counted

if TYPE_CHECKING:
    from cuda_l2.corpus.build import Corpus
    from cuda_l2.llm.client import Client

SEGMENTS = "segments.jsonl"
"""A line for every window that a model read: its answer and the outcome."""
ABOUT = """\
Instruction-context-code triplets and plain text for training models that write CUDA kernels. Every row says where its
code comes from and under which licence; some licences forbid passing it on. docs/training.md of cuda-l2 describes the
columns."""


@dataclass(frozen=True)
class InstructionSettings(ModelSettings):
    """Settings of a model that is asked for a few words, not for whole files.

    A class of its own: one option on the command line would replace every other default of an instance.
    """

    prompt_tokens: int = 8_000
    """Approximate limit of a prompt in tokens."""
    answer_tokens: int = 1_000
    """Limit of an answer in tokens; a longer one is cut off."""


@Parameter(name="*")
@dataclass(frozen=True)
class CorpusSettings:
    """Sources of the corpus, and the model that works on it."""

    folder: Annotated[list[Path] | None, Parameter(negative=())] = None
    """A folder of code of your own; may be given several times."""
    only_folders: Annotated[bool, Parameter(negative=())] = False
    """Leave out the installed CUDA, CCCL, CUTLASS and ATen headers."""
    hold_out: Path | None = None
    """File of shapes, other tasks, kernels' ids, schedules and files that must not be in it, see docs/training.md."""
    rendered: int = 0
    """Number of kernels of our own families for each --shape, schedules drawn at random."""
    shape: Annotated[list[str] | None, Parameter(negative=())] = None
    """A shape for --rendered, or another task, as in softmax; may be given several times."""
    target: str = "auto"
    """Machine for --rendered: cpu, cuda, or auto for the GPU where there is one."""
    seed: int = 0
    """Seed of the schedules drawn."""
    policy: str = ""
    """A language model that words an instruction for every snippet and drops useless ones: openai:NAME@URL or
    hf:PATH_OR_ID. Without one, instructions come from comments and signatures."""
    segment: Literal["rules", "hard", "all"] = "rules"
    """How code is cut into snippets: by rules, by the model where rules cut badly (hard), or by the model alone (all),
    in windows of --prompt-tokens."""
    context_tokens: int = 1000
    """Tokens of retrieved context in a triplet; 0 for none."""
    archive: Place | None = None
    """File that keeps the exchanges with the model, or postgresql://USER@HOST/DATABASE. An answer in it is not asked
    for again."""
    model: Annotated[InstructionSettings, LANGUAGE_MODELS] = InstructionSettings()


def command(*, out: Path, settings: CorpusSettings = CorpusSettings()) -> None:
    """Write a dataset of instruction-context-code triplets, and the same code as plain text.

    Interrupted, it begins anew, but pays for no answer twice.

    Args:
        out: Folder of the dataset; one that this command made before is replaced.
    """
    from cuda_l2.corpus import dataset
    from cuda_l2.corpus.build import Rendered, build
    from cuda_l2.corpus.holdout import HoldOut
    from cuda_l2.report.live import bar
    from cuda_l2.retrieve.sources import installed_sources, user_sources

    if settings.rendered < 0 or settings.context_tokens < 0:
        raise UserError("--rendered and --context-tokens must not be negative")
    if bool(settings.rendered) != bool(settings.shape):
        raise UserError("--rendered and --shape go together, as in --rendered 100 --shape 512x512x512")
    if settings.segment != "rules" and not settings.policy:
        raise UserError(f"--segment {settings.segment} asks a model: name it with --policy, as in openai:MODEL@URL")
    wanted = [tasks.parse(shape) for shape in settings.shape or []]
    dataset.require_ours(out)
    hold_out = HoldOut.read(settings.hold_out)
    sources = user_sources(settings.folder or [])
    if not settings.only_folders:
        sources = [*installed_sources(), *sources]
    rendered = None
    if settings.rendered:
        rendered = Rendered(settings.rendered, wanted, machine.detect(settings.target), settings.seed)
    with _client(settings) if settings.policy else contextlib.nullcontext() as client:
        with bar("") as shown:
            row = shown.add_task("", total=None)
            made = build(
                sources,
                hold_out,
                client=client,
                segment=settings.segment,
                prompts=settings.model.prompts,
                context_tokens=settings.context_tokens,
                rendered=rendered,
                on_stage=lambda stage, done, of: shown.update(row, description=stage, completed=done, total=of),
            )
        dataset.write(out, {"triplets": made.triplets, "text": made.text}, ABOUT)
        dataset.write_lines(out / SEGMENTS, made.segmented or [])
        _say(made, out)
        if client is not None:
            print(client.summary())


def _client(settings: CorpusSettings) -> "Client":
    from cuda_l2.archive import Archive
    from cuda_l2.llm._base import open_model
    from cuda_l2.llm.client import Client
    from cuda_l2.llm.exchanges import ExchangeLog
    from cuda_l2.system import paths

    path = settings.archive or paths.default_archive()
    model = open_model(settings.policy, settings.model)
    Archive(path).close()  # makes the file
    return Client(model, ExchangeLog(path), settings.model, "instruct")


def _listed(counter: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items(), key=lambda pair: -pair[1]))


def _say(made: "Corpus", out: Path) -> None:
    counts = made.counts
    names = ("the same", "nearly the same", "held out", "of no use")
    dropped = dict(zip(names, (counts.same, counts.near, counts.held_out, counts.unworthy), strict=True))
    left_out = _listed({name: count for name, count in dropped.items() if count}) or "none"
    triplets, texts = counted(len(made.triplets), "triplet"), counted(len(made.text), "text")
    chars = sum(len(row["text"]) for row in made.text)
    print(f"{triplets} and {texts} of {chars / 1e6:.1f} million characters in {out}")
    print(f"  from {counted(counts.files, 'file')}: {_listed(made.by('source'))}")
    for what, column in (("kinds", "kind"), ("cut by", "cut_by"), ("instructions by", "worded_by")):
        print(f"  {what}: {_listed(made.by(column))}")
    print(f"  left out of {counts.found}: {left_out}")
    if made.segmented is not None:
        windows, outcomes = counted(len(made.segmented), "window"), Counter(line["outcome"] for line in made.segmented)
        print(f"  {windows} shown to the model: {_listed(outcomes)}; see {out / SEGMENTS}")
        refusals = Counter(reason for line in made.segmented for _, reason in line["refused"])
        if refusals:
            print(f"  pieces of its answers that were refused: {_listed(refusals)}")
