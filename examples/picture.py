"""Turns what a command prints into a picture, as the README has one.

    FORCE_COLOR=1 cuda-l2 optimize 512x512x512 --budget 60s | python examples/picture.py docs/demo.svg

Reads the output from standard input, prints it, and writes an SVG that needs no font from elsewhere.
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text


def picture(output: str, title: str) -> str:
    """An SVG of a terminal's output, black on white."""
    text = Text.from_ansi(output.rstrip())
    width = max(line.cell_len for line in text.split())
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(text)
    svg = console.export_svg(title=title, theme=DEFAULT_TERMINAL_THEME, unique_id="output")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # fonts on somebody else's server


def main() -> None:
    path = Path(sys.argv[1])
    output = sys.stdin.read()
    print(output, end="")
    path.write_text(picture(output, "cuda-l2"))


if __name__ == "__main__":
    main()
