"""A warm runtime as a process of this host, spoken to as the agent does.

`protocol/runtime/CONTRACT.md` is what it has to do; `contract/test_runtimes.py` asks it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REQUEST, REPLY, ERROR, CONTROL, DATA = 1, 2, 3, 5, 32

HEADER = struct.Struct("<IB3x")

DEADLINE_S = 20.0
"""How long a runtime may take for anything, on a slow host."""


SOCKET_FD = 3
"""The number of a runtime's socket.  Node.js hides from its children what is below 16."""

INTERRUPT_EVERY_S, INTERRUPTS_MAX = 1.0, 5
"""As the agent's."""


class GoneError(Exception):
    """The runtime has ended."""


@dataclass
class Answer:
    """What came of one request.

    Attributes:
        kind: REPLY or ERROR.
        body: Its JSON.
        stdout: What was written before it.
        stderr: The same.
    """

    kind: int
    body: dict[str, Any]
    stdout: str
    stderr: str


@dataclass
class _Output:
    file: int
    data: bytearray = field(default_factory=bytearray)

    def take(self) -> bool:
        """Read what there is; False at the end, or when nothing is left."""
        try:
            chunk = os.read(self.file, 1 << 16)
        except BlockingIOError:
            return False
        self.data += chunk
        return bool(chunk)

    def text(self) -> str:
        """Return what was read, and forget it."""
        text = self.data.decode()
        self.data.clear()
        return text


def _moved(fd: int, command: Sequence[str]) -> Sequence[str]:
    """Return a command that has a descriptor as `SOCKET_FD`, and no longer under its number."""
    if fd == SOCKET_FD:
        return command
    return ["/bin/bash", "-c", f'exec {SOCKET_FD}<&{fd} {fd}<&-; exec "$0" "$@"', *command]


class RuntimeProcess:
    """One runtime, from its start to the end of a `with` block."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        outputs = [os.pipe(), os.pipe()]
        self.process = subprocess.Popen(  # noqa: S603 - the test's own command
            _moved(theirs.fileno(), [*command, str(SOCKET_FD)]),
            stdin=subprocess.DEVNULL,
            stdout=outputs[0][1],
            stderr=outputs[1][1],
            pass_fds=[theirs.fileno()],
            process_group=0,
            env=env,
        )
        theirs.close()
        self._received = bytearray()
        self._outputs = []
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._socket, selectors.EVENT_READ)
        for ours, their_end in outputs:
            os.close(their_end)
            os.set_blocking(ours, False)
            self._ready.register(ours, selectors.EVENT_READ)
            self._outputs.append(_Output(ours))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        self._ready.close()
        self._socket.close()
        for output in self._outputs:
            os.close(output.file)

    def send(self, kind: int, payload: bytes) -> None:
        """Send one frame."""
        self._socket.sendall(HEADER.pack(len(payload), kind) + payload)

    def ask(self, op: str, **members: object) -> Answer:
        """Make a request and take its answer."""
        self.send(REQUEST, json.dumps({"op": op, **members}).encode())
        return self.answer()

    def start(self, code: str) -> None:
        """Have code evaluated, and do not wait."""
        self.send(DATA, code.encode())

    def eval(self, code: str) -> Answer:
        """Have code evaluated."""
        self.start(code)
        return self.answer()

    def eval_in(self, context: str, code: str) -> Answer:
        """Have code evaluated in a context."""
        return self.ask("eval", code=code, context=context)

    def interrupt(self, *, told: bool = True) -> None:
        """Interrupt as the agent does; not `told`: as any other program would."""
        if told:
            self.send(CONTROL, b'{"interrupt": true}')
        os.kill(self.process.pid, signal.SIGINT)

    def interrupted(self, *, told: bool = True) -> Answer:
        """Interrupt what runs, each second anew as the agent does, and return its answer."""
        self.interrupt(told=told)
        for _ in range(INTERRUPTS_MAX - 1):
            if self._ready.select(INTERRUPT_EVERY_S):
                break
            os.kill(self.process.pid, signal.SIGINT)
        return self.answer()

    def hang_up(self) -> int:
        """Close the socket; return the exit status."""
        self._socket.shutdown(socket.SHUT_RDWR)
        return self.process.wait(DEADLINE_S)

    def answer(self) -> Answer:
        """Return the next answer; messages of other kinds are passed over.

        Raises:
            GoneError: It has ended.
        """
        while True:
            kind, payload = self._frame()
            if kind in {REPLY, ERROR}:
                break
        for output in self._outputs:
            while output.take():
                pass
        stdout, stderr = (output.text() for output in self._outputs)
        return Answer(kind, json.loads(payload), stdout, stderr)

    def wait_for_output(self, text: str) -> None:
        """Wait until standard output has this, though no answer has come."""
        limit = time.monotonic() + DEADLINE_S
        while text.encode() not in self._outputs[0].data:
            self._wait(limit)
            assert len(self._received) == 0, "it answered"

    def _frame(self) -> tuple[int, bytes]:
        limit = time.monotonic() + DEADLINE_S
        while True:
            if len(self._received) >= HEADER.size:
                length, kind = HEADER.unpack_from(self._received)
                end = HEADER.size + length
                if len(self._received) >= end:
                    payload = bytes(self._received[HEADER.size : end])
                    del self._received[:end]
                    return kind, payload
            self._wait(limit)

    def _wait(self, limit: float) -> None:
        ready = self._ready.select(limit - time.monotonic())
        if not ready:
            raise TimeoutError("the runtime says nothing")
        for key, _ in ready:
            if key.fileobj is self._socket:
                try:
                    chunk = self._socket.recv(1 << 16)
                except ConnectionResetError:
                    chunk = b""
                if not chunk:
                    raise GoneError(f"it ended with {self.process.wait(DEADLINE_S)}")
                self._received += chunk
            else:
                output = next(each for each in self._outputs if each.file == key.fd)
                if not output.take():
                    self._ready.unregister(output.file)
