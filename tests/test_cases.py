"""docs/cases.md: every situation names tests that exist."""

import ast
import re

import pytest
from drawing import ROOT

ROWS = [line for line in (ROOT / "docs" / "cases.md").read_text().splitlines() if re.match(r"\| \d+ \|", line)]


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip() for row in ROWS])
def test_the_tests_of_a_situation_exist(row) -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
    assert named
    for file, name in named:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], f"{file}::{name}"


def test_no_situation_is_missing() -> None:
    assert [int(row.split("|")[1]) for row in ROWS] == list(range(1, 15))
