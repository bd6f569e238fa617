"""Spoil what machines and their agents answer: each member of each answer, and whole answers.

Which answers there are is found by running a step over the fake VMM, which notes what it says;
which of forkd's types reads one is seen in `Reply.read`, so that members that the fake leaves out
are spoilt too.
"""

from __future__ import annotations

import base64
import contextlib
import json
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel

from forkd.engine.frames import FRAME_PAYLOAD_MAX, Kind, encode, encode_json
from forkd.engine.replies import Reply
from forkd.errors import Denied, Forbidden, ForkdError
from tests.support.nonsense import Answer, Nonsense, is_spoilt, spoil

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.fault_world import World
    from tests.support.faults import Injector

Members = dict[str, Any]
Place = tuple[str | int, ...]

VALUES: dict[str, str | None] = {
    "left out": None,
    "null": "null",
    "true": "true",
    "zero": "0",
    "minus one": "-1",
    "half": "0.5",
    "2^63": str(1 << 63),
    "infinite": "1e400",
    "no number": "NaN",
    "5,000 digits": "9" * 5_000,
    "empty": '""',
    "long": json.dumps("x" * 70_000),
    "half a surrogate": '"\\ud800"',
    "a path": '"../../../etc/passwd"',
    "list": "[]",
    "deep": "[" * 20_000 + "]" * 20_000,
    "object": "{}",
    "many": json.dumps([{}] * 20_000),
}
"""What a member is instead, as JSON."""

IGNORED = {"event", "id"}
"""Members of events without which these mean nothing and may be ignored.  What should have come is
then waited for, longer than a trial takes; so the connection ends after them, as after `JUNK`."""

JUNK: dict[str, bytes] = {
    "garbage": b"\xff" * 64,
    "too long": struct.pack("<IB3s", FRAME_PAYLOAD_MAX + 1, Kind.REPLY, bytes(3)),
    "unknown kind": struct.pack("<IB3s", 2, 99, bytes(3)) + b"{}",
    "reserved bytes": struct.pack("<IB3s", 2, Kind.REPLY, b"\1\0\0") + b"{}",
    "no JSON": encode(Kind.REPLY, b"{"),
    "no UTF-8": encode(Kind.REPLY, b'{"a": "\xff"}'),
    "a list": encode(Kind.REPLY, b"[]"),
    "nothing in it": encode(Kind.REPLY),
    "an event": encode(Kind.EVENT, b"{}"),
    "an unknown event": encode_json(Kind.EVENT, {"event": "ended"}),
    "a failed child": encode_json(
        Kind.EVENT,
        {"event": "failed", "id": "sb-nobody", "stage": "agent", "code": "x", "message": "x"},
    ),
    "data": encode(Kind.DATA, b"data"),
    "end of data": encode(Kind.DATA_EOF),
    "output": encode(Kind.STDOUT, b"output"),
    "a request": encode_json(Kind.REQUEST, {"op": "ping"}),
    "an error": encode_json(Kind.ERROR, {"code": "state", "message": "no"}),
    "an error without a code": encode(Kind.ERROR, b"{}"),
    "an unknown error": encode_json(Kind.ERROR, {"code": "\n" * 200, "message": "\0" * 60_000}),
    "an error with a list": encode_json(Kind.ERROR, {"code": ["io"], "message": {}}),
    "an error of a number": encode_json(Kind.ERROR, {"code": "io", "message": "m", "field": 1}),
}
"""What is said instead of an answer."""

LINES: dict[str, bytes] = {
    "nothing": b"\n",
    "no JSON": b"{\n",
    "no object": b"[]\n",
    "a number": b"9" * 5_000 + b"\n",
    "deep": b"[" * 20_000 + b"]" * 20_000 + b"\n",
    "no line": b"{}",
    "no UTF-8": b'{"event": "\xff"}\n',
    "long": b"x" * (17 << 20) + b"\n",
    "another event": b'{"event": "ready"}\n',
    "failed": b'{"event": "failed"}\n',
    "failed oddly": b'{"event": "failed", "code": [], "message": 1}\n',
    "failed unknown": b'{"event": "failed", "code": "?", "message": "\\ud800"}\n',
}
"""What a program says first instead of its line."""


