"""Run commands inside the helper machine for clients outside it.

This file is started by path as the machine's one service, by the host's own
Python over a shared file system, before anything else can be assumed to work.
So it imports the standard library only, and nothing of forkd.

It speaks the frames of protocol/guest/PROTOCOL.md over TCP, forwarded from the
host's loopback interface.  One connection is one request:

    ->  REQUEST {"token": …}
    ->  REQUEST {"op": "exec", "args": […], "env": {…}, "cwd": …}
    <-  EVENT   {"event": "started", "pid": 4711}
    <-> STDIN, STDIN_EOF, CONTROL {"signal"} or {"resize"} / STDOUT, STDERR
    <-  REPLY   {"exit_code": 0, "signal": null}

`tty` in the request asks for a terminal, which has no STDERR of its own; `log`
names a file and detaches the command, whose REPLY then is its pid.  The other
ops are `ping` and `power_off`.  Closing the connection kills the command's
process group.

Before its request each client shows the token that the machine was started
with.  Any local user of the host can reach the port: who does not know the
token is told `denied`, and costs us a small frame, for a short time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import IO, Any

PORT = 1024
"""Where the executor listens, inside; the agent's number in protocol/guest."""

FRAME_PAYLOAD_MAX = 1 << 20
"""Largest payload of a frame, in bytes, as protocol/guest has it."""

CHUNK_BYTES = 1 << 16
"""Most that is read from a command's pipe at once."""

STDIN_BACKLOG_MAX = 1 << 20
"""Bytes for a command that does not read; then we stop reading its client."""

TOKEN_DEADLINE_S = 10.0
"""How long a client may take to show its token."""

TOKEN_FRAME_MAX = 4096
"""Largest payload of the frame with the token, in bytes."""

STRANGERS_MAX = 64
"""Connections at a time that have not shown a token; further ones are closed."""

REQUEST_DEADLINE_S = 30.0
"""How long a client may then take to send its request."""

BUSYBOX = "/run/forkd-machine/busybox"
"""Left by the machine's first stage; needs nothing of the shared root."""

STATE_DIRECTORY = "/var/lib/forkd"
"""Where the state disk is mounted."""

BASE_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
}
"""What a command gets beneath the environment that its client sends."""

KVM_CREATE_VM, KVM_CREATE_VCPU, KVM_CREATE_IRQCHIP = 0xAE01, 0xAE41, 0xAE60
KVM_GET_SREGS, KVM_SET_SREGS = 0x8138AE83, 0x4138AE84
KVM_SREGS_BYTES = 312
KVM_SREGS_APIC_BASE = slice(272, 280)

HPET = "/dev/hpet"
HPET_IE_ON, HPET_IRQFREQ = 0x6801, 0x40086806

BEAT_HZ = 4
"""How often the machine's clock interrupts its processor."""

HEADER = struct.Struct("<IB3s")

REQUEST, REPLY, ERROR, EVENT, CONTROL = 1, 2, 3, 4, 5
STDIN, STDIN_EOF, STDOUT, STDERR = 16, 17, 18, 19


class ProtocolError(Exception):
    """The peer sent what the protocol does not allow."""


class StartError(Exception):
    """A command cannot be started; says why."""


def encode(kind: int, payload: bytes = b"") -> bytes:
    """Return one frame."""
    if len(payload) > FRAME_PAYLOAD_MAX:
        raise ProtocolError(f"payload of {len(payload)} bytes exceeds {FRAME_PAYLOAD_MAX}")
    return HEADER.pack(len(payload), kind, b"\0\0\0") + payload


def encode_json(kind: int, message: dict[str, Any]) -> bytes:
    """Return one frame that carries JSON."""
    return encode(kind, json.dumps(message).encode())


