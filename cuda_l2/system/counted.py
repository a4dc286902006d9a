"""Numbers with their nouns."""


def counted(number: int, one: str, many: str = "") -> str:
    """As in 1 shape, 2 shapes, 1,000 tokens; many: the plural where it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
