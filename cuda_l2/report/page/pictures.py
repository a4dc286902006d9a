"""Figures as SVG files of their own, for a README.

A file has its own background, and takes the reader's light or dark colours. A forge's theme may differ from the
system's that decides here: then the picture is a panel of the other theme, and can be read all the same.
"""

import re

from cuda_l2.report.page import plots
from cuda_l2.report.page.published import COLUMNS
from cuda_l2.report.page.records import Found
from cuda_l2.report.page.studies import MAX, Study, comparisons, headline, label, ratios, spread, studies
from cuda_l2.report.page.templates import HERE
from cuda_l2.system.errors import UserError

WIDTH_PT, HEIGHT = 640, 2.2
"""Size of a picture in points, and in inches at a width of 4.4."""


def sizes(found: Found) -> str:
    """Speedup of every shape against its size, of the first study."""
    study = _study(found)
    against, pairs = headline(study.main)
    points = [
        plots.Point((case.gemm.m * case.gemm.n * case.gemm.k).bit_length() - 1, ratio.estimate, "", "")
        for case, ratio in pairs
        if case.gemm
    ]
    title = f"{study.device}: speedup over {against} of {len(points)} shapes"
    return _alone(plots.scatter("sizes", title, "log2(M N K)", "speedup", points, log=False, height=HEIGHT))


def baselines(found: Found) -> str:
    """Mean speedup over each of the paper's baselines, the faster layout of both sides, in two modes."""
    study = _study(found)
    means: dict[str, dict[str, float]] = {}
    for mode, cases in list(study.modes.items())[:2]:
        for kind, way in comparisons(cases):
            pairs = ratios(cases, kind, way) if (kind, way) in COLUMNS and way in ("", MAX) else []
            if pairs:
                means.setdefault(label(kind, ""), {})[mode] = spread([ratio for _, ratio in pairs]).mean
    return _alone(plots.bars("baselines", f"{study.device}: mean speedup over each baseline", list(means.items())))


def _study(found: Found) -> Study:
    for study in studies(found.cases):
        if headline(study.main)[1]:
            return study
    raise UserError("the results hold no matrix products timed beside baselines, so there is nothing to draw")


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