def decode_json(payload: bytes) -> dict[str, Any]:
    """Return the JSON object in `payload`; ProtocolError if it is none."""
    try:
        message = json.loads(payload)
    except ValueError as error:
        raise ProtocolError(f"payload is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError("payload is not a JSON object")
    return message


def read_frame(
    stream: socket.socket,
    *,
    payload_max: int = FRAME_PAYLOAD_MAX,
    deadline_s: float | None = None,
) -> tuple[int, bytes] | None:
    """Return the next frame's kind and payload, or None at the end of the stream.

    Args:
        stream: Where to read.
        payload_max: Most bytes of payload.
        deadline_s: Time for the whole frame; None waits for ever.

    Raises:
        ProtocolError: The header is malformed, or the stream ends inside a frame.
        TimeoutError: The frame did not come in time.
    """
    ends_at = None if deadline_s is None else time.monotonic() + deadline_s
    header = _read_exactly(stream, HEADER.size, ends_at)
    if header is None:
        return None
    length, kind, reserved = HEADER.unpack(header)
    if length > payload_max or reserved != b"\0\0\0":
        raise ProtocolError("malformed frame header")
    payload = _read_exactly(stream, length, ends_at) if length else b""
    if payload is None:
        raise ProtocolError("the stream ended inside a frame")
    return kind, payload


def _read_exactly(stream: socket.socket, length: int, ends_at: float | None) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        if ends_at is not None:
            stream.settimeout(max(ends_at - time.monotonic(), 0.001))
        chunk = stream.recv(length - len(data))
        if not chunk:
            if data:
                raise ProtocolError("the stream ended inside a frame")
            return None
        data += chunk
    return bytes(data)


class Command:
    """One running command and the connection it belongs to."""

    def __init__(self, connection: socket.socket, request: dict[str, Any]) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._backlog = bytearray()
        self._stdin_ended = False
        self._terminal: int | None = None
        size = request.get("tty")
        if size is None:
            self._process = start(request, subprocess.PIPE, subprocess.PIPE, subprocess.PIPE)
            self._outputs = self._pipes()
        else:
            self._terminal, inner = os.openpty()
            try:
                resize(self._terminal, size)
                os.set_blocking(self._terminal, False)
                self._process = start(request, inner, inner, inner)
            except BaseException:
                os.close(self._terminal)
                raise
            finally:
                os.close(inner)
            self._outputs = {self._terminal: STDOUT}

    def serve(self) -> None:
        """Carry bytes both ways until the command has ended, then send its REPLY."""
        pidfd = os.pidfd_open(self._process.pid)
        try:
            self._send(encode_json(EVENT, {"event": "started", "pid": self._process.pid}))
            self._loop(pidfd)
            self._drain()
            code = self._process.wait()
        finally:
            os.close(pidfd)
            self._close()
        exited = {"exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None}
        self._send(encode_json(REPLY, exited))

    def _pipes(self) -> dict[int, int]:
        process = self._process
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise AssertionError("started with three pipes")
        os.set_blocking(process.stdin.fileno(), False)
        return {process.stdout.fileno(): STDOUT, process.stderr.fileno(): STDERR}

    def _loop(self, pidfd: int) -> None:
        for descriptor in (*self._outputs, pidfd, self._connection.fileno()):
            self._selector.register(descriptor, selectors.EVENT_READ)
        while True:
            for key, events in self._selector.select():
                if key.fd == pidfd:
                    return
                if key.fd == self._connection.fileno():
                    self._take_frame()
                if events & selectors.EVENT_WRITE:
                    self._feed()
                if events & selectors.EVENT_READ and key.fd in self._outputs:
                    self._forward_output(key.fd)

    def _forward_output(self, descriptor: int) -> bool:
        """Send one chunk of output; False when there is none now."""
        try:
            data = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # a terminal whose last holder is gone reads as EIO
            data = b""
        if data:
            self._send(encode(self._outputs[descriptor], data))
            return True
        self._selector.unregister(descriptor)
        del self._outputs[descriptor]
        return False

    def _drain(self) -> None:
        """Send what the command wrote before it ended, not what its orphans write later."""
        for descriptor in list(self._outputs):
            os.set_blocking(descriptor, False)
            while self._forward_output(descriptor):
                pass

    def _take_frame(self) -> None:
        frame = read_frame(self._connection)
        if frame is None:
            raise ConnectionError("the client is gone")
        kind, payload = frame
        if kind == STDIN:
            self._backlog += payload
        elif kind == STDIN_EOF:
            self._stdin_ended = True
        elif kind == CONTROL:
            self._control(decode_json(payload))
        else:
            raise ProtocolError(f"frame of kind {kind} in the course of exec")
        self._feed()

    def _control(self, message: dict[str, Any]) -> None:
        if "signal" in message:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, int(message["signal"]))
        if "resize" in message and self._terminal is not None:
            resize(self._terminal, message["resize"])

    def _feed(self) -> None:
        """Write what the command takes, and listen for room if some is left."""
        target = self._stdin()
        if target is None:
            self._backlog.clear()
            return
        try:
            while self._backlog:
                del self._backlog[: os.write(target, self._backlog)]
        except BlockingIOError:
            pass
        except OSError:
            self._backlog.clear()
            self._stdin_ended = True
        self._watch(target, selectors.EVENT_WRITE if self._backlog else 0)
        has_room = len(self._backlog) < STDIN_BACKLOG_MAX
        self._watch(self._connection.fileno(), selectors.EVENT_READ if has_room else 0)
        if self._stdin_ended and not self._backlog and self._process.stdin is not None:
            self._process.stdin.close()

    def _stdin(self) -> int | None:
        if self._terminal is not None:
            return self._terminal
        stdin = self._process.stdin
        return None if stdin is None or stdin.closed else stdin.fileno()

    def _watch(self, descriptor: int, events: int) -> None:
        """Register, change or drop our interest in `descriptor`."""
        if descriptor in self._outputs:
            events |= selectors.EVENT_READ
        known = descriptor in self._selector.get_map()
        if events and known:
            self._selector.modify(descriptor, events)
        elif events:
            self._selector.register(descriptor, events)
        elif known:
            self._selector.unregister(descriptor)

    def _send(self, frame: bytes) -> None:
        self._connection.sendall(frame)

    def _close(self) -> None:
        """Kill the process group unless its leader has been reaped; close what we hold."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        if self._terminal is not None:
            os.close(self._terminal)


def resize(terminal: int, size: dict[str, int]) -> None:
    """Give a terminal its rows and columns."""
    fcntl.ioctl(
        terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size["rows"], size["columns"], 0, 0)
    )


def start(
    request: dict[str, Any], stdin: int | IO[bytes], stdout: int | IO[bytes], stderr: int
) -> subprocess.Popen[bytes]:
    """Start the command of `request`, leader of its own session and process group.

    With a terminal, `setsid` is asked to make it the controlling one: doing
    that between fork and exec is not safe in a program with threads.

    Raises:
        StartError: The kernel refuses, for whatever reason.
    """
    args = [str(argument) for argument in request["args"]]
    terminal = request.get("tty") is not None
    try:
        return subprocess.Popen(  # noqa: S603 - running what the client asks is the job
            ["setsid", "--ctty", "--", *args] if terminal else args,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=request.get("cwd", "/"),
            env=BASE_ENVIRONMENT | request.get("env", {}),
            start_new_session=not terminal,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise StartError(str(error)) from error


def detach(request: dict[str, Any]) -> dict[str, Any]:
    """Start a command that outlives its connection; a thread of ours reaps it."""
    with contextlib.ExitStack() as stack:
        try:
            log = stack.enter_context(Path(request["log"]).open("ab"))
        except OSError as error:
            raise StartError(str(error)) from error
        process = start(request, subprocess.DEVNULL, log, subprocess.STDOUT)
    threading.Thread(target=process.wait, daemon=True).start()
    return {"pid": process.pid}


def power_off() -> None:
    """Write everything to the state disk and end the machine, without a way back."""
    os.sync()
    subprocess.run([BUSYBOX, "umount", "-r", STATE_DIRECTORY], check=False)  # noqa: S603 - ours
    subprocess.run([BUSYBOX, "poweroff", "-f"], check=True)  # noqa: S603 - ours


class Strangers:
    """Counts connections that have not shown a token."""

    def __init__(self, most: int = STRANGERS_MAX) -> None:
        self._places = threading.BoundedSemaphore(most)

    def serve(self, connection: socket.socket, token: str) -> None:
        """Serve one request in a thread of its own, or close the connection if there is no room."""
        if not self._places.acquire(blocking=False):
            connection.close()
            return
        known = contextlib.ExitStack()
        known.callback(self._places.release)
        thread = threading.Thread(target=handle, args=(connection, token, known), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the kernel has no thread for us now
            connection.close()
            known.close()


def handle(connection: socket.socket, token: str, known: contextlib.ExitStack) -> None:
    """Serve one request; whatever goes wrong ends this connection only.

    Args:
        connection: A client's.
        token: What it must show first.
        known: Closed once it has, and at the latest when we return.
    """
    with connection, known:
        try:
            if not shows(connection, token):
                return
            known.close()
            frame = read_frame(connection, deadline_s=REQUEST_DEADLINE_S)
            connection.settimeout(None)
            if frame is not None:
                dispatch(connection, decode_json(frame[1]))
        except StartError as error:
            refuse(connection, "exec_failed", str(error))
        except (ProtocolError, KeyError, TypeError, ValueError) as error:
            refuse(connection, "invalid_request", str(error))
        except OSError:
            pass  # the client is gone; its command has been killed


def shows(connection: socket.socket, token: str) -> bool:
    """Whether a client shows the token; if it does not it is told."""
    frame = read_frame(connection, payload_max=TOKEN_FRAME_MAX, deadline_s=TOKEN_DEADLINE_S)
    if frame is None:
        return False
    shown = str(decode_json(frame[1]).get("token"))
    if hmac.compare_digest(shown.encode(), token.encode()):
        return True
    refuse(connection, "denied", "the token is missing or wrong")
    with contextlib.suppress(OSError, ProtocolError):
        # Closing with its request unread would reset the connection, and the answer be lost.
        connection.shutdown(socket.SHUT_WR)
        read_frame(connection, payload_max=TOKEN_FRAME_MAX, deadline_s=TOKEN_DEADLINE_S)
    return False


def dispatch(connection: socket.socket, request: dict[str, Any]) -> None:
    """Do what an authorised request asks."""
    op = request.get("op")
    if op == "ping":
        connection.sendall(encode_json(REPLY, {"pid": os.getpid()}))
    elif op == "exec" and "log" in request:
        connection.sendall(encode_json(REPLY, detach(request)))
    elif op == "exec":
        Command(connection, request).serve()
    elif op == "power_off":
        connection.sendall(encode_json(REPLY, {}))
        power_off()
    else:
        refuse(connection, "invalid_request", f"unknown op {op!r}")


def refuse(connection: socket.socket, code: str, message: str) -> None:
    """Answer ERROR, if the client is still there to read it."""
    with contextlib.suppress(OSError):
        connection.sendall(encode_json(ERROR, {"code": code, "message": message}))


def serve(listener: socket.socket, token: str) -> None:
    """Accept connections for ever, one thread each."""
    strangers = Strangers()
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        strangers.serve(connection, token)


def hold_switches() -> list[int]:
    """Keep KVM from patching the kernel whenever machines come and go; return what to keep open.

    KVM has three switches that patch the kernel's code when the first processor
    that needs them appears and when the last is gone: for one without a local
    APIC, with it disabled, and with it not yet enabled, as each new one is.  An
    emulated processor may miss such a patch if another makes it in the moment
    in which the code is translated (fixed in QEMU 8.1), and then traps for
    ever.  So one processor of each kind exists all the time, and never runs.
    """
    kvm = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    plain, with_apic = fcntl.ioctl(kvm, KVM_CREATE_VM, 0), fcntl.ioctl(kvm, KVM_CREATE_VM, 0)
    fcntl.ioctl(with_apic, KVM_CREATE_IRQCHIP, 0)
    disabled = fcntl.ioctl(with_apic, KVM_CREATE_VCPU, 1)
    registers = bytearray(KVM_SREGS_BYTES)
    fcntl.ioctl(disabled, KVM_GET_SREGS, registers)
    registers[KVM_SREGS_APIC_BASE] = bytes(8)
    fcntl.ioctl(disabled, KVM_SET_SREGS, registers)
    processors = [fcntl.ioctl(machine, KVM_CREATE_VCPU, 0) for machine in (plain, with_apic)]
    return [kvm, plain, with_apic, disabled, *processors]


def start_beat() -> int | None:
    """Have a clock interrupt the processor `BEAT_HZ` times a second; return what to keep open.

    An emulated processor that starts a guest may forget an interrupt that comes
    in the same moment (QEMU's `helper_vmrun` sets a bit of `interrupt_request`
    without the lock).  It hears of it with the next one; but if that was its
    timer, and nothing else is under way, there is no next one.  This clock goes
    on by itself, and nobody reads it.  Without such a clock there is no beat.
    """
    try:
        clock = os.open(HPET, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the file exists even so, and says that it is busy
        return None
    fcntl.ioctl(clock, HPET_IRQFREQ, BEAT_HZ)
    fcntl.ioctl(clock, HPET_IE_ON)
    return clock


def main() -> None:
    """Listen, say so on the console given, and serve."""
    address, token_file, ready_path = sys.argv[1:]
    token = Path(token_file).read_text(encoding="ascii").strip()
    if Path("/dev/kvm").exists():
        hold_switches()
    start_beat()
    with socket.create_server((address, PORT), backlog=64) as listener:
        Path(ready_path).write_text("ready\n", encoding="ascii")
        serve(listener, token)


if __name__ == "__main__":
    main()
