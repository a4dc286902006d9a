"""cuda-l2 report: one HTML page of results folders and archives."""

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cuda_l2.commands._options import tell
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import write_text
from cuda_l2.system.place import is_there

LARGE_BYTES = 5_000_000
ADVICE = "choose another place, or --force to replace it"


def command(
    *results: Path,
    out: Annotated[Path, Parameter(name=("--out", "-o"))] = Path("report.html"),
    force: Annotated[bool, Parameter(negative=())] = False,
    pictures: Path | None = None,
) -> None:
    """Show results as one HTML page: the papers' tables and figures, a card for every shape. It needs no network.

    Args:
        results: Folders of results, files of them (table.csv, table.parquet, results.jsonl, verification.json and
            others), and archives.
        out: The page.
        force: Replace the page and the pictures where they are there.
        pictures: Folder for the page's main figures as SVG files of their own, in light and dark colours: sizes.svg and
            baselines.svg of products beside baselines, models.svg of a model's steps.
    """
    for path in results:
        if not is_there(path):
            raise UserError(f"{path} is not there: name a folder of results, a file of one, or an archive")

    from cuda_l2.report.page.pictures import NAMES, drawn
    from cuda_l2.report.page.reading import read
    from cuda_l2.report.page.whole import html

    for path in () if force else (out, *[pictures / name for name in NAMES if pictures]):
        if path.exists():
            raise UserError(f"{path} is there: {ADVICE}")
    words = ["cuda-l2", "report", *map(str, results), "-o", out.name]
    found = read(results)
    text = html(found, shlex.join(words))
    write_text(out, text, ADVICE, new=not force)  # by now another report may be there
    if pictures:
        for name, svg in drawn(found).items():
            write_text(pictures / name, svg, ADVICE, new=not force)
    size = len(text.encode())
    print(f"{out}: {size / 1e6:.1f} MB")
    if size > LARGE_BYTES:
        tell("more than 5 MB: give fewer folders for a page that opens fast on a phone")
