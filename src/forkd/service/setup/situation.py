"""Look at what decides how a host is to be set up; change nothing."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from forkd import programs
from forkd.errors import HostError, InvalidRequest, NotFound
from forkd.host import files, kvm, parts, proc, tuning, users
from forkd.host.parts import FILE_BYTES_MAX, Kind, Part
from forkd.service.setup import texts
from forkd.service.setup.plan import CGROUPS_PATH, DEVICE, GROUP, KVM_GROUP, Device, Situation

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.host.parts import State
    from forkd.host.tuning import Seen

UDEV = tuning.ROOT / "run/udev/control"
"""Where a running udev listens."""

FILES = (*texts.SETTINGS_FILES, texts.PROFILE_FILE, texts.DELEGATE_FILE, texts.UDEV_FILE)


def look(root: Path, user: str | None, host: Seen | None = None) -> Situation:
    """Return what a host is like.

    Args:
        root: Where its files are.
        user: Who is to use forkd without being root; None for nobody.
        host: What it says of itself; None to look.

    Raises:
        InvalidRequest: There is no such user.
        HostError: A file that set-up would change cannot be read, or is no regular file.
    """
    seen = tuning.look() if host is None else host
    found = {path: _file(path, root) for path in FILES}
    own = (users.user_id(), users.primary_group_id())
    if root != tuning.ROOT:
        return Situation(seen, found, own, live=False)
    return _live(seen, found, user)


def _file(path: Path, root: Path) -> State:
    """Return what a file is like; who is not root, and may not read it, sees none."""
    try:
        return parts.read(Part(Kind.FILE, str(path)), root)
    except HostError:
        if proc.is_root() or root != tuning.ROOT:
            raise
        return None


def _live(seen: Seen, found: dict[Path, State], user: str | None) -> Situation:
    return Situation(
        host=seen,
        files=found,
        group=parts.group_exists(GROUP),
        kvm_gid=users.group_id(KVM_GROUP),
        user=user,
        user_groups=_groups(user),
        device=_device(),
        cgroup_options=_cgroup_options(),
        has_udev=files.is_there(UDEV),
        delegated=_delegated(),
        vmm=_vmm(),
        profile=_profile(),
        profile_loaded=_is_loaded() if seen.userns_restricted else False,
    )


def default_user() -> str | None:
    """Return who is to use forkd, unless that is said: who has called sudo, or calls us.

    None if that is root, or nobody that this host knows.
    """
    calling = proc.environment().get("SUDO_USER", "root")
    name = calling if proc.is_root() else users.user_name(users.user_id())
    return name if name != "root" and parts.user_exists(name) else None


def is_folder(path: Path) -> bool:
    """Whether a path leads to a folder."""
    return files.is_folder(path)


def _groups(user: str | None) -> frozenset[str]:
    if user is None:
        return frozenset()
    try:
        return parts.groups_of(user)
    except NotFound as error:
        raise InvalidRequest(f"--user: {error}", field="user") from error


def _device() -> Device | None:
    """Return what /dev/kvm is like; None also if its KVM runs no guests of ours."""
    found = parts.device(tuning.ROOT / DEVICE)
    if found is None or kvm.is_pvm():
        return None
    return Device(found.st_gid, parts.group_name(found.st_gid), stat.S_IMODE(found.st_mode))


def _delegated() -> frozenset[str] | None:
    """Return what systemd delegates to users; None also if it does not answer, as in a chroot."""
    try:
        return parts.delegated_to_users()
    except HostError:
        return None


def _cgroup_options() -> frozenset[str] | None:
    options = parts.mount_options(CGROUPS_PATH, kind="cgroup2")
    return None if options is None else frozenset(options)


def _vmm() -> Path | None:
    try:
        return files.real_path(programs.find(programs.VMM))
    except HostError:
        return None


def _profile() -> str | None:
    data = files.read(programs.PACKAGING / "apparmor" / texts.PROFILE, FILE_BYTES_MAX)
    return None if data is None else data.decode()


def _is_loaded() -> bool:
    """Whether AppArmor has our profile; who is not root cannot know, and is told by trying."""
    try:
        return parts.read(Part(Kind.PROFILE, texts.PROFILE)) is not None
    except HostError:
        return True
