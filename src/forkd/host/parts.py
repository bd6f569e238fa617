"""Parts of how a host is set up, each with a state that can be read, compared and written.

`forkd host setup` notes the state of a part before it changes it, and `undo` writes that state
back.  So every part has the same two calls, and each `write` is one step for the kernel: a crash
leaves the state from before it or the one after it, never a third.

    folder        its mode; absent: removed, if it is empty
    file          text, mode and owner
    link          where a symbolic link leads
    value         the value of a setting of the kernel (`forkd.host.tuning`)
    group         a group of users, with its members
    member        that a user is in a group: the name is `USER:GROUP`
    device_group  the group of a device
    device_mode   the permissions of a device
    mount_option  that a file system is mounted with an option: the name is `OPTION:PATH`
    profile       that AppArmor has a profile: the name is the profile's, and its file's

Files, folders and links are below a root, which may be that of another system; the other parts are
this host's.
"""

from __future__ import annotations

import ctypes
import grp
import os
import pwd
import stat
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import Conflict, HostError, NotFound
from forkd.host import files, process, tunables, tuning, users
from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from collections.abc import Callable

State = dict[str, str | int] | None
"""What a part is like; None if it is not there."""

FILE_BYTES_MAX = 64 * 1024
"""The longest file that set-up reads and changes."""

PROGRAM_TIMEOUT_S = 60.0
"""Time that a program has to change one part."""

_LIBC = ctypes.CDLL(None, use_errno=True)
"""For what Python's `os` lacks."""

_MS_REMOUNT = 32
_MOUNT_FLAGS = {
    "rw": 0,
    "ro": 1,
    "nosuid": 2,
    "nodev": 4,
    "noexec": 8,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
}
"""Options of every file system, which are bits (linux/mount.h)."""

PROFILES = Path("sys/kernel/security/apparmor/profiles")
PROFILES_FOLDER = Path("etc/apparmor.d")


