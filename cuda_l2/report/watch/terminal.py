"""The sections in a terminal, anew every second; elsewhere once."""

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text as Styled

from cuda_l2.measure.clock import CLOCK, Clock
from cuda_l2.report.page.parts import Code, Part, Section, Table, Text
from cuda_l2.report.watch.watcher import EVERY_S, Watcher
from cuda_l2.system.text import plain


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
        parts.append(_words(section.title, style="bold underline"))
        parts += [shown for part in section.parts if (shown := _part(part)) is not None]
        parts.append("")
    return Group(*parts)


def _words(text: str, style: str = "") -> Styled:
    """A text of others: neither rich nor the terminal obeys anything in it."""
    return Styled(plain(text), style=style)


def _part(part: Part) -> RenderableType | None:
    """A part; None for figures."""
    if isinstance(part, Text):
        return _words(part.text)
    if isinstance(part, Table):
        grid = Grid(title=_words(part.title), caption=_words(part.caption), box=None, pad_edge=False)
        grid.title_justify = grid.caption_justify = "left"
        for at, name in enumerate(part.columns):
            justify: JustifyMethod = "right" if at in part.numbers else "left"
            grid.add_column(_words(name), justify=justify, overflow="fold")
        for row in part.rows:
            grid.add_row(*(_words(cell.text) for cell in row))
        return grid
    if isinstance(part, Code):
        return Group(_words(part.title, style="bold"), _words(part.text))
    return None
