"""cuda-l2 report: one HTML page of results folders and archives."""

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cuda_l2.commands._options import tell
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import write_text

LARGE_BYTES = 5_000_000


def command(
    *results: Path,
    out: Annotated[Path, Parameter(name=("--out", "-o"))] = Path("report.html"),
    force: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Show results as one HTML page: the papers' tables and figures, a card for every shape. It needs no network.

    Parameters
    ----------
    results
        Folders of results, files of them (table.csv, table.parquet, results.jsonl, verification.json and others), and
        archives.
    out
        The page.
    force
        Replace the page where it is there.
    """
    if out.exists() and not force:
        raise UserError(f"{out} is there: choose another file with --out, or --force to replace it")
    from cuda_l2.report.page.reading import read
    from cuda_l2.report.page.whole import html

    words = ["cuda-l2", "report", *map(str, results), "-o", out.name]
    text = html(read(results), shlex.join(words))
    write_text(out, text)
    size = len(text.encode())
    print(f"{out}: {size / 1e6:.1f} MB")
    if size > LARGE_BYTES:
        tell("more than 5 MB: give fewer folders for a page that opens fast on a phone")
