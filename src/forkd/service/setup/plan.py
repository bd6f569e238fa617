"""What sets a host up: the steps, in order, as a function of what was seen.

A step is a part of the host, what it is to be like, and why.  Only what is wrong has a step: a
host that is set up has none.  Values are set behind the files that set them at each start, and what
needs a group behind the group.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forkd.cgroups.limits import CONTROLLERS, IO
from forkd.host import tuning
from forkd.host.parts import Kind, Part
from forkd.service.setup import texts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from forkd.host.parts import State
    from forkd.host.tuning import Seen

GROUP = "forkd"
"""The group whose members may use the daemon of root."""

KVM_GROUP = "kvm"
"""What distributions call the group of /dev/kvm."""

DEVICE = "dev/kvm"
DEVICE_MODE = 0o660
OTHERS_RW = stat.S_IROTH | stat.S_IWOTH
GROUP_RW = stat.S_IRGRP | stat.S_IWGRP
FILE_MODE = 0o644
FOLDER_MODE = 0o755

DELEGATED = frozenset({*CONTROLLERS, IO})
"""Controllers of the limits of sandboxes."""

CGROUPS_PATH = "/sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class Device:
    """What /dev/kvm is like.

    Attributes:
        gid: Its group's number.
        group: Its group's name; None if it has none.
        mode: Its permissions.
    """

    gid: int
    group: str | None
    mode: int

    @property
    def is_open(self) -> bool:
        """Whether every user may use it."""
        return self.mode & OTHERS_RW == OTHERS_RW

    @property
    def users(self) -> str | None:
        """The group that may use it, and is not root's; None if there is none."""
        return self.group if self.mode & GROUP_RW == GROUP_RW and self.gid != 0 else None


