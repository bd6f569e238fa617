"""What answers in the fake VMM's guests: the guest protocol, as far as the service speaks it.

Its files are those of `file_tree`, its Python is `interpreter`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkd.engine.frames import Kind, encode
from tests.support import interpreter
from tests.support.file_tree import FileTree, Refused
from tests.support.nonsense import Speaker

if TYPE_CHECKING:
    from tests.support.peer import Peer

Members = dict[str, Any]

SHELL_WORDS = {"cat", "echo", "env", "exit"}
"""The words with which a line may begin that `/bin/sh` is to run."""


def no_operation(_: Peer, request: Members) -> None:
    raise Refused("invalid_request", f"unknown operation {request['op']}")


class Agent:
    """What answers in the guest."""

    def __init__(self, identity: Members, knobs: list[str]) -> None:
        self.identity = identity
        self.knobs = knobs
        self.configured: Members = {}
        self.namespace: dict[str, Any] = {"identity": identity}
        self.contexts: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.frozen, self.top = False, 0
        self.clock_off_ns = 10**9
        self.dead, self.halted = False, False

    def handle(self, sock: socket.socket) -> None:
        greeting = b""
        while not greeting.endswith(b"\n"):
            byte = sock.recv(1)
            if not byte:
                return
            greeting += byte
        if self.dead:
            sock.shutdown(socket.SHUT_RDWR)
            return
        if self.halted:
            signal.pause()
        sock.sendall(b"OK 1024\n")
        peer = Speaker(sock)
        while not self.dead and (frame := peer.receive()) is not None:
            if frame.kind is not Kind.REQUEST:
                return
            request = frame.members()
            try:
                getattr(self, f"op_{request['op']}", no_operation)(peer, request)
            except Refused as error:
                peer.send(Kind.ERROR, {"code": error.code, "message": str(error)})

    def op_ping(self, peer: Peer, _: Members) -> None:
        members = {"version": "0", "pid": os.getpid(), "uptime_s": 1.0, "runtime": "ready"}
        peer.send(Kind.REPLY, members)

    def op_echo(self, peer: Peer, request: Members) -> None:
        peer.send(Kind.REPLY, {"data": request.get("data", "")})

    def op_adjust_time(self, peer: Peer, request: Members) -> None:
        self.clock_off_ns += request["offset_ns"]
        peer.send(Kind.REPLY, {"realtime_ns": time.time_ns() + self.clock_off_ns})

    def op_watch(self, peer: Peer, _: Members) -> None:
        if "watch=hang" not in self.knobs:
            peer.send(Kind.REPLY, {})

    def op_watched(self, peer: Peer, _: Members) -> None:
        if "watched=hang" not in self.knobs:
            peer.send(Kind.REPLY, {"longest_s": 0.0015, "watched_s": 0.02})

    def op_configure(self, peer: Peer, request: Members) -> None:
        self.configured = request
        peer.send(Kind.REPLY, {})

    def op_quiesce(self, peer: Peer, _: Members) -> None:
        peer.send(Kind.REPLY, {"available_bytes": 1})

    def op_freeze(self, peer: Peer, _: Members) -> None:
        if "freeze=fail" in self.knobs:
            peer.send(Kind.ERROR, {"code": "io", "message": "it cannot be frozen"})
            return
        self.frozen = True
        peer.send(Kind.REPLY, {})

    def op_warm(self, peer: Peer, request: Members) -> None:
        code = request.get("python", {}).get("code", "")
        peer.send_bytes(encode(Kind.STDOUT, b"warming\n"))
        if "hang" in code:
            signal.pause()
        if "raise" in code:
            peer.send(Kind.ERROR, {"code": "warm_up_failed", "message": "ValueError: as asked"})
            return
        exec(code, self.namespace)  # noqa: S102 - a test's own code
        peer.send(Kind.REPLY, {"duration_s": 0.5})

    def op_eval(self, peer: Peer, request: Members) -> None:
        if request["code"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if (wanted := request.get("runtime", "python")) != "python":
            raise Refused(
                "no_runtime", f"there is no runtime '{wanted}' in this sandbox: it is python"
            )
        context = request.get("context")
        names = self.namespace if context is None else self.contexts.setdefault(context, {})
        with interpreter.variables(request.get("env", {})):
            *outputs, members = interpreter.run(request["code"], names)
        for kind, output in zip((Kind.STDOUT, Kind.STDERR), outputs, strict=True):
            if output:
                peer.send_bytes(encode(kind, output.encode()))
        peer.send(Kind.REPLY, members)

    def op_exec(self, peer: Peer, request: Members) -> None:
        """Run `echo`, `cat`, `env`, `sleep`, `lines N`, `sh -c "exit N"`; others are `cat`.

        Those begin with their name, on standard error; `lines` writes N lines of 16 bytes.

        `meet` waits at the `barrier` of the namespace.  `/bin/sh -c` runs a line of these words.
        """
        program, *rest = request["args"]
        if program == "/bin/sh" and (words := shlex.split(rest[-1]))[0] in SHELL_WORDS:
            program, *rest = request["args"] = ["sh", *rest] if words[0] == "exit" else words
        if program == "missing":
            raise Refused("not_found", "missing: no such program")
        peer.send(Kind.EVENT, {"event": "started", "pid": 7})
        if program in {"end-agent", "halt", "hang-up"}:
            self.dead, self.halted = program == "end-agent", program == "halt"
            peer.sock.shutdown(socket.SHUT_RDWR)
            return
        if program in {"forever", "spew"}:
            self.run_until_left(peer, program)
            return
        ended: Members = {"exit_code": 0, "signal": None, "timed_out": False, "duration_s": 0.1}
        script = rest[1].split(" ", 2) if program == "sh" else [""]
        if script[0] != "exit":
            self.begin(peer, request)
        if script[0] == "fail":
            peer.send_bytes(encode(Kind.STDERR, b"\n" + script[2].encode()))
        if script[0] in {"exit", "fail"}:
            ended["exit_code"] = int(script[1])
        elif program in {"killed", "late"}:
            ended |= {"exit_code": None, "signal": 9, "timed_out": program == "late"}
        elif request.get("stdin") or program == "sleep":
            ended |= self.run_until_told(peer)
        peer.send(Kind.REPLY, ended)

    def op_connect(self, peer: Peer, request: Members) -> None:
        """Connect to a port of this host: what listens there is a test's own program."""
        try:
            program = socket.create_connection(("127.0.0.1", request["port"]))
        except OSError:
            where = f"port {request['port']} of 127.0.0.1 or ::1 in the sandbox"
            raise Refused("refused", f"nothing listens on {where}") from None
        with program:
            peer.send(Kind.EVENT, {"event": "connected"})
            back = threading.Thread(target=self.say_what_comes, args=(peer, program), daemon=True)
            back.start()
            while (frame := peer.receive()) is not None and frame.kind is Kind.DATA:
                program.sendall(frame.payload)
            if frame is None:
                program.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                with contextlib.suppress(OSError):
                    program.shutdown(socket.SHUT_RD)  # or the other thread keeps it open
                back.join()
                return
            program.shutdown(socket.SHUT_WR)
            back.join()
        peer.send(Kind.REPLY, {})

    @staticmethod
    def say_what_comes(peer: Peer, program: socket.socket) -> None:
        try:
            while data := program.recv(65536):
                peer.send_bytes(encode(Kind.DATA, data))
            peer.send_bytes(encode(Kind.DATA_EOF))
        except OSError as error:
            peer.send(Kind.ERROR, {"code": "io", "message": str(error)})

    def begin(self, peer: Peer, request: Members) -> None:
        """Write what a program does as it begins."""
        program, *rest = request["args"]
        if program == "meet":
            self.namespace["barrier"].wait()
        elif program == "echo":
            peer.send_bytes(encode(Kind.STDOUT, " ".join(rest).encode() + b"\n"))
        elif program == "env":
            said = "".join(f"{name}={value}\n" for name, value in request.get("env", {}).items())
            peer.send_bytes(encode(Kind.STDOUT, said.encode()))
        elif program == "lines":
            for first in range(0, int(rest[0]), 4096):
                count = min(4096, int(rest[0]) - first)
                said = "".join(f"{number:015d}\n" for number in range(first, first + count))
                peer.send_bytes(encode(Kind.STDOUT, said.encode()))
        elif program not in {"cat", "sleep"}:
            peer.send_bytes(encode(Kind.STDERR, program.encode()))

    def run_until_told(self, peer: Peer) -> Members:
        """Say what comes in, until that ends or a signal comes; return how it has ended."""
        while (frame := peer.receive()) is not None and frame.kind is not Kind.STDIN_EOF:
            if frame.kind is Kind.CONTROL:
                return {"exit_code": None, "signal": frame.members()["signal"]}
            peer.send_bytes(encode(Kind.STDOUT, frame.payload))
        return {}

    def run_until_left(self, peer: Peer, program: str) -> None:
        """Say nothing, or all the time, until nobody listens; the console says when."""
        self.say(f"{program} began")
        with contextlib.suppress(OSError):
            while program == "spew":
                peer.sock.sendall(encode(Kind.STDOUT, bytes(65536)))
        while peer.receive() is not None:
            pass
        self.say(f"{program} ended")

    def say(self, line: str) -> None:
        with (Path(self.identity["directory"]) / "console.log").open("a") as console:
            console.write(f"{line}\n")

    def wait_for_go(self, op: str) -> None:
        """Wait if this operation was to wait, until a test lets it go on."""
        if f"{op}=wait" in self.knobs:
            self.say(f"{op} waits")
            while not (Path(self.identity["top_directory"]).parent / "go").exists():
                time.sleep(0.001)

    @property
    def tree(self) -> FileTree:
        """The guest's files."""
        return FileTree(self.files)

    def op_write_file(self, peer: Peer, request: Members) -> None:
        path, data = str(request["path"]), bytearray()
        self.tree.check_place(path, make_parents=bool(request.get("make_parents")))
        while (frame := peer.receive()) is not None and frame.kind is Kind.DATA:
            data += frame.payload
            if path == "/full" and len(data) > 100_000:
                peer.send(Kind.ERROR, {"code": "no_space", "message": "the disk is full"})
                peer.sock.shutdown(socket.SHUT_RDWR)
                return
        if frame is None:
            return  # broken off: nothing is there
        self.tree.write(path, bytes(data))
        self.top = self.top or os.open(self.identity["top_directory"], os.O_TMPFILE | os.O_RDWR)
        os.write(self.top, data)
        peer.send(Kind.REPLY, {"bytes": len(data)})

    def op_read_file(self, peer: Peer, request: Members) -> None:
        data, start = self.tree.read(str(request["path"])), int(request.get("offset", 0))
        part = data[start:][: request.get("length")]
        peer.send(Kind.EVENT, {"event": "file", "size_bytes": len(data), "mode": 0o644})
        for at in range(0, len(part), 65536):
            peer.send_bytes(encode(Kind.DATA, part[at : at + 65536]))
        peer.send(Kind.REPLY, {"bytes": len(part)})

    def op_write_archive(self, peer: Peer, request: Members) -> None:
        """Make what an archive has; owners and permissions are forgotten."""
        received = bytearray()
        while (frame := peer.receive()) is not None and frame.kind is Kind.DATA:
            received += frame.payload
        if frame is None:
            return
        made = self.tree.unpack(str(request["path"]), bytes(received) or bytes(1024))
        skipped = [{"path": path, "reason": reason} for path, reason in made.skipped]
        peer.send(Kind.REPLY, {"entries": made.entries, "bytes": made.bytes, "skipped": skipped})

    def op_read_archive(self, peer: Peer, request: Members) -> None:
        packed = self.tree.pack(str(request["path"]))
        peer.send(Kind.EVENT, {"event": "archive", "size_bytes": 0, "mode": 0})
        for at in range(0, len(packed), 65536):
            peer.send_bytes(encode(Kind.DATA, packed[at : at + 65536]))
        peer.send(Kind.REPLY, {"bytes": len(packed)})

    def op_stat(self, peer: Peer, request: Members) -> None:
        peer.send(Kind.REPLY, self.tree.entry(str(request["path"])))

    def op_list_dir(self, peer: Peer, request: Members) -> None:
        peer.send(Kind.REPLY, {"entries": self.tree.list_dir(str(request["path"]))})

    def op_make_dir(self, peer: Peer, request: Members) -> None:
        self.tree.make_dir(str(request["path"]), parents=bool(request.get("parents")))
        peer.send(Kind.REPLY, {})

    def op_move(self, peer: Peer, request: Members) -> None:
        self.tree.move(str(request["source"]), str(request["target"]))
        peer.send(Kind.REPLY, {})

    def op_remove(self, peer: Peer, request: Members) -> None:
        self.tree.remove(str(request["path"]), recursive=bool(request.get("recursive")))
        peer.send(Kind.REPLY, {})
