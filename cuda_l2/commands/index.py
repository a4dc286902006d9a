"""cuda-l2 index: let models read the headers that are installed here."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cuda_l2.system.text import counted


def command(
    *,
    folder: Annotated[list[Path] | None, Parameter(negative=())] = None,
    anew: Annotated[bool, Parameter(negative=())] = False,
    query: str | None = None,
) -> None:
    """Build or refresh the index of CUDA, CCCL, CUTLASS and ATen headers, and of your own folders.

    Prompts to language models quote from it. Only files that changed are read again; an interrupted run goes on.

    Args:
        folder: A folder of code of your own; may be given several times. Folders of the last run that are not given
            again are taken out.
        anew: Throw the index away first.
        query: Afterwards, show what the index finds for these words.
    """
    from cuda_l2.report.live import bar
    from cuda_l2.retrieve.index import Index, Progress, index_folder, refresh
    from cuda_l2.retrieve.sources import installed_sources, user_sources

    sources = [*installed_sources(), *user_sources(folder or [])]
    with bar("files") as shown:
        row = shown.add_task("reading", total=None)

        def show(progress: Progress) -> None:
            shown.update(row, completed=progress.done, total=progress.files)

        progress = refresh(sources, show, anew=anew)
    names = ", ".join(dict.fromkeys(source.name for source in sources))
    print(
        f"{counted(progress.pieces, 'piece')} of {counted(progress.files, 'file')} ({names}); {progress.read} read,"
        f" {progress.removed} gone; in {index_folder()}"
    )
    if query is not None:
        for piece in Index().search(query):
            print(f"\n{piece.name}, line {piece.line}, score {piece.score:.1f}\n{piece.text}")
