"""Start a daemon where it can run, find it again, and end it: `forkd up` and `forkd down`.

Where this host's KVM runs a stock guest, the daemon is a process of this host (*native*): of root,
or of a user who can jail machines.  Everywhere else it is a process of the helper machine
(*helper*), which gets its port forwarded to this host's loopback, behind a token only the user can
read.

One state folder holds one daemon, which outlives us.  What is there:

    endpoint.json   where it answers: {"url", "token_file", "mode", "pid", "start_ticks"}
    api.token       what it wants to hear; helper mode only
    daemon.log      what it said; native mode only (in the helper: /var/lib/forkd/daemon.log)
    run/            sockets and logs of its machines; native mode without root
    machine/        the helper machine and its disk, on which the snapshots are

Nothing here polls: a daemon is started with `--detach`, which returns when it listens.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forkd import installed, programs
from forkd.errors import EngineError, HostError, NotFound
from forkd.machine import system
from forkd.machine.accel import look_at_kvm
from forkd.machine.config import Forward, MachineConfig, Share
from forkd.machine.door import full_disk
from forkd.machine.health import why_unwell
from forkd.machine.kernel import default_cache, find_kernel
from forkd.machine.machine import Machine
from forkd.machine.process import ProcessId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Mode = Literal["native", "helper"]
Progress = "Callable[[str], object]"

START_DEADLINE_S = 120.0
"""Time a native daemon has until it listens: it may have to reap what a crash left behind."""

PROBE_DEADLINE_S = 5.0
"""Time a guest of a few instructions has; it takes milliseconds, and for ever under a bad KVM."""

STOP_DEADLINE_S = 60.0
"""Time a daemon has to end its requests and to let go of everything."""

DAEMON_PORT = 8889
"""Where the daemon listens inside the helper machine."""

DAEMON_TOKEN_FILE = "/run/forkd-api-token"  # noqa: S105 - where it is, not what it is

SOCKET = "forkd.sock"

STATE_NAMES = (
    *("endpoint.json", "api.token", "daemon.log", SOCKET),
    *("machine", "run", "store", "lock"),
)
"""What is made in a state folder."""

CACHE_NAMES = ("images", "initramfs", "kernels", "locks", "references")
"""What is made in the cache."""

SHARED_SOCKET = Path("/run/forkd") / SOCKET
"""Where clients look for a daemon that another user has started (`forkd.sdk._endpoint`)."""

RUN_DIR_BYTES_MAX = 59
"""Longest run folder: paths of sockets in it must fit into `sun_path`."""

CACHE_LAYER = "/var/lib/forkd/cache-layer"
"""Where the helper machine keeps what it adds to the cache, on its own disk."""

CONFIG_VARIABLE = "FORKD_CONFIG"
"""Names the configuration file of a daemon of this host; without it, there is none."""

DAEMON_COMMAND = (sys.executable, "-m", "forkd.daemon", "serve", "--detach")

_PASSED_ON = ("FORKD_KERNEL", "FORKD_DEBIAN_MIRROR", "FORKD_DEBIAN_SECURITY_MIRROR")
"""Variables that the daemon in the helper machine is given as they are here."""

END_DAEMON = """
pkill -KILL -f '[f]orkd[.]daemon serve'
for attempt in $(seq 100); do
    pgrep -f '[f]orkd[.]daemon serve' >/dev/null || exit 0
    sleep 0.1
done
exit 1
"""
"""Ends the one daemon of a helper machine; the pattern does not match this script itself."""


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """A daemon that `up` started.

    Attributes:
        url: Where it answers.
        token_file: Who holds what is in it may ask; None on a Unix socket.
        mode: Where it runs.
        process: The daemon itself in native mode, the helper machine's QEMU else.
    """

    url: str
    token_file: Path | None
    mode: Mode
    process: ProcessId


RUNS_GUESTS = "its KVM runs a test guest"
"""What makes a host fit to run machines itself."""


def choose_mode(*, is_root: bool, native: str | None, jail: str | None) -> tuple[Mode, str]:
    """Return where a daemon should run, and why, in a sentence.

    On this host, if its KVM runs a stock guest and machines can be jailed.  In the helper machine
    otherwise, which runs with KVM where that can nest and is open to us, and else emulates
    (`forkd.machine.accel.choose_accel`).

    Args:
        is_root: Whether we may make machines' users, cgroups and network.
        native: Why this host's KVM cannot run a stock guest; None if it can.
        jail: Why machines cannot be jailed without root; None if they can.
    """
    if native is not None:
        return "helper", f"machines run in the helper machine: {native}"
    if is_root:
        return "native", f"machines run on this host: {RUNS_GUESTS}"
    if jail is not None:
        return "helper", f"machines run in the helper machine: without root, {jail}"
    return "native", (
        f"machines run on this host, without root: {RUNS_GUESTS}. They have no "
        "network: `sudo forkd up` and `forkd up --mode helper` give them one"
    )


def why_not_native() -> str | None:
    """Say why this host's KVM cannot run a stock guest, found out by letting it; None if it can."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "/dev/kvm is missing or closed to you"
    if look_at_kvm().paravirtual:
        return "its KVM is PVM, which emulates guests, so they would be very slow"
    said = _answer_of_vmm("probe")
    if isinstance(said, str):
        return f"trying a guest failed: {said}"
    return None if said.get("ok") else str(said.get("reason") or "a test guest does not run")


