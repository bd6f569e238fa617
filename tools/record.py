"""Record forkd in a terminal as a picture that moves: `docs/assets/terminal.svg`.

    forkd up && forkd snapshot create numpy --recipe python-numpy
    python -m tools.record

It types `COMMANDS` into a shell, waits for each to end, and keeps what the terminal showed, at the
times when it did.  The picture needs no script; where it cannot move, it shows the end.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

PICTURE = Path(__file__).resolve().parent.parent / "docs/assets/terminal.svg"

COMMANDS = (
    "forkd run numpy -- uname -sr",
    "forkd fork numpy --name work",
    "forkd eval work 'x = numpy.arange(5); x.sum()'",
    "forkd branch work -n 2",
    "forkd eval work 'x *= 10; x.sum()'",
    "for id in $(forkd ls -q); do forkd eval $id 'x.sum()'; done",
    "forkd tree work",
    "forkd kill $(forkd ls -q)",
)

PROMPT = "$ "
SHELL = ("/bin/dash", "-i", "+m")

TYPING_S = 0.03
READING_S = 0.7
END_S = 4.0
COMMAND_TIMEOUT_S = 120.0
STEP_S = 0.15
"""What a line gets within this time is shown at once."""

SHOWN_AT_ONCE_S = 0.01

FONT_PX, LINE_PX, MARGIN_PX, COLUMNS_MIN = 14, 20, 16, 80
CHARACTER_PX = 0.6 * FONT_PX

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\x07\r]")
"""What a terminal does not show."""

HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{width}} {{height}}" role="img">
<title>forkd in a terminal</title>
<desc>{{desc}}</desc>
<style>
text {{{{ font: {FONT_PX}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; \
fill: #d6deeb; white-space: pre }}}}
.panel {{{{ fill: #0b1521 }}}}
</style>
<rect class="panel" width="{{width}}" height="{{height}}" rx="8">
<animate id="loop" attributeName="x" values="0" begin="0s;loop.end" dur="{{duration}}s"/>
</rect>
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that came at once, without what a terminal does not show."""

    at_s: float
    text: str


class Shell:
    """A shell in a terminal of its own, as a context.

    Attributes:
        pieces: What it has shown.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._ours, theirs = os.openpty()
        self._process = subprocess.Popen(  # noqa: S603 - ours
            SHELL,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "PS1": PROMPT, "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(theirs)
        self._began = time.monotonic()
        self.pieces: list[Piece] = []

    def __enter__(self) -> Self:
        self._until_prompt()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._ours)
        self._process.wait()

    def run(self, command: str) -> None:
        """Type a command, and wait until it has ended and was read.

        Raises:
            TimeoutError: It does not end.
        """
        self._take(READING_S)
        for character in command:
            os.write(self._ours, character.encode())
            self._take(TYPING_S)
        os.write(self._ours, b"\n")
        self._until_prompt()

    def _until_prompt(self) -> None:
        shown, limit = "", time.monotonic() + COMMAND_TIMEOUT_S
        while not (shown == PROMPT or shown.endswith(f"\n{PROMPT}")):
            if time.monotonic() > limit:
                raise TimeoutError(f"a command does not end: {shown}")
            before = len(self.pieces)
            self._take(TYPING_S)
            shown += "".join(each.text for each in self.pieces[before:])

    def _take(self, for_s: float) -> None:
        limit = time.monotonic() + for_s
        while (left_s := limit - time.monotonic()) > 0:
            if select.select([self._ours], [], [], left_s)[0]:
                data = os.read(self._ours, 65_536).decode(errors="replace")
                at_s = time.monotonic() - self._began
                self.pieces.append(Piece(at_s, CONTROL.sub("", data)))


def record(commands: Sequence[str], environment: dict[str, str]) -> list[Piece]:
    """Run commands one after the other, and return what the terminal showed."""
    with Shell(environment) as shell:
        for command in commands:
            shell.run(command)
        return shell.pieces


def spans(pieces: Sequence[Piece]) -> list[tuple[int, int, Piece]]:
    """Return text by its line and column; what came within `STEP_S` on one line is one piece."""
    found: list[tuple[int, int, Piece]] = []
    line = column = 0
    for piece in pieces:
        for number, text in enumerate(piece.text.split("\n")):
            line, column = (line + 1, 0) if number else (line, column)
            last = found[-1] if found else None
            if last is not None and last[0] == line and piece.at_s - last[2].at_s < STEP_S:
                found[-1] = (line, last[1], Piece(last[2].at_s, last[2].text + text))
            elif text:
                found.append((line, column, Piece(piece.at_s, text)))
            column += len(text)
    return found


def drawn(pieces: Sequence[Piece], commands: Sequence[str]) -> str:
    """Return the picture: each text is hidden from the beginning until it came."""
    placed = spans(pieces)
    columns = max(COLUMNS_MIN, *(column + len(piece.text) for _, column, piece in placed))
    duration_s = max(piece.at_s for _, _, piece in placed) + END_S
    head = HEAD.format(
        width=round(columns * CHARACTER_PX) + 2 * MARGIN_PX,
        height=(placed[-1][0] + 1) * LINE_PX + 2 * MARGIN_PX,
        duration=f"{duration_s:.2f}",
        desc=escape(f"A shell runs {'; '.join(commands)}. Nothing was cut from the time."),
    )
    return head + "".join(_text(*each) for each in placed) + "</svg>\n"


def _text(line: int, column: int, piece: Piece) -> str:
    x, y = MARGIN_PX + column * CHARACTER_PX, MARGIN_PX + line * LINE_PX + FONT_PX
    until = (
        f'<set attributeName="visibility" to="hidden" begin="loop.begin" dur="{piece.at_s:.2f}s"/>'
        if piece.at_s >= SHOWN_AT_ONCE_S
        else ""  # no animation lasts for no time
    )
    return f'<text x="{x:g}" y="{y}">{escape(piece.text)}{until}</text>\n'


def main() -> int:
    """Record, and write the picture; return the exit status."""
    folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    pieces = record(COMMANDS, environment)
    PICTURE.write_text(drawn(pieces, COMMANDS), encoding="utf-8")
    sys.stdout.write(f"{PICTURE}: {pieces[-1].at_s:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
