"""Every cheat and fault of the corpus goes the whole way: build, verify, measure."""

import platform
import re
from pathlib import Path

import pytest
from conftest import CHEATS
from drawing import cases, is_honest

SHAPE = "45x40x64"

pytestmark = pytest.mark.usefixtures("many_launches")


@pytest.mark.corpus(8)
@pytest.mark.parametrize("path", cases(sorted(CHEATS.glob("*.c")), is_honest, lambda path: path.stem))
def test_a_cheat_ends_as_its_file_says(path, judge) -> None:
    source = path.read_text()
    if "x86-64 only" in source and platform.machine() != "x86_64":
        pytest.skip("holds x86-64 machine code")
    expected = re.search(r"expect: ([\w -]+?) \*/", source).group(1).split()
    trial = judge(source, SHAPE)
    assert trial.status in expected, trial.reason
    if trial.status != "measured":
        assert trial.reason
        assert trial.speedup == 0.0
        assert trial.reward < 0


def test_no_reason_leaks_the_private_file(judge) -> None:
    secret = Path("/etc/passwd").read_text().splitlines()[0]
    for path in CHEATS.glob("private_*.c"):
        trial = judge(path.read_text(), SHAPE)
        assert secret not in trial.reason + trial.build.log


def test_a_wrong_element_is_named(judge) -> None:
    trial = judge((CHEATS / "zero_shortcut.c").read_text(), SHAPE)
    assert trial.verdict.element is not None
    assert str(trial.verdict.element) in trial.reason