def why_no_jail() -> str | None:
    """Say why this user cannot jail machines, found out by trying; None if it can."""
    with tempfile.TemporaryDirectory(prefix="forkd-jail-") as folder:
        said = _answer_of_vmm("jail", folder)
    if isinstance(said, str):
        return f"trying a jail failed: {said}"
    if said.get("event") == "jailed":
        return None
    return f"machines cannot be jailed: {said.get('message') or 'the VMM does not say why'}"


def _answer_of_vmm(*words: str) -> dict[str, Any] | str:
    """Return what the VMM answers to a question, or why it does not."""
    try:
        command = [str(programs.find(programs.VMM)), *words]
        done = subprocess.run(  # noqa: S603 - our own program
            command, capture_output=True, timeout=PROBE_DEADLINE_S, check=False
        )
        said = json.loads(done.stdout or done.stderr)
        return said if isinstance(said, dict) else "its answer is no object"
    except subprocess.TimeoutExpired:
        return f"it took longer than {PROBE_DEADLINE_S:.0f} s"
    except (OSError, ValueError, HostError) as error:
        return str(error)


def find(state_dir: Path) -> RunningDaemon:
    """Return the daemon of a state folder.

    Raises:
        NotFound: None runs.
    """
    try:
        said: dict[str, Any] = json.loads((state_dir / "endpoint.json").read_text("utf-8"))
        token_file = said["token_file"]
        daemon = RunningDaemon(
            url=said["url"],
            token_file=None if token_file is None else Path(token_file),
            mode=said["mode"],
            process=ProcessId(said["pid"], said["start_ticks"]),
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise NotFound(f"no daemon was started in {state_dir}") from error
    if not daemon.process.is_alive():
        raise NotFound(f"the daemon of {state_dir} has ended")
    return daemon


def up(
    state_dir: Path, *, mode: Mode | None = None, progress: Callable[[str], object]
) -> RunningDaemon:
    """Return the daemon of a state folder, started unless it runs and answers.

    A daemon in the helper machine that does not answer is started again there: it adopts the
    sandboxes of the one before.

    Args:
        state_dir: The folder; made if need be, for its owner only.
        mode: Where it must run; found out by trying if None.
        progress: Told each step, and why the mode was chosen, in a sentence.

    Raises:
        HostError: This host has another system or processor, something that is needed is missing,
            the daemon did not start, or one that runs on this host does not answer.
        EngineError: The daemon said why it could not start.
    """
    programs.check_host()
    if (lack := installed.lacking("daemon") or installed.lacking("packs")) is not None:
        raise HostError(lack)
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(state_dir):
        try:
            return _answering(state_dir.resolve(), find(state_dir), progress)
        except NotFound:
            (state_dir / "endpoint.json").unlink(missing_ok=True)
        chosen: Mode
        if mode is None:
            progress("looking for a usable KVM")
            chosen, why = _found_mode()
            progress(why)
        else:
            chosen = mode
        start = _start_native if chosen == "native" else _start_helper
        daemon = start(state_dir.resolve(), progress)
        publish(state_dir, daemon)
        return daemon


def down(state_dir: Path) -> bool:
    """End the daemon of a state folder, its sandboxes and the helper machine.

    It makes no difference whether the daemon answers, hangs or has died: what it has left on this
    host is ended and removed.  Snapshots are kept.

    Returns:
        Whether anything ran.

    Raises:
        HostError: Something does not end.
    """
    if not state_dir.is_dir():
        return False
    with _locked(state_dir):
        ran = _end_native(state_dir.resolve())
        ran = Machine.end(state_dir / "machine") or ran
        for name in ("endpoint.json", "api.token"):
            (state_dir / name).unlink(missing_ok=True)
    return ran


def purge(state_dir: Path, cache: Path) -> tuple[bool, list[Path]]:
    """Do what `down` does, and remove all that forkd keeps in a state folder and in a cache.

    Only what forkd makes is removed: a state folder may be one that has other files, too.

    Returns:
        What `down` returns, and what is left in the two folders.

    Raises:
        HostError: Something does not end, or cannot be removed.
    """
    ran = down(state_dir)
    left: list[Path] = []
    try:
        for folder, names in ((state_dir, STATE_NAMES), (cache, CACHE_NAMES)):
            for name in names:
                path = folder / name
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            if folder.is_dir():
                left += sorted(folder.iterdir())
                with contextlib.suppress(OSError):
                    folder.rmdir()
    except OSError as error:
        raise HostError(f"cannot remove {error.filename}: {error.strerror}") from error
    return ran, left


def _found_mode() -> tuple[Mode, str]:
    """Return where a daemon should run, found out by trying, and why."""
    is_root, native = os.geteuid() == 0, why_not_native()
    jail = None if is_root or native is not None else why_no_jail()
    return choose_mode(is_root=is_root, native=native, jail=jail)


def _answering(
    state_dir: Path, daemon: RunningDaemon, progress: Callable[[str], object]
) -> RunningDaemon:
    """Return a daemon that was found once it answers; in the helper machine start it again."""
    if daemon.mode == "native":
        reason = why_unwell(daemon.url)
        if reason is None:
            return daemon
        raise HostError(
            f"the daemon, process {daemon.process.pid}, does not answer ({reason}); "
            "`forkd down` ends it"
        )
    machine = Machine.attach(state_dir / "machine").with_door()
    url = _url(machine)
    reason = why_unwell(url)
    if reason == full_disk(machine.state_dir):
        raise HostError(reason)
    if reason is not None:
        progress(f"the daemon does not answer ({reason}): starting it again")
        _end_daemon_inside(machine)
        daemon = _start_daemon_inside(state_dir, machine)
    if url != daemon.url or reason is not None:
        daemon = replace(daemon, url=url)
        publish(state_dir, daemon)
    return daemon


def _end_native(state_dir: Path) -> bool:
    """End a daemon of this host, if there is one, and all that daemons have left here."""
    running: RunningDaemon | None
    try:
        running = find(state_dir)
    except NotFound:
        running = None
    if running is not None and running.mode == "helper":
        return True
    if running is not None and not running.process.end(
        (signal.SIGTERM, signal.SIGKILL), grace_s=STOP_DEADLINE_S
    ):
        raise HostError(f"the daemon, process {running.process.pid}, does not end")
    left = (state_dir / "store").is_dir() and _uninstall(state_dir)
    return running is not None or left


def _uninstall(state_dir: Path) -> bool:
    """Remove what daemons of this host left, but for snapshots; return whether there was any."""
    command = [
        *(sys.executable, "-m", "forkd.daemon", "uninstall", "--json"),
        *_native_folders(state_dir),
    ]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command, capture_output=True, timeout=STOP_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise HostError(f"sandboxes did not end within {STOP_DEADLINE_S:.0f} s") from error
    try:
        said = json.loads(done.stdout)
        removed, left = dict(said["removed"]), list(said["left"])
    except (ValueError, LookupError, TypeError):
        tail = done.stderr.decode(errors="replace").strip()[-2000:]
        raise HostError(f"what a daemon left on this host cannot be removed: {tail}") from None
    if left:
        raise HostError(f"a daemon's remains cannot be removed: {'; '.join(map(str, left))}")
    return bool(removed)


def _native_folders(state_dir: Path) -> list[str]:
    """Return the flags that say where a daemon of this host has its things."""
    return [
        *("--state-dir", str(state_dir / "store"), "--cache-dir", str(default_cache())),
        *("--socket", str(_native_socket(state_dir)), "--run-dir", str(_run_dir(state_dir))),
        *("--config", os.environ.get(CONFIG_VARIABLE, "")),  # another daemon's file is not ours
    ]


def _native_socket(state_dir: Path) -> Path:
    """Return where a daemon of this host listens: where every client looks, if it is root's.

    Of several daemons of root, that is the one in the default state folder.
    """
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    is_default = state_dir == (Path(base) / "forkd").resolve()
    return SHARED_SOCKET if os.geteuid() == 0 and is_default else state_dir / SOCKET


def _run_dir(state_dir: Path) -> Path:
    """Return the folder of sockets and logs; root's does not outlive the host."""
    if os.geteuid() == 0:
        return Path(f"/run/forkd-{os.getuid()}")
    own = state_dir / "run"
    runtime = Path(f"/run/user/{os.getuid()}")
    return own if len(os.fsencode(own)) <= RUN_DIR_BYTES_MAX else runtime / "forkd"


def _start_native(state_dir: Path, progress: Callable[[str], object]) -> RunningDaemon:
    progress("starting the daemon")
    command = [
        *DAEMON_COMMAND,
        *_native_folders(state_dir),
        *("--log", str(state_dir / "daemon.log")),
    ]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command, capture_output=True, timeout=START_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise HostError(f"the daemon did not listen within {START_DEADLINE_S:.0f} s") from error
    pid = int(listening_event(done.stdout, done.stderr)["pid"])
    process = ProcessId.of(pid)
    if process is None:
        raise HostError(f"the daemon ended at once; {state_dir}/daemon.log says why")
    return RunningDaemon(f"unix://{_native_socket(state_dir)}", None, "native", process)


def _start_helper(state_dir: Path, progress: Callable[[str], object]) -> RunningDaemon:
    machine = _machine(state_dir, progress).with_door()
    progress("starting the daemon")
    return _start_daemon_inside(state_dir, machine)


def _start_daemon_inside(state_dir: Path, machine: Machine) -> RunningDaemon:
    token = secrets.token_urlsafe(32)
    token_file = state_dir / "api.token"
    _write_private(token_file, token)
    output, complaints = bytearray(), bytearray()
    _put_token(machine, token_file)
    command = [
        *DAEMON_COMMAND,
        *("--state-dir", "/var/lib/forkd", "--cache-dir", str(default_cache())),
        *("--bind", f"0.0.0.0:{DAEMON_PORT}", "--token-file", DAEMON_TOKEN_FILE, "--socket", ""),
        *("--log", "/var/lib/forkd/daemon.log", "--config", ""),
    ]
    machine.run(command, env=_environment(), on_stdout=output.extend, on_stderr=complaints.extend)
    listening_event(bytes(output), bytes(complaints))
    return RunningDaemon(_url(machine), token_file, "helper", machine.process)


def _end_daemon_inside(machine: Machine) -> None:
    """End the daemon in the helper machine, should it hang; its sandboxes go on."""
    status = machine.run(["/bin/sh", "-c", END_DAEMON])
    if status != 0:
        raise HostError("the daemon in the helper machine does not end; `forkd down` ends both")


def _url(machine: Machine) -> str:
    port = next(each.host_port for each in machine.forwards if each.guest_port == DAEMON_PORT)
    return f"http://127.0.0.1:{port}"


def _machine(state_dir: Path, progress: Callable[[str], object]) -> Machine:
    """Return the helper machine, which sees the host's programs, ours, our recipes, and the cache.

    The cache is read there and not written: the machine keeps what it builds on its own disk.
    """
    cache = default_cache()
    cache.mkdir(parents=True, exist_ok=True)
    kernel = find_kernel(progress=progress)
    shares = (
        Share(cache, str(cache), layer=CACHE_LAYER),
        *(Share(each, str(each), changing=False) for each in _folders()),
    )
    config = MachineConfig(
        kernel.image,
        kernel.modules,
        kernel.release,
        shares=shares,
        forwards=(Forward(0, DAEMON_PORT),),
    )
    return Machine.start(state_dir / "machine", config, progress=progress)


def _folders() -> list[Path]:
    """Return the folders with Python, forkd's source and its two programs, and of our recipes.

    Recipes may be named as the base of others; an installed package has all of this in one folder.
    """
    found = {programs.find(each).resolve().parent for each in (programs.VMM, programs.AGENT)}
    recipes = {programs.RECIPES} if programs.RECIPES.is_dir() else set[Path]()
    return system.outermost(found | recipes | system.python_folders())


def _put_token(machine: Machine, token_file: Path) -> None:
    script = f"umask 077 && cat > {DAEMON_TOKEN_FILE}"
    with token_file.open("rb") as file:
        status = machine.run(["/bin/sh", "-c", script], stdin=file.fileno())
    if status != 0:
        raise HostError("the helper machine did not take the daemon's token")


def _environment() -> dict[str, str]:
    """Return what the daemon in the helper machine must know of ours."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "FORKD_VMM": str(programs.find(programs.VMM)),
        "FORKD_AGENT": str(programs.find(programs.AGENT)),
        **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
    }


def listening_event(output: bytes, complaints: bytes) -> dict[str, Any]:
    """Return what a detached daemon said when it listened.

    Raises:
        EngineError: It said, or did not even say, why it does not.
    """
    try:
        said: dict[str, Any] = json.loads(output)
        if said["event"] == "listening":
            return said
        raise EngineError(f"the daemon did not start: {said['message']} ({said['code']})")
    except (ValueError, LookupError, TypeError):
        tail = (output + complaints).decode(errors="replace").strip()[-2000:]
        raise EngineError(f"the daemon did not start: {tail or 'it said nothing'}") from None


def publish(state_dir: Path, daemon: RunningDaemon) -> None:
    """Write where a daemon answers, for `find` and for the SDK."""
    said = {
        "url": daemon.url,
        "token_file": None if daemon.token_file is None else str(daemon.token_file),
        "mode": daemon.mode,
        **asdict(daemon.process),
    }
    _write_private(state_dir / "endpoint.json", json.dumps(said))


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    aside.rename(path)


@contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    """Hold the folder's lock; another `up` or `down` waits for it."""
    with (state_dir / "lock").open("w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
