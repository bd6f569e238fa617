"""Start, find and stop the helper machine that lives in a state directory.

    machine = Machine.start(state, config)        or Machine.attach(state)
    machine.run(["uname", "-r"])
    machine.stop()

One state directory holds at most one machine, which outlives whoever started
it.  What is there:

    state.img     the machine's disk, mounted inside at /var/lib/forkd
    console.log   what its kernel said; qemu.log what QEMU said; door.log what the door said
    qemu.pid      QEMU's process, which holds a lock on the file for as long as it runs
    qmp.sock      QEMU's monitor, to which the door is connected
    machine.json  its processes and ports; gone when it is stopped
    token         what the executor wants to hear; readable by the owner only

`start` returns when the executor inside answers, and fails as soon as QEMU ends
or the machine says what went wrong: it waits for events, never for time.

Whoever starts a machine may be killed before `machine.json` is written.  So `start` and `end` look
for a QEMU that holds the lock on `qemu.pid`, and end it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import HostError, NotFound, TransportError
from forkd.machine import client, door, executor, qemu, system
from forkd.machine.config import STATE_DISK_GIB, Forward, MachineConfig, Share
from forkd.machine.initramfs import build_initramfs
from forkd.machine.process import ProcessId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

BOOT_DEADLINE_S = 120.0
"""How long booting may take; measured at 6 s, on a busy host several times that."""

POWER_OFF_DEADLINE_S = 30.0
"""How long the machine may take to write its disk and end."""

PORT_ATTEMPTS_MAX = 3
"""How often other ports are tried if somebody takes one just found free."""

DOOR_DEADLINE_S = 30.0
"""How long the door may take to serve, and to end when QEMU has ended."""

FLOCK = struct.Struct("hhlli4x")
"""`struct flock` of fcntl(2): type, whence, start, length, pid."""

LOG_TAIL_CHARACTERS = 2000
"""How much of a log goes into an error's message."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A running helper machine.

    Attributes:
        state_dir: The folder it lives in.
        process: Its QEMU.
        endpoint: Its executor.
        forwards: Its ports on the host's loopback, beside the executor's.
        inner_ports: Where QEMU itself forwards each of these; the door is in front of them.
        door: The door's process; None if nothing is forwarded.
    """

    state_dir: Path
    process: ProcessId
    endpoint: client.Endpoint
    forwards: tuple[Forward, ...] = ()
    inner_ports: tuple[int, ...] = ()
    door: ProcessId | None = None

    @classmethod
    def start(
        cls, state_dir: Path, config: MachineConfig, *, progress: Callable[[str], object] = str
    ) -> Machine:
        """Return the machine of `state_dir`, starting it unless it runs.

        A machine that runs already is returned as it is, whatever `config` says.

        Raises:
            HostError: QEMU or a tool is missing, or the machine did not boot.
        """
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(state_dir):
            with suppress(NotFound):
                return cls.attach(state_dir)
            _end_unrecorded(state_dir)
            progress("preparing the helper machine")
            if not config.whole_host:
                config = _confined(state_dir, config)
            _prepare(state_dir, config)
            progress("booting the helper machine")
            return _boot(state_dir.resolve(), config)

    @classmethod
    def attach(cls, state_dir: Path) -> Machine:
        """Return the machine that runs in `state_dir`.

        Raises:
            NotFound: None does, or what is recorded of it is damaged.
        """
        try:
            record = json.loads((state_dir / "machine.json").read_text(encoding="utf-8"))
            token = (state_dir / "token").read_text(encoding="ascii").strip()
            machine = cls(
                state_dir=state_dir.resolve(),
                process=ProcessId(record["pid"], record["start_ticks"]),
                endpoint=client.Endpoint(record["executor_port"], token),
                forwards=tuple(Forward(**forward) for forward in record["forwards"]),
                inner_ports=tuple(record["inner_ports"]),
                door=None if record["door"] is None else ProcessId(**record["door"]),
            )
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise NotFound(f"no helper machine in {state_dir}") from error
        if not machine.process.is_alive():
            raise NotFound(f"the helper machine in {state_dir} has ended")
        return machine

    @classmethod
    def end(cls, state_dir: Path) -> bool:
        """End whatever machine runs in `state_dir`, recorded or not; return whether one did.

        Raises:
            HostError: It survived being killed.
        """
        try:
            machine = cls.attach(state_dir)
        except NotFound:
            if not state_dir.is_dir():
                return False
            with _locked(state_dir):
                ran = _end_unrecorded(state_dir)
                _forget(state_dir)
            return ran
        machine.stop()
        return True

    def with_door(self) -> Machine:
        """Return this machine with a door that serves, started again if it has ended.

        The ports of the host are the same, or others if those are taken by now.
        """
        if self.door is None or self.door.is_alive():
            return self
        with _locked(self.state_dir), ExitStack() as stack:
            wanted = [each.host_port for each in self.forwards]
            try:
                listeners = [stack.enter_context(_listen(port)) for port in wanted]
            except HostError:
                listeners = [stack.enter_context(_listen(0)) for _ in wanted]
            return _opened(self, listeners)

    def run(  # noqa: PLR0913 - what a process is given; all but the first by keyword
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        stdin: int | None = None,
        on_stdout: Callable[[bytes], object] = str,
        on_stderr: Callable[[bytes], object] = str,
    ) -> int:
        """Run a command inside and return its exit code, 128 + n if signal n ended it.

        Args:
            args: The command, without a shell.
            env: Added to a plain environment.
            cwd: Where it runs.
            stdin: Descriptor whose bytes it reads; None is an empty input.
            on_stdout: Called with each piece of its output as it comes.
            on_stderr: Likewise, from the same thread.

        Raises:
            HostError: The command could not be started.
            TransportError: The machine went away.
        """
        message = client.exec_message(args, env=env or {}, cwd=cwd)
        with client.connect(self.endpoint, message) as connection:
            if stdin is None:
                connection.sendall(executor.encode(executor.STDIN_EOF))
            else:
                client.feed(connection, stdin)
            return client.exchange(connection, on_stdout, on_stderr)

    def spawn(
        self, args: Sequence[str], *, log: str, env: Mapping[str, str] | None = None,
        cwd: str = "/",
    ) -> int:  # fmt: skip
        """Start a command inside that outlives us, its output appended to `log`; return its pid.

        Raises:
            HostError: It could not be started.
        """
        message = client.exec_message(args, env=env or {}, cwd=cwd, log=log)
        return int(client.request(self.endpoint, message, timeout_s=BOOT_DEADLINE_S)["pid"])

    def stop(self) -> None:
        """End the machine, its disk written; leave only the disk and the logs.

        Raises:
            HostError: It survived being killed.
        """
        with _locked(self.state_dir):
            asked = True
            try:
                client.request(self.endpoint, {"op": "power_off"}, timeout_s=POWER_OFF_DEADLINE_S)
            except (HostError, TransportError):
                asked = False
            gently = (None,) if asked else ()
            signals = (*gently, signal.SIGTERM, signal.SIGKILL)
            if not self.process.end(signals, grace_s=POWER_OFF_DEADLINE_S):
                raise HostError(f"QEMU, process {self.process.pid}, does not end")
            if self.door is not None:
                self.door.end((None, signal.SIGKILL), grace_s=DOOR_DEADLINE_S)
            _forget(self.state_dir)


def _forget(state_dir: Path) -> None:
    """Leave only the disk and the logs."""
    for name in ("machine.json", "token", "initramfs", "qemu.pid", door.MONITOR):
        (state_dir / name).unlink(missing_ok=True)
    shutil.rmtree(state_dir / qemu.ROOT_FOLDER, ignore_errors=True)


def _end_unrecorded(state_dir: Path) -> bool:
    """End a QEMU that was started here and is in no record; return whether there was one."""
    pid = _holder(state_dir / "qemu.pid")
    process = None if pid is None else ProcessId.of(pid)
    if process is None:
        return False
    if not process.end((signal.SIGTERM, signal.SIGKILL), grace_s=POWER_OFF_DEADLINE_S):
        raise HostError(f"QEMU, process {process.pid}, does not end")
    return True


def _holder(path: Path) -> int | None:
    """Return the process that holds a lock on a file, as QEMU does on its pid file."""
    asked = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with path.open("r+b") as file:
            kind, _, _, _, pid = FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return None
    return None if kind == fcntl.F_UNLCK else int(pid)


@contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    """Hold the state directory's lock; another start or stop waits for it."""
    with (state_dir / "lock").open("w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _confined(state_dir: Path, config: MachineConfig) -> MachineConfig:
    """Make the machine's root; return what it sees of the host: programs, and what runs us."""
    try:
        folders = system.stage(state_dir / qemu.ROOT_FOLDER)
    except OSError as error:
        raise HostError(f"the helper machine's root cannot be made: {error}") from error
    seen = {share.source for share in config.shares}
    python = (
        Share(each, str(each), changing=False)
        for each in system.outermost(system.python_folders() | seen)
        if each not in seen
    )
    return replace(config, system=folders, shares=(*config.shares, *python))


def _prepare(state_dir: Path, config: MachineConfig) -> None:
    """Write what QEMU reads: the root, the token, the initramfs and, once, the disk."""
    token = secrets.token_hex(32)
    _write_private(state_dir / "token", token.encode())
    stage_files = {
        "machine.conf": qemu.settings(
            config, python=Path(sys.executable), executor=Path(executor.__file__).resolve()
        ).encode(),
        "shares": qemu.shares_table(config).encode(),
        "system": qemu.system_table(config).encode(),
        "token": token.encode(),
    }
    _write_private(state_dir / "initramfs", build_initramfs(config.modules, stage_files))
    (state_dir / "console.log").unlink(missing_ok=True)
    if not (state_dir / "state.img").exists():
        _make_disk(state_dir / "state.img")


def _write_private(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _make_disk(path: Path) -> None:
    """Make a sparse ext4 image whose tables need no writing: the file reads as zeros."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    options = "lazy_itable_init=0,lazy_journal_init=0,assume_storage_prezeroed=1"
    arguments = ["mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-i", "65536", "-E", options]
    try:
        subprocess.run(  # noqa: S603 - constants and a path of ours
            [*arguments, str(partial), f"{STATE_DISK_GIB}G"],
            check=True, capture_output=True, timeout=BOOT_DEADLINE_S,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise HostError(f"the state disk could not be made: {error}") from error
    partial.rename(path)


def _boot(state_dir: Path, config: MachineConfig) -> Machine:
    with ExitStack() as stack:
        listeners = [stack.enter_context(_listen(each.host_port)) for each in config.forwards]
        for _ in range(PORT_ATTEMPTS_MAX):
            machine = _try_boot(state_dir, config)
            if machine is not None:
                try:
                    return _opened(machine, listeners)
                except BaseException:
                    machine.process.end((signal.SIGKILL,), grace_s=POWER_OFF_DEADLINE_S)
                    raise
    raise HostError(f"a port to forward is taken: {_tail(state_dir / 'qemu.log')}")


def _try_boot(state_dir: Path, config: MachineConfig) -> Machine | None:
    """Start QEMU on ports that are free now, and wait; None if one has been taken since."""
    port, *inner_ports = _free_ports(1 + len(config.forwards))
    inner = tuple(
        replace(each, host_port=inner_port)
        for each, inner_port in zip(config.forwards, inner_ports, strict=True)
    )
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = qemu.command(
                replace(config, forwards=inner), executor_port=port, ready_fd=theirs.fileno()
            )
            started = _start_qemu(state_dir, command, theirs.fileno())
        if started is None:
            return None
        try:
            with suppress(OSError):  # the machine serves with as many as it has, too
                door.raise_descriptors(started.pid)
            _await_ready(ours, state_dir)
        except BaseException:
            started.end((signal.SIGKILL,), grace_s=POWER_OFF_DEADLINE_S)
            raise
    token = (state_dir / "token").read_text(encoding="ascii")
    endpoint = client.Endpoint(port, token)
    return Machine(state_dir, started, endpoint, config.forwards, tuple(inner_ports))


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on the host's loopback; port 0 means any."""
    try:
        return socket.create_server(("127.0.0.1", port), backlog=door.BACKLOG)
    except OSError as error:
        raise HostError(f"a port to forward is taken: {port}: {error.strerror}") from error


def _opened(machine: Machine, listeners: list[socket.socket]) -> Machine:
    """Start the door of a machine that listens there, and record both."""
    if not listeners:
        return _record(machine)
    ways = zip(listeners, machine.inner_ports, strict=True)
    forwards = tuple(
        replace(each, host_port=listener.getsockname()[1])
        for each, listener in zip(machine.forwards, listeners, strict=True)
    )
    command = [sys.executable, "-m", door.__name__, str(machine.state_dir)]
    command += [f"{listener.fileno()}:{port}" for listener, port in ways]
    log = machine.state_dir / "door.log"
    try:
        with log.open("ab") as errors:
            started = subprocess.run(  # noqa: S603 - our own program
                command, cwd=machine.state_dir, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=errors, timeout=DOOR_DEADLINE_S, check=True,
                pass_fds=[listener.fileno() for listener in listeners],
            )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise HostError(f"the helper machine's door did not start: {_tail(log)}") from error
    process = ProcessId.of(int(started.stdout))
    if process is None:
        raise HostError(f"the helper machine's door ended at once: {_tail(log)}")
    return _record(replace(machine, forwards=forwards, door=process))


def _start_qemu(state_dir: Path, command: list[str], ready_fd: int) -> ProcessId | None:
    """Start QEMU as a daemon of its own; return it, or None if a port is taken.

    QEMU leaves us only once all its devices and ports are set up, so a failure
    to do that is an exit status here.
    """
    with (state_dir / "qemu.log").open("wb") as log:
        try:
            done = subprocess.run(  # noqa: S603 - ours, from config alone
                command, cwd=state_dir, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=(ready_fd,), timeout=BOOT_DEADLINE_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            raise HostError(f"{command[0]} cannot be started: {error}") from error
    said = _tail(state_dir / "qemu.log")
    if done.returncode != 0:
        if "Could not set up host forwarding rule" in said:
            return None
        raise HostError(f"{command[0]} did not start: {said}")
    process = ProcessId.of(int((state_dir / "qemu.pid").read_text(encoding="ascii")))
    if process is None:
        raise HostError(f"{command[0]} ended at once: {said}")
    return process


def _await_ready(ready: socket.socket, state_dir: Path) -> None:
    """Read the ready line until it says how the boot went.

    Raises:
        HostError: The machine says that it failed, ends, or says nothing.
    """
    ready.settimeout(BOOT_DEADLINE_S)
    said = b""
    try:
        while not said.endswith(b"\n"):
            data = ready.recv(4096)
            if not data:
                break
            said += data
    except TimeoutError as error:
        console = _tail(state_dir / "console.log")
        raise HostError(f"no answer in {BOOT_DEADLINE_S:.0f} s; console: {console}") from error
    verdict = said.decode(errors="replace").strip()
    if verdict == "ready":
        return
    console = _tail(state_dir / "console.log")
    raise HostError(f"the helper machine did not boot: {verdict}\nconsole: {console}")


def _record(machine: Machine) -> Machine:
    record = {
        **asdict(machine.process),
        "executor_port": machine.endpoint.port,
        "forwards": [asdict(forward) for forward in machine.forwards],
        "inner_ports": machine.inner_ports,
        "door": None if machine.door is None else asdict(machine.door),
    }
    partial = machine.state_dir / "machine.json.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(record, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(machine.state_dir / "machine.json")
    return machine


def _free_ports(count: int) -> list[int]:
    """Return so many ports of the host's loopback that are free now, each another."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(_listen(0)) for _ in range(count)]
        return [int(listener.getsockname()[1]) for listener in listeners]


def _tail(path: Path) -> str:
    """Return the end of a log, without what QEMU always says about its emulation."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    kept = [line for line in lines if "TCG doesn't support requested feature" not in line]
    return "\n".join(kept)[-LOG_TAIL_CHARACTERS:].strip()
