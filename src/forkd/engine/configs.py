"""What VMM processes are told, as `protocol/control/PROTOCOL.md` has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from forkd.model.json import JsonObject, JsonValue


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """A disk made of layers.

    Attributes:
        layers: Immutable ones, lowest first: a raw image, then layer files.
        size_bytes: What the guest sees.
        top_limit_bytes: Most that the private top layer may hold; None for no limit.
        top_directory: Where the file of the private top layer goes; None for the machine's folder.
        top_reserve_bytes: What writes to it leave free of that folder's file system; None for 0.
    """

    layers: tuple[Path, ...]
    size_bytes: int
    top_limit_bytes: int | None = None
    top_directory: Path | None = None
    top_reserve_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """A network interface.

    Attributes:
        tap: The host's end.
        mac: The guest's.
        address: The guest's address with its prefix length.
        gateway: Where everything goes that is not on this link; None for nowhere.
        address_v6: The guest's IPv6 address with its prefix length; None without.
        gateway_v6: As `gateway`, of IPv6.
        dns: Which name servers it is told.
    """

    tap: str
    mac: str
    address: str
    gateway: str | None = None
    address_v6: str | None = None
    gateway_v6: str | None = None
    dns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CgroupsConfig:
    """Where the children of a zygote have their cgroups.

    Attributes:
        path: The group below which they are.
        group: The group of users that may have processes born in them; None with `rootless`.
        own: The group, below `path`, that the zygote enters; None with `rootless`.
    """

    path: Path
    group: int | None = None
    own: Path | None = None


@dataclass(frozen=True, slots=True)
class JailConfig:
    """What is left to a process of the host.

    Attributes:
        group: Of all that is jailed; None with `rootless`.
        folders: What it sees of the host's files.
        uid: User, and group, of a machine; user of a zygote.
        rootless: Whether it is the jail of a daemon that is not root, whose user all stay.
        users: For a zygote, unless it is `rootless`: those of itself, its children and zygotes
            derived from it, as runs: the first user, and how many.
        cgroups: For a zygote: where its children have theirs; None without.
    """

    group: int | None
    folders: tuple[Path, ...]
    uid: int | None = None
    rootless: bool | None = None
    users: tuple[tuple[int, int], ...] | None = None
    cgroups: CgroupsConfig | None = None


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """A machine to boot; see the contract for each member."""

    directory: Path
    kernel: Path
    vcpus: int
    memory_bytes: int
    cpu: Literal["host", "portable"] | None = None
    initramfs: Path | None = None
    cmdline: str | None = None
    disk: DiskConfig | None = None
    jail: JailConfig | None = None


@dataclass(frozen=True, slots=True)
class ZygoteConfig:
    """A snapshot to hold; see the contract for each member."""

    directory: Path
    state: Path
    memory: tuple[Path, ...]
    disk: DiskConfig | None = None
    jail: JailConfig | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """What a guest is told of itself after a fork, a reset or a promotion.

    Attributes:
        hostname: Its name.
        machine_id: Its machine id, 32 hex digits: the same as long as the sandbox lives.
        boot_id: Its boot id, a UUID: another each time.
        network: Its interface; None without one.
        guest_memory_bytes: What the guest may use of its memory; None for all.
    """

    hostname: str
    machine_id: str
    boot_id: str
    network: NetworkConfig | None = None
    guest_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ChildConfig:
    """A child to fork; see the contract for each member."""

    id: str
    directory: Path
    identity: Identity
    uid: int | None = None
    cgroup: Path | None = None
    top_limit_bytes: int | None = None
    top_directory: Path | None = None
    top_reserve_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BranchConfig:
    """A seed that a machine is to fork of itself; see the contract for each member."""

    directory: Path
    cgroup: Path | None = None


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """What a zygote is to write of itself: all of it, or what its parent lacks.

    Attributes:
        directory: Existing and empty; gets `state`, `memory` and `disk.layer`.
        memory: The parent's memory files, base first; none for a snapshot that needs no other.
        disk_layers: How many of the disk's lowest layers the parent has.
    """

    directory: Path
    memory: tuple[Path, ...] = ()
    disk_layers: int = 1


@dataclass(frozen=True, slots=True)
class DeriveUsers:
    """The users of a zygote that is derived from another.

    Attributes:
        name: What their user namespace was called when it was handed over.
        uid: The user that it becomes there.
    """

    name: Path
    uid: int


@dataclass(frozen=True, slots=True)
class DeriveConfig:
    """A delta to hold over the memory of a zygote.

    Attributes:
        directory: Existing; where the new zygote's socket goes.
        state: The delta's state file.
        memory: The delta's memory file.
        disk: All layers of the delta's disk, lowest first; those that the zygote has are shared.
        users: Who it is, and who its children are; None for the users of the zygote.
    """

    directory: Path
    state: Path
    memory: Path
    disk: DiskConfig | None = None
    users: DeriveUsers | None = None


@dataclass(frozen=True, slots=True)
class CompareConfig:
    """Two disks with their lowest layers in common, whose files are to be compared.

    Attributes:
        layers: What both have: the image, then layer files.
        size_bytes: Size of each.
        before: The layer that the first has above them.
        after: The layer that the second has above them.
        entries_max: Most files of one of them.
        changes_max: Most changes to name.
        uid: The user that looks at them, jailed; None for nobody, in the host's namespaces.
        rootless: Whether the daemon's user looks at them, jailed.
    """

    layers: tuple[Path, ...]
    size_bytes: int
    before: Path
    after: Path
    entries_max: int
    changes_max: int
    uid: int | None = None
    rootless: bool | None = None


_Config: TypeAlias = (
    MachineConfig
    | ZygoteConfig
    | ChildConfig
    | BranchConfig
    | LinkConfig
    | DeriveConfig
    | CompareConfig
    | Identity
)


def members(config: _Config) -> JsonObject:
    """Return `config` as the JSON object of the contract; what is None is left out.

    The members of a child's identity are the child's own.
    """
    found = _object(config)
    identity = found.pop("identity", None)
    return {**found, **identity} if isinstance(identity, dict) else found


def _object(config: object) -> JsonObject:
    # Not `dataclasses.asdict`: it copies deeply, and a fork turns a thousand of these at once.
    values = ((name, getattr(config, name)) for name in config.__slots__)  # type: ignore[attr-defined]  # all here have slots
    return {name: _plain(value) for name, value in values if value is not None}


def _plain(value: object) -> JsonValue:
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return _object(value)
