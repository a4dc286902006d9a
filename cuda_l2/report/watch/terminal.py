"""The sections in a terminal, anew every second; elsewhere once."""

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text as Words

from cuda_l2.measure.clock import CLOCK, Clock
from cuda_l2.report.page.parts import Code, Part, Section, Table, Text
from cuda_l2.report.watch.watcher import EVERY_S, Watcher


def follow(watcher: Watcher, console: Console | None = None, clock: Clock = CLOCK) -> None:
    """Show until Ctrl-C. Where the output is no terminal: what there is now."""
    console = console or Console()
    if not console.is_terminal:
        console.print(rendered(watcher.look()))
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(rendered(watcher.look()), refresh=True)  # what is below the screen is cut
            clock.sleep(EVERY_S)


def rendered(sections: list[Section]) -> Group:
    """Sections for a console."""
    parts: list[RenderableType] = []
    for section in sections:
        parts.append(Words(section.title, style="bold underline"))
        parts += [shown for part in section.parts if (shown := _part(part)) is not None]
        parts.append("")
    return Group(*parts)


def _part(part: Part) -> RenderableType | None:
    """A part; None for figures. Nothing of it is read as rich's markup."""
    if isinstance(part, Text):
        return Words(part.text)
    if isinstance(part, Table):
        grid = Grid(title=Words(part.title), caption=Words(part.caption), box=None, pad_edge=False)
        grid.title_justify = grid.caption_justify = "left"
        for at, name in enumerate(part.columns):
            numbers = any(row[at].value is not None for row in part.rows)
            grid.add_column(Words(name), justify="right" if numbers else "left", overflow="fold")
        for row in part.rows:
            grid.add_row(*(Words(cell.text) for cell in row))
        return grid
    if isinstance(part, Code):
        return Group(Words(part.title, style="bold"), Words(part.text))
    return None
