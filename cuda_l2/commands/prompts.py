"""cuda-l2 prompts: the prompt templates, for a user to change, and what a prompt's parts take."""

from pathlib import Path
from typing import Annotated

from cuda_l2 import tasks
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.settings import LANGUAGE_MODELS
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place


def command(
    folder: Path | None = None,
    /,
    *,
    measure: str | None = None,
    policy: str = "",
    target: str = "auto",
    archive: Place | None = None,
    model: Annotated[ModelSettings, LANGUAGE_MODELS] = ModelSettings(),
) -> None:
    """Write the templates of what language models are asked; change them and give the folder to --prompts.

    Or measure a prompt: the characters and tokens of each part, and what is left out.

    Args:
        folder: Where to write them; refused where one of the files is there already.
        measure: A shape as in 512x512x512, or another task: print the sizes of a prompt for it, with the archive's
            exemplars.
        policy: The model whose tokens are counted and whose window counts, as hf:PATH; else a token is three
            characters.
        target: Machine that kernels are written for: cpu, cuda, or auto for the GPU where there is one.
        archive: File that keeps the trials, or postgresql://USER@HOST/DATABASE.
    """
    if (folder is None) == (measure is None):
        raise UserError("give a folder to write the templates to, or --measure and a task, as in 512x512x512")
    if measure is not None:
        _measure(measure, policy, target, archive, model)
        return

    from cuda_l2.corpus.asking import packaged_templates
    from cuda_l2.propose._prompt import copy_templates

    assert folder is not None
    for path in copy_templates(folder, packaged_templates()):
        print(path)


def _measure(shape: str, policy: str, target: str, archive: Place | None, settings: ModelSettings) -> None:
    from cuda_l2 import machine
    from cuda_l2.archive import Archive
    from cuda_l2.measure.protocols import SEARCH
    from cuda_l2.propose._measured import measured
    from cuda_l2.system import paths
    from cuda_l2.system.text import counted

    task = tasks.parse(shape, machine.chosen(target))
    here, path, history = machine.detect(target), archive or paths.default_archive(), []
    if path.exists():
        with Archive(path, reading=True) as opened:
            history = opened.trials(task, here.machine, SEARCH.name)
    found = measured(task, here, history, settings, policy)
    print(f"{'part':24}  characters  tokens")
    for name, (characters, tokens) in found.sizes.items():
        print(f"{name:24}  {characters:10,}  {tokens:6,}")
    window = f", of a window of {found.window:,}" if found.window else ""
    left_out = ", ".join(counted(count, name.removesuffix("s")) for name, count in found.left_out.items())
    print(f"a first question may have {found.limit:,} tokens{window}; left out: {left_out or 'nothing'}")
    if found.defaults:
        print("the exemplars are the default kernels, which a search tries first; the archive has none for this task")
    if not policy:
        print("tokens are estimated, at three characters; --policy counts them as a model does")
