"""The frames of the guest and control protocols, without I/O.

A frame is an 8-byte header (length, kind, three zero bytes) and a payload.
`protocol/guest/PROTOCOL.md` is the contract; its vectors are replayed by the tests.
"""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn, cast

from forkd.errors import EngineError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forkd.model.json import JsonObject, JsonValue

FRAME_PAYLOAD_MAX = 1_048_576
"""Longest payload of a frame, by contract; a longer one is the peer's fault, or ours."""

HEADER_BYTES = 8
_HEADER = struct.Struct("<IB3s")
_RESERVED = b"\0\0\0"


class Kind(IntEnum):
    """What a frame carries."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    EVENT = 4
    CONTROL = 5
    STDIN = 16
    STDIN_EOF = 17
    STDOUT = 18
    STDERR = 19
    DATA = 32
    DATA_EOF = 33


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame.

    Attributes:
        kind: What it carries.
        payload: At most `FRAME_PAYLOAD_MAX` bytes.
    """

    kind: Kind
    payload: bytes

    def members(self) -> JsonObject:
        """Return the payload as a JSON object.

        What a peer says may be said on, so surrogates without their other half, which JSON can
        write and UTF-8 cannot, are replaced.

        Raises:
            EngineError: It is none, or is nested deeper than can be read.
        """
        try:
            value: JsonValue = json.loads(self.payload, parse_constant=_no_number)
            if b"\\u" in self.payload:
                text = json.dumps(value, ensure_ascii=False).encode(errors="replace")
                value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"a {self.kind.name} frame does not hold JSON: {error}") from error
        if not isinstance(value, dict):
            raise EngineError(f"a {self.kind.name} frame has no JSON object")
        return value


def _no_number(name: str) -> NoReturn:
    """Refuse what Python reads as a number and JSON does not have."""
    raise ValueError(f"{name} is no number of JSON")


def encode(kind: Kind, payload: bytes = b"") -> bytes:
    """Return the bytes of one frame.

    Raises:
        EngineError: The payload exceeds `FRAME_PAYLOAD_MAX`.
    """
    if len(payload) > FRAME_PAYLOAD_MAX:
        raise EngineError(
            f"a frame of {len(payload)} bytes exceeds the limit of {FRAME_PAYLOAD_MAX}"
        )
    return _HEADER.pack(len(payload), kind, _RESERVED) + payload


def encode_json(kind: Kind, members: Mapping[str, object]) -> bytes:
    """Return the bytes of one frame that holds a JSON object.

    Raises:
        EngineError: It exceeds `FRAME_PAYLOAD_MAX`.
        InvalidRequest: It holds text that UTF-8 cannot say.
    """
    try:
        payload = _dumped(members)
    except UnicodeEncodeError:
        try:
            payload = _dumped(_with_bytes(members))
        except UnicodeEncodeError as error:
            words = "text must be Unicode without surrogates that stand for no byte"
            raise InvalidRequest(words) from error
    return encode(kind, payload)


def _dumped(members: object) -> bytes:
    return json.dumps(members, separators=(",", ":"), ensure_ascii=False).encode()


def _with_bytes(value: object) -> object:
    """Return `value` with the bytes of each text that UTF-8 cannot say (PEP 383) in its place."""
    match value:
        case str():
            data = value.encode(errors="surrogateescape")
            return value if value.isascii() or _is_utf8(data) else {"b64": b64encode(data).decode()}
        case dict():
            return {name: _with_bytes(each) for name, each in value.items()}
        case list():
            return [_with_bytes(each) for each in value]
        case _:
            return value


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def decode_header(header: bytes) -> tuple[Kind, int]:
    """Return the kind and the payload's length that `HEADER_BYTES` bytes announce.

    Raises:
        EngineError: The length is past the limit, the kind is unknown, or a reserved
            byte is not zero.
    """
    length, kind, reserved = cast("tuple[int, int, bytes]", _HEADER.unpack(header))
    if length > FRAME_PAYLOAD_MAX:
        raise EngineError(f"a peer sent a frame of {length} bytes, past {FRAME_PAYLOAD_MAX}")
    if reserved != _RESERVED:
        raise EngineError("a peer sent a frame whose reserved bytes are not zero")
    try:
        return Kind(kind), length
    except ValueError:
        raise EngineError(f"a peer sent a frame of the unknown kind {kind}") from None


class FrameDecoder:
    """Cuts a stream of bytes into frames, however it arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending(self) -> bool:
        """Whether a part of a frame was fed."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """Take more of the stream; return the frames that are complete now.

        Raises:
            EngineError: The stream breaks the contract; it cannot be read on.
        """
        self._buffer += data
        frames = []
        while len(self._buffer) >= HEADER_BYTES:
            kind, length = decode_header(bytes(self._buffer[:HEADER_BYTES]))
            end = HEADER_BYTES + length
            if len(self._buffer) < end:
                break
            frames.append(Frame(kind, bytes(self._buffer[HEADER_BYTES:end])))
            del self._buffer[:end]
        return frames
