"""system/text.py: one of a thing is not several."""

import pytest

from cuda_l2.system.text import counted


@pytest.mark.parametrize(
    ("number", "nouns", "said"),
    [
        (0, ("answer",), "0 answers"),
        (1, ("answer",), "1 answer"),
        (2, ("answer",), "2 answers"),
        (1, ("try", "tries"), "1 try"),
        (3, ("try", "tries"), "3 tries"),
        (1234, ("token",), "1,234 tokens"),
    ],
)
def test_a_noun_agrees_with_its_number(number, nouns, said) -> None:
    assert counted(number, *nouns) == said
