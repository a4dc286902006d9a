"""Turns a command's output into a picture, as the README has one.

    cuda-l2 optimize 512x512x512 --budget 60s | python examples/picture.py demo.svg "cuda-l2 optimize 512x512x512"

Reads the output from standard input; FORCE_COLOR=1 before the command keeps its colours. The SVG needs no font from
elsewhere.
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text


def picture(output: str, title: str) -> str:
    """An SVG of a terminal's output, dark on white, under a title."""
    text = Text.from_ansi(output.rstrip())
    width = max(line.cell_len for line in text.split())
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(text)
    svg = console.export_svg(title=title, theme=DEFAULT_TERMINAL_THEME, unique_id="output")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # on somebody else's server
    return svg.replace("Fira Code, monospace", "monospace")


if __name__ == "__main__":
    if len(sys.argv) != 3 or not (shown := sys.stdin.read()).strip():
        sys.exit("picture.py: give a file for the picture and a title, and the output on standard input")
    try:
        Path(sys.argv[1]).write_text(picture(shown, sys.argv[2]))
    except OSError as error:
        sys.exit(f"picture.py: {error}")
