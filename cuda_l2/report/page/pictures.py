"""Figures as SVG files of their own, for a README.

A file has its own background, and takes the reader's light or dark colours. A forge's theme may differ from the
system's that decides here: then the picture is a panel of the other theme, and can be read all the same.
"""

import re

from cuda_l2.report.page import models, plots
from cuda_l2.report.page.published import COLUMNS
from cuda_l2.report.page.records import Found
from cuda_l2.report.page.studies import MAX, Study, comparisons, headline, label, ratios, spread, studies
from cuda_l2.report.page.templates import HERE
from cuda_l2.system.errors import UserError

WIDTH_PT, HEIGHT = 640, 2.2
"""Size of a picture in points, and in inches at a width of 4.4."""


NAMES = ("sizes.svg", "baselines.svg", "models.svg")


def drawn(found: Found) -> dict[str, str]:
    """The pictures that results allow, by file name; UserError where they allow none."""
    study = next((each for each in studies(found.cases) if headline(each.main)[1]), None)
    draw = {NAMES[0]: _sizes(study), NAMES[1]: _baselines(study)} if study else {}
    if found.models:
        rows = [row for each in found.models for row in each.rows]
        draw[NAMES[2]] = models.bars("models", found.models[0].origin.device, rows)
    if not draw:
        raise UserError("the results hold no matrix products timed beside baselines and no model: nothing is drawn")
    return {name: _alone(svg) for name, svg in draw.items()}


def _sizes(study: Study) -> str:
    """Speedup of every shape against its size, of the first study."""
    against, pairs = headline(study.main)
    points = [
        plots.Point((case.gemm.m * case.gemm.n * case.gemm.k).bit_length() - 1, ratio.estimate, "", "")
        for case, ratio in pairs
        if case.gemm
    ]
    title = f"{study.device}: speedup over {against} of {len(points)} shapes"
    return plots.scatter("sizes", title, "log2(M N K)", "speedup", points, log=False, height=HEIGHT)


def _baselines(study: Study) -> str:
    """Mean speedup over each of the paper's baselines, the faster layout of both sides, in two modes."""
    means: dict[str, dict[str, float]] = {}
    for mode, cases in list(study.modes.items())[:2]:
        for kind, way in comparisons(cases):
            pairs = ratios(cases, kind, way) if (kind, way) in COLUMNS and way in ("", MAX) else []
            if pairs:
                means.setdefault(label(kind, ""), {})[mode] = spread([ratio for _, ratio in pairs]).mean
    return plots.bars("baselines", f"{study.device}: mean speedup over each baseline", list(means.items()))


def _alone(svg: str) -> str:
    """An element of a page as a file: the page's colours, a background, a size."""
    style = (HERE / "page.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", style, re.S)[:2]
    rules = (
        f"svg{{{light}color:var(--ink);font-family:system-ui,sans-serif}}"
        f"@media (prefers-color-scheme:dark){{svg{{{dark}}}}}"
    )
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert box
    size = f'width="{WIDTH_PT}" height="{WIDTH_PT * float(box[2]) / float(box[1]):.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}'
    back = '<rect width="100%" height="100%" rx="6" fill="var(--back)"/>'
    return re.sub(r"<svg([^>]*)>", lambda m: f"{head}{m[1]}><style>{rules}</style>{back}", svg, count=1) + "\n"
