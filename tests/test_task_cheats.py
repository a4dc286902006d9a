"""Every cheat and control for tasks other than matrix products goes the whole way: build, verify, measure."""

import re
from pathlib import Path

import pytest
from drawing import cases, is_honest

CHEATS = Path(__file__).with_name("task_cheats")

pytestmark = pytest.mark.usefixtures("many_launches")


@pytest.mark.corpus(6)
@pytest.mark.parametrize("path", cases(sorted(CHEATS.glob("*.c")), is_honest, lambda path: path.stem))
def test_a_cheat_ends_as_its_file_says(path, judge) -> None:
    source = path.read_text()
    task = re.search(r"\* task: (\S+)", source).group(1)
    expected = re.search(r"expect: ([\w -]+?) \*/", source).group(1).split()
    trial = judge(source, task)
    assert trial.status in expected, trial.reason
    if trial.status != "measured":
        assert trial.reason and trial.speedup == 0.0 and trial.reward < 0
