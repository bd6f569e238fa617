"""The name that a TLS client asks for (SNI), read from its first message; pure.

Only as much is understood as that takes (RFC 8446, section 4.1.2; RFC 6066, section 3): records
that hold the handshake message ClientHello, and in it one extension.
"""

from __future__ import annotations

import re
from enum import Enum

HELLO_BYTES_MAX = 16 * 1024
"""Longest ClientHello that is looked at, its records included."""

_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
_RECORD_HEAD, _MESSAGE_HEAD, _RANDOM = 5, 4, 32
_LABEL = rb"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rb"%b(?:\.%b)*" % (_LABEL, _LABEL))
_NAME_BYTES_MAX = 253


class Unfinished(Enum):
    """The message is longer than what has come of it."""

    UNFINISHED = "unfinished"


UNFINISHED = Unfinished.UNFINISHED


class _CutError(Exception):
    """A length leads beyond the end."""


class _Bytes:
    """Bytes that are taken from their start."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise _CutError
        taken, self._at = self._data[self._at : end], end
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size: int) -> bytes:
        """Take what a length of `size` bytes announces."""
        return self.take(self.number(size))

    @property
    def is_over(self) -> bool:
        return self._at == len(self._data)


def server_name(data: bytes) -> str | Unfinished | None:
    """Return the name in the beginning of a connection, in lower case.

    None if it is no TLS, names nobody, or is malformed; `UNFINISHED` if more has to come first.
    """
    try:
        message = _message(data)
    except _CutError:
        return UNFINISHED if len(data) < HELLO_BYTES_MAX else None
    if message is None:
        return None
    try:
        return _name_in(_Bytes(message))
    except _CutError:
        return None


def _message(data: bytes) -> bytes | None:
    """Return the body of the ClientHello, out of as many records as it takes."""
    records, message = _Bytes(data), b""
    while True:
        if not data.startswith(bytes([_HANDSHAKE])) or (len(data) > 1 and data[1] != 3):  # noqa: PLR2004 - SSL 3 and TLS
            return None
        if records.number(1) != _HANDSHAKE:
            return None
        records.take(2)
        message += records.vector(2)
        if message[:1] not in {b"", bytes([_CLIENT_HELLO])}:
            return None
        if len(message) >= _MESSAGE_HEAD:
            end = _MESSAGE_HEAD + int.from_bytes(message[1:_MESSAGE_HEAD])
            if len(message) >= end:
                return message[_MESSAGE_HEAD:end]


def _name_in(hello: _Bytes) -> str | None:
    hello.take(2 + _RANDOM)  # version and random
    for size in (1, 2, 1):  # session, cipher suites, compression methods
        hello.vector(size)
    if hello.is_over:
        return None
    extensions = _Bytes(hello.vector(2))
    while not extensions.is_over:
        kind, body = extensions.number(2), _Bytes(extensions.vector(2))
        if kind != _SERVER_NAME:
            continue
        names = _Bytes(body.vector(2))
        while not names.is_over:
            what, name = names.number(1), names.vector(2).lower().removesuffix(b".")
            if what == _HOST_NAME:
                fits = len(name) <= _NAME_BYTES_MAX and _NAME.fullmatch(name)
                return name.decode() if fits else None
    return None
