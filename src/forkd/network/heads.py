"""Heads of HTTP requests and answers: where secrets are put in, and taken out; pure."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from forkd.model.secret import Bound

Header: TypeAlias = tuple[bytes, bytes]
"""Name and value."""

_BASIC = re.compile(rb"basic +([A-Za-z0-9+/=]+) *", re.IGNORECASE)
_NAME_GOES_ON = rb"(?![a-z0-9._-])"

BAD_REQUEST, FORBIDDEN, MISDIRECTED, NOT_IMPLEMENTED = 400, 403, 421, 501


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request goes nowhere.

    Attributes:
        status: Of the answer.
        reason: One sentence for whoever reads it in the guest.
    """

    status: int
    reason: str


def refusal(
    method: bytes, target: bytes, headers: Sequence[Header], name: str, port: int
) -> Refusal | None:
    """Return why a request does not go to the host that its connection was made for, if so.

    Args:
        method: Of the request.
        target: Likewise.
        headers: Likewise.
        name: For which host the connection was made, in lower case.
        port: To which port.
    """
    if method == b"CONNECT":
        return Refusal(NOT_IMPLEMENTED, "CONNECT is not for here")
    if not target.startswith(b"/") and target != b"*":
        return Refusal(BAD_REQUEST, "the target of a request must be a path")
    if {b"content-length", b"transfer-encoding"} <= {key.lower() for key, _ in headers}:
        return Refusal(BAD_REQUEST, "a request must say in one way only how long it is")
    hosts = [value.strip() for key, value in headers if key.lower() == b"host"]
    if len(hosts) != 1:
        return Refusal(BAD_REQUEST, "a request must have one Host")
    host, _, given = hosts[0].decode("latin-1").lower().partition(":")
    if host.removesuffix(".") != name or given not in {"", str(port)}:
        return Refusal(MISDIRECTED, f"this connection was made for {name}, and for no other host")
    return None


def place(headers: Iterable[Header], secrets: Sequence[Bound]) -> tuple[list[Header], bool]:
    """Return headers with values in the place of placeholders, and whether there were any.

    Each value goes into its secret's header only.  What is encoded in `Authorization: Basic` is
    looked at, too.
    """
    placed, any_ = [], False
    for name, value in headers:
        meant = [each for each in secrets if each.secret.header.lower().encode() == name.lower()]
        new = _placed(value, meant) if meant else value
        any_ = any_ or new != value
        placed.append((name, new))
    return placed, any_


def without_compression(headers: Iterable[Header]) -> list[Header]:
    """Return headers of a request whose answer is to be one that can be searched."""
    kept = [each for each in headers if each[0].lower() != b"accept-encoding"]
    return [*kept, (b"Accept-Encoding", b"identity")]


def is_searchable(headers: Iterable[Header]) -> bool:
    """Whether the body of an answer is there as it is, and not compressed."""
    named = b"content-encoding"
    codings = [value.strip().lower() for name, value in headers if name.lower() == named]
    return all(each in {b"", b"identity"} for each in codings)


def mask(headers: Iterable[Header], secrets: Sequence[Bound]) -> list[Header]:
    """Return headers of an answer with placeholders in the place of values.

    What names other ways to the server is left out: they do not lead here.
    """
    masked = []
    for name, value in headers:
        if name.lower() == b"alt-svc":
            continue
        new = value
        for each in secrets:
            new = new.replace(_value(each), each.secret.placeholder.encode())
        masked.append((name, new))
    return masked


class BodyMask:
    """Takes values out of a body that comes in pieces.

    What is put in the place of each has its length, so that the length of the body stays.  Nothing
    is held back but what may be the beginning of a value.
    """

    def __init__(self, secrets: Sequence[Bound]) -> None:
        self._masks = [(_value(each), _cover(each)) for each in secrets]
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what can go on, of what came before and of `data`."""
        data = self._held + data
        for value, cover in self._masks:
            data = data.replace(value, cover)
        kept = max((_beginning(data, value) for value, _ in self._masks), default=0)
        cut = len(data) - kept
        data, self._held = data[:cut], data[cut:]
        return data

    def end(self) -> bytes:
        """Return the rest."""
        held, self._held = self._held, b""
        return held


def _beginning(data: bytes, value: bytes) -> int:
    """Return how much of the end of `data` is the beginning of `value`, but not all of it."""
    at = data.find(value[:1], max(0, len(data) - len(value) + 1))
    while at >= 0:
        if value.startswith(data[at:]):
            return len(data) - at
        at = data.find(value[:1], at + 1)
    return 0


def _placed(value: bytes, secrets: Sequence[Bound]) -> bytes:
    basic = _BASIC.fullmatch(value)
    if basic is None:
        return _replaced(value, secrets)
    try:
        plain = base64.b64decode(basic[1], validate=True)
    except binascii.Error:
        return value
    new = _replaced(plain, secrets)
    return value if new == plain else b"Basic " + base64.b64encode(new)


def _replaced(text: bytes, secrets: Sequence[Bound]) -> bytes:
    """Replace whole placeholders: one that is the beginning of a longer name is another's."""
    values = {each.secret.placeholder.encode(): _value(each) for each in secrets}
    longest_first = sorted(map(re.escape, values), key=len, reverse=True)
    pattern = b"(" + b"|".join(longest_first) + b")" + _NAME_GOES_ON
    return re.sub(pattern, lambda found: values[found[1]], text)


def _value(bound: Bound) -> bytes:
    return bound.value.reveal().encode()


def _cover(bound: Bound) -> bytes:
    length = len(_value(bound))
    return bound.secret.placeholder.encode()[:length].ljust(length, b"*")