@dataclass
class Readings:
    """Notes which type reads which members within the block.

    Attributes:
        found: Each type, with what it read and what was asked.
    """

    found: list[tuple[type[Reply], Members]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._read = read = Reply.__dict__["read"]
        note = self.found.append

        def noted(cls: type[Reply], members: Members, asked: str) -> Reply:
            note((cls, members))
            answer: Reply = read.__func__(cls, members, asked)
            return answer

        setattr(Reply, "read", classmethod(noted))  # noqa: B010 - mypy knows what it was
        return self

    def __exit__(self, *_: object) -> None:
        setattr(Reply, "read", self._read)  # noqa: B010

    def optional(self, members: Members) -> set[str]:
        """Return what the type that reads an answer would take, and the answer leaves out."""
        kinds = {cls for cls, read in self.found if read == members}
        return {name for cls in kinds for name in cls.model_fields} - members.keys()


@dataclass(frozen=True, slots=True)
class Spoilt:
    """A step in which one answer makes no sense."""

    step: str
    answer: Answer
    nonsense: Nonsense

    def __str__(self) -> str:
        return f"{self.nonsense.name} as {self.answer}, in {self.step!r}"

    @contextlib.contextmanager
    def going_wrong(self, injector: Injector, world: World) -> Iterator[None]:
        """Have it answered within the block."""
        with spoil(world.fake.folder, self.answer, self.nonsense):
            yield
            injector.fired = is_spoilt(world.fake.folder)

    def judge(self, outcome: ForkdError | str | None) -> str | None:
        """Return what is wrong with how the request has ended; None if nothing is."""
        if not isinstance(outcome, ForkdError):
            return outcome
        return f"it ended with {outcome!r}" if isinstance(outcome, (Denied, Forbidden)) else None


def spoilt_of(
    step: str, said: dict[Answer, Members], readings: Readings, decoy: int
) -> Iterator[Spoilt]:
    """Yield each answer of a step with each member spoilt, and spoilt as a whole.

    Args:
        step: The step.
        said: What is answered in it.
        readings: Which types read that.
        decoy: A process that is none of forkd's.
    """
    for answer, members in said.items():
        for place in (*places(members), *((name,) for name in readings.optional(members))):
            lies = {"somebody's": str(decoy)} if place[-1] == "pid" else {}
            for name, value in {**VALUES, **lies}.items():
                if value is None and place[-1] not in members and len(place) == 1:
                    continue
                where = ".".join(map(str, place))
                ignored = answer.event is not None and place[-1] in IGNORED
                nonsense = Nonsense(f"{where} {name}", place, value, closes=ignored)
                yield Spoilt(step, answer, nonsense)
        whole = LINES if answer.kind == "LINE" else JUNK
        for name, data in whole.items():
            text = base64.b64encode(data).decode()
            yield Spoilt(step, answer, Nonsense(name, data=text, closes=True))
        yield Spoilt(step, answer, Nonsense("nothing more", closes=True, data=""))
        yield Spoilt(
            step, answer, Nonsense("half", closes=True, data=base64.b64encode(b"\x20\0\0").decode())
        )


def places(value: object, above: Place = ()) -> Iterator[Place]:
    """Yield where each member of an answer is, those within others too."""
    inner: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value[:1]))
    for name, each in inner:
        yield (*above, name)
        yield from places(each, (*above, name))


def types_read(readings: list[tuple[type[Reply], Members]]) -> set[type[Reply]]:
    """Return the types that have read something, those within others too."""
    found: set[type[Reply]] = set()
    for cls, _ in readings:
        found |= _within(cls)
    return found


def _within(cls: type[BaseModel]) -> set[type[Reply]]:
    found: set[type[Reply]] = {cls} if issubclass(cls, Reply) else set()
    for each in cls.model_fields.values():
        for inner in _models(each.annotation):
            found |= _within(inner)
    return found


def _models(annotation: Any) -> Iterator[type[BaseModel]]:  # noqa: ANN401 - a type
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models(argument)
