"""Start, find and stop the helper machine that lives in a state directory.

    machine = Machine.start(state, config)        or Machine.attach(state)
    machine.run(["uname", "-r"])
    machine.stop()

One state directory holds at most one machine, which outlives whoever started
it.  What is there:

    state.img     the machine's disk, mounted inside at /var/lib/forkd
    console.log   what its kernel said; qemu.log what QEMU said
    machine.json  its process and ports; gone when it is stopped
    token         what the executor wants to hear; readable by the owner only

`start` returns when the executor inside answers, and fails as soon as QEMU ends
or the machine says what went wrong: it waits for events, never for time.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import HostError, NotFound, TransportError
from forkd.machine import client, executor, qemu
from forkd.machine.config import STATE_DISK_GIB, Forward, MachineConfig
from forkd.machine.initramfs import build_initramfs
from forkd.machine.process import ProcessId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

BOOT_DEADLINE_S = 120.0
"""How long booting may take; measured at 6 s, on a busy host several times that."""

POWER_OFF_DEADLINE_S = 30.0
"""How long the machine may take to write its disk and end."""

PORT_ATTEMPTS_MAX = 3
"""How often another port is tried if somebody takes the one just found free."""

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
    """

    state_dir: Path
    process: ProcessId
    endpoint: client.Endpoint
    forwards: tuple[Forward, ...]

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
            progress("preparing the helper machine")
            _prepare(state_dir, config)
            progress("booting the helper machine")
            return _boot(state_dir.resolve(), config)

    @classmethod
    def attach(cls, state_dir: Path) -> Machine:
        """Return the machine that runs in `state_dir`.

        Raises:
            NotFound: None does.
        """
        try:
            record = json.loads((state_dir / "machine.json").read_text(encoding="utf-8"))
            token = (state_dir / "token").read_text(encoding="ascii").strip()
        except FileNotFoundError as error:
            raise NotFound(f"no helper machine in {state_dir}") from error
        process = ProcessId(record["pid"], record["start_ticks"])
        if not process.is_alive():
            raise NotFound(f"the helper machine in {state_dir} has ended")
        forwards = tuple(Forward(**forward) for forward in record["forwards"])
        endpoint = client.Endpoint(record["executor_port"], token)
        return cls(state_dir.resolve(), process, endpoint, forwards)

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
            for name in ("machine.json", "token", "initramfs", "qemu.pid"):
                (self.state_dir / name).unlink(missing_ok=True)


@contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    """Hold the state directory's lock; another start or stop waits for it."""
    with (state_dir / "lock").open("w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prepare(state_dir: Path, config: MachineConfig) -> None:
    """Write what QEMU reads: the token, the initramfs and, once, the disk."""
    token = secrets.token_hex(32)
    _write_private(state_dir / "token", token.encode())
    stage_files = {
        "machine.conf": qemu.settings(
            config, python=Path(sys.executable), executor=Path(executor.__file__).resolve()
        ).encode(),
        "shares": qemu.shares_table(config).encode(),
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
    for attempt in range(PORT_ATTEMPTS_MAX):
        port = _free_port()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                command = qemu.command(config, executor_port=port, ready_fd=theirs.fileno())
                started = _start_qemu(state_dir, command, theirs.fileno())
            if started is None and attempt + 1 < PORT_ATTEMPTS_MAX:
                continue
            if started is None:
                break
            try:
                _await_ready(ours, state_dir)
            except BaseException:
                started.end((signal.SIGKILL,), grace_s=POWER_OFF_DEADLINE_S)
                raise
        return _record(state_dir, started, port, config.forwards)
    raise HostError(f"a port to forward is taken: {_tail(state_dir / 'qemu.log')}")


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
            raise HostError(f"{qemu.PROGRAM} cannot be started: {error}") from error
    said = _tail(state_dir / "qemu.log")
    if done.returncode != 0:
        if "Could not set up host forwarding rule" in said:
            return None
        raise HostError(f"{qemu.PROGRAM} did not start: {said}")
    process = ProcessId.of(int((state_dir / "qemu.pid").read_text(encoding="ascii")))
    if process is None:
        raise HostError(f"{qemu.PROGRAM} ended at once: {said}")
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


def _record(
    state_dir: Path, process: ProcessId, port: int, forwards: tuple[Forward, ...]
) -> Machine:
    record = {
        **asdict(process),
        "executor_port": port,
        "forwards": [asdict(forward) for forward in forwards],
    }
    partial = state_dir / "machine.json.partial"
    partial.write_text(json.dumps(record, indent=2), encoding="utf-8")
    partial.rename(state_dir / "machine.json")
    return Machine.attach(state_dir)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _tail(path: Path) -> str:
    """Return the end of a log, without what QEMU always says about its emulation."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    kept = [line for line in lines if "TCG doesn't support requested feature" not in line]
    return "\n".join(kept)[-LOG_TAIL_CHARACTERS:].strip()
