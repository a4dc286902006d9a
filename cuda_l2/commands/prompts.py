"""cuda-l2 prompts: the prompt templates, for a user to change."""

from pathlib import Path


def command(folder: Path, /) -> None:
    """Write the templates of what language models are asked; change them and give the folder to --prompts.

    Parameters
    ----------
    folder
        Where to write them; files that are there are left alone.
    """
    from cuda_l2.corpus.asking import packaged_templates
    from cuda_l2.propose._prompt import copy_templates

    for path in copy_templates(folder, packaged_templates()):
        print(path)
