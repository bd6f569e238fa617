"""Frames of the executor: the same as protocol/guest has, over any stream."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from forkd.machine import executor
from forkd.machine.executor import FRAME_PAYLOAD_MAX, REPLY, STDOUT, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def test_a_frame_reads_as_it_was_written(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(executor.encode(STDOUT, b"text") + executor.encode_json(REPLY, {"a": 1}))

    assert executor.read_frame(pair[1]) == (STDOUT, b"text")
    assert executor.read_frame(pair[1]) == (REPLY, b'{"a": 1}')


def test_the_end_between_frames_is_not_an_error(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].close()

    assert executor.read_frame(pair[1]) is None


@pytest.mark.parametrize("sent", [b"\x04\x00\x00", b"\x04\x00\x00\x00\x12\x00\x00\x00te"])
def test_the_end_inside_a_frame_is_an_error(
    pair: tuple[socket.socket, socket.socket], sent: bytes
) -> None:
    pair[0].sendall(sent)
    pair[0].close()

    with pytest.raises(ProtocolError, match="inside a frame"):
        executor.read_frame(pair[1])


@pytest.mark.parametrize(
    "header",
    [
        executor.HEADER.pack(FRAME_PAYLOAD_MAX + 1, STDOUT, b"\0\0\0"),
        executor.HEADER.pack(0, STDOUT, b"\0\0\x01"),
    ],
)
def test_a_header_past_the_limit_or_with_reserved_bits_is_refused(
    pair: tuple[socket.socket, socket.socket], header: bytes
) -> None:
    pair[0].sendall(header)

    with pytest.raises(ProtocolError, match="malformed"):
        executor.read_frame(pair[1])


def test_a_payload_may_be_at_the_limit_and_not_past_it() -> None:
    assert len(executor.encode(STDOUT, bytes(FRAME_PAYLOAD_MAX))) == FRAME_PAYLOAD_MAX + 8
    with pytest.raises(ProtocolError):
        executor.encode(STDOUT, bytes(FRAME_PAYLOAD_MAX + 1))


@pytest.mark.parametrize("payload", [b"{", b"[]", b"\xff"])
def test_a_payload_that_is_no_json_object_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        executor.decode_json(payload)


def test_a_wrong_token_is_refused_before_anything_else(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].sendall(executor.encode_json(executor.REQUEST, {"op": "ping", "token": "guess"}))

    executor.handle(pair[1], "secret")

    kind, payload = executor.read_frame(pair[0]) or (0, b"")
    assert (kind, executor.decode_json(payload)["code"]) == (executor.ERROR, "denied")
