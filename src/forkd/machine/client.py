"""Talk to the executor inside the helper machine: one connection, one request.

`run` returns when the command has ended and all of its output has been passed
on.  Interrupting it closes the connection, upon which the executor kills the
command's process group.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forkd.errors import HostError, TransportError
from forkd.machine import executor as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

CONNECT_DEADLINE_S = 10.0
"""How long the machine may take to accept a connection."""

SIGNAL_EXIT_BASE = 128
"""A command that a signal ended has this plus the signal as exit code, as in a shell."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the executor is reached, and what it wants to hear.

    Attributes:
        port: On the host's loopback interface.
        token: Secret of this machine; never logged.
    """

    port: int
    token: str

    def __repr__(self) -> str:
        return f"Endpoint(port={self.port})"


def request(endpoint: Endpoint, message: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Send one request that has no streams, and return its REPLY.

    Raises:
        TransportError: The machine does not answer.
        HostError: It refused.
    """
    with connect(endpoint, message) as connection:
        connection.settimeout(timeout_s)
        try:
            kind, payload = _next(connection)
        except (OSError, wire.ProtocolError) as error:
            raise TransportError(f"the helper machine does not answer: {error}") from error
    return _reply(kind, payload)


def connect(endpoint: Endpoint, message: dict[str, Any]) -> socket.socket:
    """Open a connection, show the token, and send the request `message`.

    Raises:
        TransportError: Nobody listens.
    """
    try:
        connection = socket.create_connection(("127.0.0.1", endpoint.port), CONNECT_DEADLINE_S)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shown = wire.encode_json(wire.REQUEST, {"token": endpoint.token})
        connection.sendall(shown + wire.encode_json(wire.REQUEST, message))
    except OSError as error:
        raise TransportError(f"the helper machine cannot be reached: {error}") from error
    return connection


def exchange(
    connection: socket.socket, on_stdout: Callable[[bytes], object],
    on_stderr: Callable[[bytes], object],
) -> int:  # fmt: skip
    """Pass a command's output on until it ends; return its exit code."""
    while True:
        try:
            kind, payload = _next(connection)
        except (OSError, wire.ProtocolError) as error:
            raise TransportError(f"the helper machine went away: {error}") from error
        if kind == wire.STDOUT:
            on_stdout(payload)
        elif kind == wire.STDERR:
            on_stderr(payload)
        elif kind != wire.EVENT:
            return exit_code(_reply(kind, payload))


def exit_code(reply: dict[str, Any]) -> int:
    """Return what a shell would: the exit code, or 128 plus the signal."""
    code: int | None = reply["exit_code"]
    return code if code is not None else SIGNAL_EXIT_BASE + int(reply["signal"])


def feed(connection: socket.socket, descriptor: int) -> threading.Thread:
    """Start a thread that sends what `descriptor` yields as the command's input."""

    def pump() -> None:
        with suppress(OSError):
            while data := os.read(descriptor, wire.CHUNK_BYTES):
                connection.sendall(wire.encode(wire.STDIN, data))
            connection.sendall(wire.encode(wire.STDIN_EOF))

    thread = threading.Thread(target=pump, name="machine-stdin", daemon=True)
    thread.start()
    return thread


def exec_message(
    args: Sequence[str], *, env: Mapping[str, str], cwd: str, **options: object
) -> dict[str, Any]:
    """Return the request that runs `args`; `options` are `tty` or `log`."""
    return {"op": "exec", "args": list(args), "env": dict(env), "cwd": cwd, **options}


def _next(connection: socket.socket) -> tuple[int, bytes]:
    frame = wire.read_frame(connection)
    if frame is None:
        raise wire.ProtocolError("connection closed without a reply")
    return frame


def _reply(kind: int, payload: bytes) -> dict[str, Any]:
    message = wire.decode_json(payload)
    if kind == wire.ERROR:
        raise HostError(f"the helper machine refused: {message.get('message')}")
    return message
