"""Unit files of systemd for the daemon of this installation: made, put in place, taken back.

The first line of each file says who made it, and has the digest of the rest: so what an
administrator has changed since is noticed, and neither replaced nor removed.
"""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from forkd import programs
from forkd.errors import Conflict, HostError, InvalidRequest
from forkd.host import files, folders, ownership, proc, process, users

if TYPE_CHECKING:
    from collections.abc import Sequence

SERVICE, SOCKET = "forkd.service", "forkd.socket"
UNITS = (SERVICE, SOCKET)

SYSTEM = Path("/etc/systemd/system")
"""Where an administrator's units are."""

PACKAGED = (Path("/usr/lib/systemd/system"), Path("/lib/systemd/system"))
"""Where those of a distribution's packages are."""

RUNS = Path("/run/systemd/system")
"""Is there while systemd runs (sd_booted(3))."""

TEMPLATE_PROGRAM = "/opt/forkd/bin/forkd-daemon"
"""What the files in `packaging` start."""

SYSTEMCTL_TIMEOUT_S = 150.0
"""How long systemd may take: a daemon has some time to adopt what runs."""

FILE_BYTES_MAX = 64 * 1024

MARK = "# Made by `forkd host install-service`; settings belong into forkd.toml or a drop-in. "

_DIGEST = re.compile(re.escape(MARK) + r"sha256:([0-9a-f]{64})")

_PLAIN = re.compile(r"[A-Za-z0-9/._+@-]+")
"""Paths that mean themselves in a unit file."""

State = Literal["missing", "same", "older", "changed"]
"""What is in the place of a file: nothing, the same, what we have made before, or another's."""


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A file of a unit, with what is in its place."""

    path: Path
    text: str
    state: State


@dataclass(frozen=True, slots=True)
class Target:
    """Whose manager it is: the system's, or that of the user who asks.

    Attributes:
        folder: Where its units are.
        of_user: Whether it is a user's.
    """

    folder: Path
    of_user: bool

    @classmethod
    def of_system(cls) -> Target:
        """Return the system's."""
        return cls(SYSTEM, of_user=False)

    @classmethod
    def of_this_user(cls) -> Target:
        """Return that of this user."""
        said = proc.environment().get("XDG_CONFIG_HOME", "")
        home = Path(said) if said.startswith("/") else proc.home() / ".config"
        return cls(home / "systemd/user", of_user=True)

    def systemctl(self, *words: str) -> None:
        """Have the manager do something.

        Raises:
            HostError: It refused; has what it said.
        """
        command = ["systemctl", *(["--user"] if self.of_user else []), *words]
        process.run(command, timeout_s=SYSTEMCTL_TIMEOUT_S, env=proc.environment())


def plan(target: Target) -> list[UnitFile]:
    """Return the files of this installation's units, with what is in their places.

    Raises:
        InvalidRequest: This user may not, or the path of the program cannot be in a unit.
        Conflict: A package has the units, or a file is not as we have made it.
        HostError: systemd does not run here, or the program is not there.
    """
    _check_may(target)
    if not target.of_user:
        _check_not_packaged()
    command = _command(target)
    planned = [_planned(target.folder / name, _text(target, name, command)) for name in UNITS]
    if changed := [str(each.path) for each in planned if each.state == "changed"]:
        raise Conflict(
            f"{' and '.join(changed)} is not as `forkd host install-service` has made it: move it "
            "away first; settings belong into forkd.toml or a drop-in"
        )
    return planned


def install(target: Target, planned: Sequence[UnitFile]) -> None:
    """Write the files, and have the manager start the units now and at each boot.

    Raises:
        HostError: A file cannot be written, and none stays; or the manager does not start the
            units, which stay.
    """
    folders.make(target.folder)
    written = []
    try:
        for each in planned:
            if each.state != "same":
                files.write_atomic(each.path, each.text.encode())
                written.append(each)
    except HostError:
        for each in written:
            if each.state == "missing":
                files.remove_file(each.path)
        raise
    target.systemctl("daemon-reload")
    target.systemctl("enable", "--now", SOCKET, SERVICE)


