"""Frames of the executor: the same as protocol/guest has, over any stream."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from forkd.machine import executor
from forkd.machine.executor import FRAME_PAYLOAD_MAX, REPLY, STDOUT, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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


def stranger() -> contextlib.ExitStack:
    return contextlib.ExitStack()


def answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    kind, payload = executor.read_frame(connection) or (0, b"{}")
    return kind, executor.decode_json(payload)


def test_a_wrong_token_is_refused_before_anything_else(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].sendall(executor.encode_json(executor.REQUEST, {"token": "guess"}))
    pair[0].sendall(executor.encode_json(executor.REQUEST, {"op": "ping"}))

    executor.handle(pair[1], "secret", stranger())

    kind, said = answer(pair[0])
    assert (kind, said["code"]) == (executor.ERROR, "denied")


def test_who_has_shown_no_token_may_send_a_small_frame_only(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    padding = "x" * executor.TOKEN_FRAME_MAX
    pair[0].sendall(executor.encode_json(executor.REQUEST, {"token": "secret", "x": padding}))

    executor.handle(pair[1], "secret", stranger())

    kind, said = answer(pair[0])
    assert (kind, said["code"]) == (executor.ERROR, "invalid_request")


def test_who_sends_bit_by_bit_has_one_deadline_for_the_whole_frame(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    frame = executor.encode(executor.REQUEST, b"x" * 100)
    ended = threading.Event()

    def trickle() -> None:
        for byte in frame:
            if ended.wait(0.05):
                return
            pair[0].sendall(bytes([byte]))

    sender = threading.Thread(target=trickle)
    sender.start()
    try:
        with pytest.raises(TimeoutError):
            executor.read_frame(pair[1], deadline_s=0.2)
    finally:
        ended.set()
        sender.join()


def test_strangers_past_the_limit_are_closed_and_do_not_end_the_service() -> None:
    strangers = executor.Strangers(most=1)
    first, second, third = socket.socketpair(), socket.socketpair(), socket.socketpair()
    with first[0], second[0], third[0]:
        strangers.serve(first[1], "secret")
        strangers.serve(second[1], "secret")
        assert second[0].recv(1) == b""  # there is one place only

        first[0].sendall(executor.encode_json(executor.REQUEST, {"token": "secret"}))
        first[0].sendall(executor.encode_json(executor.REQUEST, {"op": "ping"}))
        assert answer(first[0])[0] == executor.REPLY  # it has given its place back

        strangers.serve(third[1], "secret")
        third[0].sendall(executor.encode_json(executor.REQUEST, {"token": "secret"}))
        third[0].sendall(executor.encode_json(executor.REQUEST, {"op": "ping"}))
        assert answer(third[0])[0] == executor.REPLY


def test_a_thread_that_cannot_be_started_costs_one_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    strangers = executor.Strangers(most=1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        refused = socket.socketpair()
        with refused[0]:
            strangers.serve(refused[1], "secret")
            assert refused[0].recv(1) == b""

    later = socket.socketpair()
    with later[0]:
        strangers.serve(later[1], "secret")
        later[0].sendall(executor.encode_json(executor.REQUEST, {"token": "guess"}))
        assert answer(later[0])[1]["code"] == "denied"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_file_that_is_no_program_is_refused_with_the_reason(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path, *, terminal: bool
) -> None:
    program = tmp_path / "no-program"
    program.write_bytes(b"\x7fELF and nothing else")
    program.chmod(0o755)
    cwd = str(tmp_path / "missing") if terminal else str(tmp_path)
    size = {"tty": {"rows": 24, "columns": 80}} if terminal else {}
    request = {"op": "exec", "args": [str(program)], "cwd": cwd, **size}
    pair[0].sendall(executor.encode_json(executor.REQUEST, {"token": "secret"}))
    pair[0].sendall(executor.encode_json(executor.REQUEST, request))

    executor.handle(pair[1], "secret", stranger())

    kind, said = answer(pair[0])
    assert (kind, said["code"]) == (executor.ERROR, "exec_failed")
    assert "No such file" in said["message"] if terminal else "Exec format" in said["message"]