@dataclass(frozen=True, slots=True)
class Situation:
    """A host, as far as setting it up cares.

    Attributes:
        host: What it says of itself.
        files: What is in the files of `texts` that are there, as states.
        owner: The user and the group of new files.
        live: Whether the host is this one, and not a folder with another's files.
        group: Whether there is the group `GROUP`.
        kvm_gid: The number of the group `KVM_GROUP`; None if there is none.
        user: Who is to use forkd without being root; None for nobody.
        user_groups: The groups of that user.
        device: What /dev/kvm is like; None if there is none.
        cgroup_options: How cgroup v2 is mounted at `CGROUPS_PATH`; None if it is not.
        has_udev: Whether udev makes devices.
        delegated: What systemd delegates to users; None without systemd.
        vmm: The VMM; None if it is missing.
        profile: The profile for AppArmor that comes with forkd; None if it is missing.
        profile_loaded: Whether AppArmor has a profile of that name.
    """

    host: Seen
    files: Mapping[Path, State] = field(default_factory=dict)
    owner: tuple[int, int] = (0, 0)
    live: bool = True
    group: bool = True
    kvm_gid: int | None = None
    user: str | None = None
    user_groups: frozenset[str] = frozenset()
    device: Device | None = None
    cgroup_options: frozenset[str] | None = None
    has_udev: bool = False
    delegated: frozenset[str] | None = None
    vmm: Path | None = None
    profile: str | None = None
    profile_loaded: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One change of a host.

    Attributes:
        part: What is changed.
        wanted: What it is to be like.
        title: The change, in a few words.
        why: What it is good for.
    """

    part: Part
    wanted: State
    title: str
    why: str

    @property
    def text(self) -> str | None:
        """What is to be in a file; None if it is no file."""
        if self.part.kind is not Kind.FILE or self.wanted is None:
            return None
        return str(self.wanted["text"])

    def as_members(self) -> dict[str, object]:
        """Return the change as members of a JSON object."""
        return {"title": self.title, "why": self.why, "wanted": self.wanted}


def steps(seen: Situation) -> tuple[Step, ...]:
    """Return what sets a host up."""
    found = [*_settings(seen)]
    if seen.live:
        found = [
            *_group(seen),
            *_device(seen),
            *_membership(seen),
            *found,
            *_cgroups(seen),
            *_delegation(seen),
            *_profile(seen),
        ]
    return tuple(found)


def _group(seen: Situation) -> Iterator[Step]:
    if not seen.group:
        why = "its members may use the daemon of root"
        yield Step(Part(Kind.GROUP, GROUP), {"members": ""}, f"create the group {GROUP}", why)


def _device(seen: Situation) -> Iterator[Step]:
    """Open /dev/kvm to a group, if nobody but root may use it."""
    device = seen.device
    if device is None or device.is_open or device.users is not None:
        return
    if seen.kvm_gid is None:
        part = Part(Kind.GROUP, KVM_GROUP)
        yield Step(part, {"members": ""}, f"create the group {KVM_GROUP}", "it may use /dev/kvm")
    why = f"/dev/kvm opens to the group {KVM_GROUP}"
    if seen.has_udev:
        yield _file(seen, texts.UDEV_FILE, texts.udev_rule(KVM_GROUP), why)
    title = f"give /dev/kvm to the group {KVM_GROUP}"
    yield Step(Part(Kind.DEVICE_GROUP, DEVICE), {"group": KVM_GROUP}, title, why)
    if device.mode != DEVICE_MODE:
        title = f"set the mode of /dev/kvm to {stat.filemode(DEVICE_MODE)[1:]}"
        yield Step(Part(Kind.DEVICE_MODE, DEVICE), {"mode": DEVICE_MODE}, title, why)


def device_group(device: Device | None) -> str | None:
    """Return the group that a user must be in to use /dev/kvm, once the host is set up.

    None if no group is needed, or there is no such device.
    """
    if device is None or device.is_open:
        return None
    return device.users or KVM_GROUP


def groups_wanted(seen: Situation) -> dict[str, str]:
    """Return the groups that the user is to be in and is not, and what each is good for."""
    if seen.user is None:
        return {}
    wanted = {GROUP: "lets the user control the daemon of root"}
    if (users := device_group(seen.device)) is not None:
        wanted[users] = "opens /dev/kvm to the user"
    return {name: why for name, why in wanted.items() if name not in seen.user_groups}


def _membership(seen: Situation) -> Iterator[Step]:
    for group, why in groups_wanted(seen).items():
        part = Part(Kind.MEMBER, f"{seen.user}:{group}")
        title = f"add {seen.user} to the group {group}"
        yield Step(part, {"member": 1}, title, f"{why}, from the next login on")


def _settings(seen: Situation) -> Iterator[Step]:
    wrong = tuning.wrong(seen.host)
    existing = {path: str(state["text"]) for path, state in seen.files.items() if state is not None}
    for path, text in texts.settings(seen.host, wrong, existing).items():
        names = [each.short_name for each in wrong if texts.file_of(each, seen.host) == path]
        yield _file(seen, path, text, f"sets {', '.join(names)} at each start")
    for each in wrong if seen.live else ():
        part = Part(Kind.VALUE, each.name)
        title = f"set {each.short_name} from {seen.host.values[each.name]} to {each.wanted}"
        yield Step(part, {"value": each.wanted}, title, f"else {each.loss}")


def _cgroups(seen: Situation) -> Iterator[Step]:
    """Have forks not wait for cgroups, where KVM makes them wait."""
    options = seen.cgroup_options
    if options is None or tuning.favordynmods(seen.host) is not False:
        return
    why = "else a fork waits for a thread that KVM makes"
    if seen.delegated is not None:
        yield _file(seen, texts.CGROUPS_UNIT, texts.cgroups_unit(options), f"at each start: {why}")
        title = "start forkd-cgroups.service with the host"
        target: State = {"target": f"../{texts.CGROUPS_UNIT.name}"}
        yield Step(Part(Kind.LINK, str(texts.CGROUPS_WANTED)), target, title, why)
    part = Part(Kind.MOUNT_OPTION, f"favordynmods:{CGROUPS_PATH}")
    yield Step(part, {"on": 1}, f"remount {CGROUPS_PATH} with favordynmods", why)


def _delegation(seen: Situation) -> Iterator[Step]:
    if seen.user is None or seen.delegated is None or seen.delegated >= DELEGATED:
        return
    missing = ", ".join(sorted(DELEGATED - seen.delegated))
    why = f"daemons of users can limit sandboxes by {missing}, from their next login on"
    text = texts.delegation(DELEGATED | seen.delegated)
    yield _file(seen, texts.DELEGATE_FILE, text, why)


def _profile(seen: Situation) -> Iterator[Step]:
    """Let the VMM have rights in user namespaces, where AppArmor takes them from programs."""
    if not seen.host.userns_restricted or seen.vmm is None or seen.profile is None:
        return
    text = texts.profile(seen.profile, seen.vmm)
    state = seen.files.get(texts.PROFILE_FILE)
    why = "else AppArmor keeps daemons without root from jailing machines"
    is_same = state is not None and state["text"] == text
    if not is_same:
        yield _file(seen, texts.PROFILE_FILE, text, why)
    if not is_same or not seen.profile_loaded:
        part = Part(Kind.PROFILE, texts.PROFILE)
        yield Step(part, {"loaded": 1}, f"load the AppArmor profile {texts.PROFILE}", why)


def _file(seen: Situation, path: Path, text: str, why: str) -> Step:
    """Return the step that writes a file, with the mode and the owner that it has already."""
    uid, gid = seen.owner
    state: dict[str, str | int] = {"mode": FILE_MODE, "uid": uid, "gid": gid}
    before = seen.files.get(path)
    state |= {} if before is None else before
    verb = "write" if before is None else "change"
    return Step(Part(Kind.FILE, str(path)), {**state, "text": text}, f"{verb} /{path}", why)
