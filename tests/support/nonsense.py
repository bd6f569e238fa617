"""Answers of the fake VMM that make no sense, one at a time; a file says which, and what instead.

`spoil` has the next answer of a kind spoilt, `said` lists the answers that were given.  The fake
VMM's processes find the files beside their program, so that nothing has to be handed down to what
they fork.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkd.engine.frames import Frame, Kind, encode
from tests.support.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Members = dict[str, Any]

SPOILT, SAID = "spoilt.json", "said.jsonl"
MARK = "\0nonsense\0"


@dataclass(frozen=True, slots=True)
class Answer:
    """A kind of answer.

    Attributes:
        op: What was asked; `start` for the first line of a program, `boot` for what an agent says
            when it has booted.
        kind: Of the frame; `LINE` for a line.
        event: The member of that name; None without.
    """

    op: str
    kind: str
    event: str | None

    def __str__(self) -> str:
        return f"the {self.event or self.kind} to {self.op}"


@dataclass(frozen=True, slots=True)
class Nonsense:
    """What is said instead of an answer.

    Attributes:
        name: What it is, in a word or two.
        member: Which member has another value, from the outside in; empty for none.
        json: That value, as JSON; None to leave the member out.
        data: What is sent instead of the whole answer, in base 64; None for the answer.
        closes: Whether the connection is closed after it.
    """

    name: str
    member: tuple[str | int, ...] = ()
    json: str | None = None
    data: str | None = None
    closes: bool = False


# In the test


@contextlib.contextmanager
def spoil(folder: Path, answer: Answer, nonsense: Nonsense) -> Iterator[None]:
    """Have one answer spoilt within the block."""
    spoilt = folder / SPOILT
    spoilt.write_text(json.dumps({"answer": asdict(answer), "nonsense": asdict(nonsense)}))
    try:
        yield
    finally:
        spoilt.unlink(missing_ok=True)


def is_spoilt(folder: Path) -> bool:
    """Whether the answer that was to be spoilt has been given."""
    return not (folder / SPOILT).exists()


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[dict[Answer, Members]]:
    """Give, after the block, each kind of answer that was given, with the first of its members."""
    said, found = folder / SAID, dict[Answer, Members]()
    said.touch()
    yield found
    for line in said.read_text().splitlines():
        one = json.loads(line)
        found.setdefault(Answer(**one["answer"]), one["members"])
    said.unlink()


# In the fake VMM


def spoken(answer: Answer, members: Members, whole: Callable[[bytes], bytes]) -> tuple[bytes, bool]:
    """Return what is to be sent of an answer, and whether to hang up then.

    Args:
        answer: What it is.
        members: What is in it.
        whole: Makes an answer of JSON.
    """
    folder = Path(sys.argv[0]).parent
    _note(folder / SAID, answer, members)
    nonsense = _taken(folder / SPOILT, answer)
    if nonsense is not None and nonsense.data is not None:
        return base64.b64decode(nonsense.data), nonsense.closes
    if nonsense is not None and nonsense.member:
        return whole(_changed(members, nonsense)), nonsense.closes
    return whole(json.dumps(members).encode()), nonsense is not None and nonsense.closes


class Speaker(Peer):
    """The other end of a connection, whose answers may be spoilt."""

    op = ""

    def receive(self) -> Frame | None:
        frame = super().receive()
        if frame is not None and frame.kind is Kind.REQUEST:
            self.op = str(frame.members()["op"])
        return frame

    def send(self, kind: Kind, members: Members) -> None:
        answer = Answer(self.op, kind.name, _event(members))
        data, closes = spoken(answer, members, lambda payload: encode(kind, payload))
        self.send_bytes(data)
        if closes:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


def say(members: Members) -> None:
    """Print the line that a program begins with."""
    answer = Answer("start", "LINE", _event(members))
    line, closes = spoken(answer, members, lambda text: text + b"\n")
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
    if closes:
        os.close(sys.stdout.fileno())


def _event(members: Members) -> str | None:
    event = members.get("event")
    return event if isinstance(event, str) else None


def _note(said: Path, answer: Answer, members: Members) -> None:
    if said.exists():
        with said.open("a") as file:
            file.write(json.dumps({"answer": asdict(answer), "members": members}) + "\n")


def _taken(spoilt: Path, answer: Answer) -> Nonsense | None:
    """Return what is to be said instead of an answer; the first who asks gets it."""
    try:
        wanted = json.loads(spoilt.read_text())
    except (FileNotFoundError, ValueError):
        return None
    if Answer(**wanted["answer"]) != answer:
        return None
    try:
        spoilt.unlink()
    except FileNotFoundError:
        return None
    return Nonsense(**{**wanted["nonsense"], "member": tuple(wanted["nonsense"]["member"])})


def _changed(members: Members, nonsense: Nonsense) -> bytes:
    """Return the JSON of an answer with one member changed, which may be no JSON then."""
    copy: Any = json.loads(json.dumps(members))
    inner, last = copy, nonsense.member[-1]
    for part in nonsense.member[:-1]:
        inner = inner[part]
    if nonsense.json is None:
        del inner[last]
        return json.dumps(copy).encode()
    inner[last] = MARK
    return json.dumps(copy).replace(json.dumps(MARK), nonsense.json).encode()
