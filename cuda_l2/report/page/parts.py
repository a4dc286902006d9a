"""What a page consists of: sections of text, figures and tables."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and the number behind it for sorting and CSV."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Table:
    """A table under its title, with a sentence on where its numbers come from."""

    id: str
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    kind: str = "table"

    @property
    def numbers(self) -> set[int]:
        """Columns that hold numbers, from 0 on."""
        return {at for row in self.rows for at, cell in enumerate(row) if cell.value is not None}


@dataclass(frozen=True)
class Figure:
    """An SVG element under its title, with the same."""

    title: str
    caption: str
    svg: str
    kind: str = "figure"


@dataclass(frozen=True)
class Text:
    text: str
    kind: str = "text"


@dataclass(frozen=True)
class Code:
    """A text in a fixed width, folded away under its title. Of a diff, lines that begin with + and - stand out."""

    title: str
    text: str
    diff: bool = False
    kind: str = "code"


Row = tuple[str | int | Cell, ...]
Part = Table | Figure | Text | Code


@dataclass
class Section:
    id: str
    title: str
    parts: list[Part] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether it holds nothing but sentences."""
        return all(isinstance(part, Text) for part in self.parts)


def table(id: str, title: str, caption: str, columns: Sequence[str], rows: Sequence[Row]) -> Table:
    """A table from texts, whole numbers and cells."""
    cells = tuple(tuple(_cell(each) for each in row) for row in rows)
    return Table(id, title, caption, tuple(columns), cells)


def percent(value: float, *, sign: bool = False) -> Cell:
    """A share, or with a sign a speedup - 1."""
    if math.isnan(value):
        return Cell("-")
    return Cell(f"{value:+.1%}" if sign else f"{value:.1%}", value)


def number(value: float | None, digits: int = 3) -> Cell:
    return Cell("-") if value is None or math.isnan(value) else Cell(f"{value:.{digits}f}", value)


def _cell(value: str | int | Cell) -> Cell:
    return value if isinstance(value, Cell) else Cell(str(value), value if isinstance(value, int) else None)
