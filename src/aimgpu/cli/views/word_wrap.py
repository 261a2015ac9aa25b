"""Text that comes in parts, written without breaking words at the edge of a terminal."""

import re
import sys
from shutil import get_terminal_size

import click

from aimgpu.cli.output import is_terminal

_PIECE = re.compile(r"\n|[^\S\n]+|\S+")
_FENCE = "```"
_LEAST_COLUMNS = 20


class WordWrap:
    """A word is held back until its end is known; code between fences keeps its lines, and a pipe gets what came."""

    def __init__(self, columns: int | None = None) -> None:
        self._columns = columns if columns is not None else get_terminal_size().columns if is_terminal() else 0
        self._held = ""
        self._column = 0
        self._space = ""
        self._in_code = False

    def write(self, part: str) -> None:
        """Show all of it but its last word."""
        if self._columns < _LEAST_COLUMNS:
            self._echo(part)
            return
        pieces = _PIECE.findall(self._held + part)
        self._held = pieces.pop() if pieces and not pieces[-1].isspace() else ""
        for piece in pieces:
            self._put(piece)
        sys.stdout.flush()

    def finish(self) -> None:
        """The last word, and the end of the line."""
        if self._held:
            self._put(self._held)
        self._held = ""
        self._echo("\n")

    def _put(self, piece: str) -> None:
        if piece == "\n":
            self._echo(piece)
            self._column, self._space = 0, ""
        elif piece.isspace():
            self._space += piece
        else:
            if piece.startswith(_FENCE):
                self._in_code = not self._in_code
            if self._column and not self._in_code and self._column + len(self._space) + len(piece) > self._columns:
                self._echo("\n")
                self._column, self._space = 0, ""
            self._echo(self._space + piece)
            self._column, self._space = self._column + len(self._space) + len(piece), ""

    def _echo(self, text: str) -> None:
        click.echo(text, nl=False)
        sys.stdout.flush()