class Kind(StrEnum):
    """What a part is."""

    FOLDER = "folder"
    FILE = "file"
    LINK = "link"
    VALUE = "value"
    GROUP = "group"
    MEMBER = "member"
    DEVICE_GROUP = "device_group"
    DEVICE_MODE = "device_mode"
    MOUNT_OPTION = "mount_option"
    PROFILE = "profile"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a host.

    Attributes:
        kind: What it is.
        name: Which one: a path without its leading slash for files, folders, links and devices;
            else as the module says.
    """

    kind: Kind
    name: str

    @property
    def title(self) -> str:
        """What a person calls it."""
        first, _, second = self.name.partition(":")
        return _TITLES[self.kind].format(name=self.name, first=first, second=second)


_TITLES = {
    Kind.FOLDER: "/{name}",
    Kind.FILE: "/{name}",
    Kind.LINK: "/{name}",
    Kind.VALUE: "{name}",
    Kind.GROUP: "the group {name}",
    Kind.MEMBER: "{first} in the group {second}",
    Kind.DEVICE_GROUP: "the group of /{name}",
    Kind.DEVICE_MODE: "the mode of /{name}",
    Kind.MOUNT_OPTION: "{first} of {second}",
    Kind.PROFILE: "the AppArmor profile {name}",
}


def read(part: Part, root: Path = tuning.ROOT) -> State:
    """Return what a part is like now.

    Raises:
        HostError: The kernel does not say; or a file is no regular one, or too long for set-up.
    """
    return _READ[part.kind](part.name, root)


def write(part: Part, state: State, root: Path = tuning.ROOT) -> None:
    """Make a part like that.

    Raises:
        Conflict: A folder that is to go has something in it.
        HostError: The kernel, or the program that changes such a part, refused.
    """
    _WRITE[part.kind](part.name, state, root)


def _read_folder(name: str, root: Path) -> State:
    path = root / name
    with kernel_call(f"look at {path}"):
        return {"mode": stat.S_IMODE(path.stat().st_mode)} if path.is_dir() else None


def _write_folder(name: str, state: State, root: Path) -> None:
    path = root / name
    if state is None:
        with kernel_call(f"list {path}"):
            if any(path.iterdir()):
                raise Conflict(f"{path} has other files in it")
        with kernel_call(f"remove {path}"):
            path.rmdir()
        return
    with kernel_call(f"make the folder {path}"):
        path.mkdir()
        path.chmod(int(state["mode"]))


def _read_file(name: str, root: Path) -> State:
    path = root / name
    with kernel_call(f"look at {path}"):
        if path.is_symlink():
            raise HostError(f"{path} is a symbolic link, and set-up changes no file elsewhere")
    try:
        data = files.read_regular(path, FILE_BYTES_MAX + 1)
    except NotFound:
        return None
    if len(data) > FILE_BYTES_MAX:
        raise HostError(f"{path} has more than {FILE_BYTES_MAX} bytes, too many for set-up")
    with kernel_call(f"look at {path}"):
        found = path.stat()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise HostError(f"{path} is no text in UTF-8, and set-up changes no other file") from error
    mode = stat.S_IMODE(found.st_mode)
    return {"text": text, "mode": mode, "uid": found.st_uid, "gid": found.st_gid}


def _write_file(name: str, state: State, root: Path) -> None:
    path = root / name
    if state is None:
        files.remove_file(path)
        return
    text = str(state["text"]).encode()
    owner = int(state["uid"]), int(state["gid"])
    files.write_atomic(path, text, mode=int(state["mode"]), owner=owner)


def _read_link(name: str, root: Path) -> State:
    path = root / name
    with kernel_call(f"look at {path}"):
        if not path.is_symlink():
            if path.exists():
                raise HostError(f"{path} is no symbolic link")
            return None
        return {"target": str(path.readlink())}


def _write_link(name: str, state: State, root: Path) -> None:
    path = root / name
    if state is None:
        files.remove_file(path)
        return
    with kernel_call(f"link {path}"):
        path.symlink_to(str(state["target"]))


def _read_value(name: str, root: Path) -> State:
    value = tuning.value(name, root)
    return None if value is None else {"value": value}


def _write_value(name: str, state: State, root: Path) -> None:
    if state is not None:
        with kernel_call(f"set {name}"):
            tunables.write(root / tuning.path_of(name), str(state["value"]))


def _read_group(name: str, _root: Path) -> State:
    try:
        return {"members": ",".join(sorted(grp.getgrnam(name).gr_mem))}
    except KeyError:
        return None


def _write_group(name: str, state: State, _root: Path) -> None:
    _run("groupdel", name) if state is None else _run("groupadd", "--system", name)


def _read_member(name: str, _root: Path) -> State:
    user, _, group = name.partition(":")
    try:
        return {"member": 1} if group in groups_of(user) else None
    except NotFound:
        return None


def _write_member(name: str, state: State, _root: Path) -> None:
    user, _, group = name.partition(":")
    _run("gpasswd", "--delete" if state is None else "--add", user, group)


def _read_device_group(name: str, root: Path) -> State:
    found = device(root / name)
    return None if found is None else {"group": group_name(found.st_gid) or str(found.st_gid)}


def _write_device_group(name: str, state: State, root: Path) -> None:
    if state is None:
        return
    gid = users.group_id(str(state["group"]))
    if gid is None:
        raise HostError(f"there is no group {state['group']} on this host")
    with kernel_call(f"give {root / name} to group {state['group']}"):
        os.chown(root / name, -1, gid)


def _read_device_mode(name: str, root: Path) -> State:
    found = device(root / name)
    return None if found is None else {"mode": stat.S_IMODE(found.st_mode)}


def _write_device_mode(name: str, state: State, root: Path) -> None:
    if state is not None:
        with kernel_call(f"change the mode of {root / name}"):
            (root / name).chmod(int(state["mode"]))


def _read_mount_option(name: str, root: Path) -> State:
    option, _, path = name.partition(":")
    options = mount_options(path, root)
    return {"on": 1} if options is not None and option in options else None


def _write_mount_option(name: str, state: State, root: Path) -> None:
    option, _, path = name.partition(":")
    others = [each for each in mount_options(path, root) or () if each != option]
    _remount(path, [*others, *([] if state is None else [option])])


def _remount(path: str, options: list[str]) -> None:
    """Mount a file system again with exactly these options, where mount(8) would keep others."""
    flags = _MS_REMOUNT | sum(_MOUNT_FLAGS.get(each, 0) for each in options)
    data = ",".join(each for each in options if each not in _MOUNT_FLAGS)
    with kernel_call(f"mount {path} with {','.join(options)}"):
        if _LIBC.mount(None, os.fsencode(path), None, ctypes.c_ulong(flags), data.encode()) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _read_profile(name: str, root: Path) -> State:
    with kernel_call("list AppArmor's profiles"):
        try:
            text = (root / PROFILES).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
    return {"loaded": 1} if any(line.split()[:1] == [name] for line in text.splitlines()) else None


def _write_profile(name: str, state: State, root: Path) -> None:
    if state is not None:
        _run("apparmor_parser", "--replace", str(root / PROFILES_FOLDER / name))
        return
    with kernel_call(f"unload AppArmor's profile {name}"):
        tunables.write(root / PROFILES.with_name(".remove"), name)


_READ: dict[Kind, Callable[[str, Path], State]] = {
    Kind.FOLDER: _read_folder,
    Kind.FILE: _read_file,
    Kind.LINK: _read_link,
    Kind.VALUE: _read_value,
    Kind.GROUP: _read_group,
    Kind.MEMBER: _read_member,
    Kind.DEVICE_GROUP: _read_device_group,
    Kind.DEVICE_MODE: _read_device_mode,
    Kind.MOUNT_OPTION: _read_mount_option,
    Kind.PROFILE: _read_profile,
}

_WRITE: dict[Kind, Callable[[str, State, Path], None]] = {
    Kind.FOLDER: _write_folder,
    Kind.FILE: _write_file,
    Kind.LINK: _write_link,
    Kind.VALUE: _write_value,
    Kind.GROUP: _write_group,
    Kind.MEMBER: _write_member,
    Kind.DEVICE_GROUP: _write_device_group,
    Kind.DEVICE_MODE: _write_device_mode,
    Kind.MOUNT_OPTION: _write_mount_option,
    Kind.PROFILE: _write_profile,
}


def device(path: Path) -> os.stat_result | None:
    """Return what a device is like; None if there is none."""
    with kernel_call(f"look at {path}"):
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
    return found if stat.S_ISCHR(found.st_mode) else None


def groups_of(user: str) -> frozenset[str]:
    """Return the names of the groups that a user is in, by the host's list of users.

    Raises:
        NotFound: There is no such user.
    """
    try:
        first = pwd.getpwnam(user).pw_gid
    except KeyError:
        raise NotFound(f"there is no user {user} on this host") from None
    found = {each.gr_name for each in grp.getgrall() if user in each.gr_mem or each.gr_gid == first}
    return frozenset(found)


def user_exists(name: str) -> bool:
    """Whether this host has a user of that name."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def group_exists(name: str) -> bool:
    """Whether this host has a group of that name."""
    return users.group_id(name) is not None and not name.isdecimal()


