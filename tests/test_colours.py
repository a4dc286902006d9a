"""The pages' colours: each stands out from the background, and the colour-blind too can distinguish each pair."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from cuda_l2.report.page import plots

CSS = (Path(plots.__file__).parent / "page.css").read_text()
SIGHT = {
    "normal": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""How linear RGB is seen without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1)."""


def colours(theme: int) -> dict[str, np.ndarray]:
    """Linear RGB by variable. theme: 0 light, 1 dark."""
    written = re.findall(r":root \{(.*?)\}", CSS, re.S)[theme]
    found = {}
    for name, text in re.findall(r"--(\w+): #(\w{6})", written):
        srgb = np.array([int(text[at : at + 2], 16) for at in (0, 2, 4)]) / 255
        found[name] = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    return found


def contrast(one: np.ndarray, other: np.ndarray) -> float:
    low, high = sorted(float(colour @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(colour: np.ndarray) -> np.ndarray:
    """OKLab, in which distances are about as they are seen."""
    cones = np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]) @ colour
    to_lab = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]
    return np.array(to_lab) @ np.cbrt(np.maximum(cones, 0))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_lines_of_figures_stand_out(theme: int) -> None:
    found = colours(theme)
    for name in ("ink", "soft", "link"):
        assert contrast(found[name], found["back"]) >= 4.5 and contrast(found[name], found["panel"]) >= 4.5
    for name in ("s0", "s1", "s2", "s3"):
        assert contrast(found[name], found["back"]) >= 3


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
def test_what_a_colour_says_is_seen_without_a_kind_of_cone(theme: int, sight: str) -> None:
    found = {name: lab(np.clip(SIGHT[sight] @ colour, 0, 1)) for name, colour in colours(theme).items()}

    def apart(a: str, b: str) -> float:
        return float(np.linalg.norm(found[a] - found[b]))

    assert apart("s0", "s1") > 0.1  # the two modes of bars; the best so far and its candidates
    heat = [f"h{number}" for number in range(len(plots.BOUNDS) + 1)]
    assert min(itertools.starmap(apart, itertools.pairwise(heat))) > 0.05
    lost, won = heat[:3], heat[4:]
    assert min(apart(a, b) for a, b in itertools.product(lost, won)) > 0.1