def installed(target: Target) -> list[UnitFile]:
    """Return the files that are there of those that `install` writes.

    Raises:
        InvalidRequest: This user may not remove them.
        HostError: systemd does not run here.
    """
    _check_may(target)
    found = [_planned(target.folder / name, "") for name in UNITS]
    return [each for each in found if each.state != "missing"]


def remove(target: Target, found: Sequence[UnitFile]) -> list[Path]:
    """Stop the units and remove the files that are as `install` wrote them; return the others.

    Sandboxes live on.

    Raises:
        HostError: The manager does not stop them, or a file cannot be removed.
    """
    ours = [each.path for each in found if each.state != "changed"]
    if ours:
        target.systemctl("disable", "--now", *(path.name for path in ours))
    for path in ours:
        files.remove_file(path)
    if target.of_user:
        _remove_empty(target.folder, 2)
    if ours:
        target.systemctl("daemon-reload")
    return [each.path for each in found if each.state == "changed"]


def rendered(template: str, command: str, *, group: bool) -> str:
    """Return what a unit file says for a program.

    Args:
        template: A file of `packaging`.
        command: The program, with the words before `serve` if it needs any.
        group: Whether the socket's group is there.
    """
    text = template.replace(TEMPLATE_PROGRAM, command)
    return text if group else re.sub(r"^SocketGroup=.*\n", "", text, flags=re.MULTILINE)


def has_group() -> bool:
    """Whether this host has the group of the socket."""
    return users.group_id("forkd") is not None


def _check_may(target: Target) -> None:
    is_root = proc.is_root()
    if not target.of_user and not is_root:
        raise InvalidRequest(
            "units of the system are root's: use sudo, or --user for a daemon of your own",
            field="user",
        )
    if not files.is_there(RUNS):
        raise HostError(
            f"systemd does not run here ({RUNS} is missing): `forkd up` starts a daemon without it"
        )


def _check_not_packaged() -> None:
    for folder in PACKAGED:
        if files.is_there(folder / SERVICE):
            raise Conflict(
                f"a package has {folder / SERVICE} already: `systemctl enable --now {SOCKET} "
                f"{SERVICE}` starts it"
            )


def _command(target: Target) -> str:
    """Return how this installation's daemon is started."""
    python = Path(sys.executable)
    program = python.parent / "forkd-daemon"
    words = [str(program)]
    if not files.is_file(program):
        program, words = python, [str(python), "-m", "forkd.daemon"]
    if not _PLAIN.fullmatch(str(program)):
        raise InvalidRequest(
            f"{program} has a character that means something in a unit file: install forkd in a "
            "folder whose path has letters, digits and /._+@- only",
            field="program",
        )
    owner = ownership.owner(program)
    if not target.of_user and owner != 0:
        raise InvalidRequest(
            f"{program} belongs to {users.user_name(owner)}, who could then act as root: install "
            "forkd as root, as into /opt/forkd",
            field="program",
        )
    return " ".join(words)


def _text(target: Target, name: str, command: str) -> str:
    template = name.replace(".", "-user.") if target.of_user else name
    data = files.read_all(programs.PACKAGING / template).decode()
    body = rendered(data, command, group=has_group())
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f"{MARK}sha256:{digest}\n{body}"


def _planned(path: Path, text: str) -> UnitFile:
    data = files.read(path, FILE_BYTES_MAX + 1)
    state: State = "missing"
    if data is not None:
        first, _, rest = data.partition(b"\n")
        said = _DIGEST.fullmatch(first.decode(errors="replace"))
        is_ours = said is not None and said[1] == hashlib.sha256(rest).hexdigest()
        state = "same" if data == text.encode() else "older" if is_ours else "changed"
    return UnitFile(path, text, state)


def _remove_empty(folder: Path, levels: int) -> None:
    """Remove a folder and those above it while they are empty."""
    for each in (folder, *folder.parents)[:levels]:
        if not files.is_folder(each) or files.entries(each):
            return
        files.remove_tree(each)