def group_name(gid: int) -> str | None:
    """Return what a group is called; None if it has no name."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return None


def mount_options(
    path: str, root: Path = tuning.ROOT, kind: str | None = None
) -> tuple[str, ...] | None:
    """Return the options of the file system that is mounted at a path.

    None if there is none; or none of a kind, if that is given.
    """
    with kernel_call("list mounts"):
        text = (root / "proc/self/mounts").read_text(encoding="utf-8")
    found = [each for each in map(str.split, text.splitlines()) if each[1] == path]
    if not found or kind not in {None, found[-1][2]}:
        return None
    return tuple(found[-1][3].split(","))


def run_if_there(words: tuple[str, ...]) -> None:
    """Run a program that has something read again, if it is installed.

    Raises:
        HostError: It failed.
    """
    if process.installed(words[0]):
        _run(*words)


def delegated_to_users() -> frozenset[str] | None:
    """Return the cgroup controllers that systemd delegates to users; None without systemd.

    Raises:
        HostError: systemd does not answer.
    """
    if not files.is_folder(Path("/run/systemd/system")):
        return None
    asked = ("systemctl", "show", "--property=DelegateControllers", "--value", "user@0.service")
    return frozenset(process.run(asked, timeout_s=PROGRAM_TIMEOUT_S).stdout.decode().split())


def _run(*words: str) -> None:
    process.run(words, timeout_s=PROGRAM_TIMEOUT_S)
