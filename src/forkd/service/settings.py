"""Where a host's things are; everything else follows from these."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forkd import limits
from forkd.errors import InvalidRequest
from forkd.host.sockets import PATH_BYTES_MAX
from forkd.images.registries import Registries
from forkd.model.tree import TreeBudgets

if TYPE_CHECKING:
    from forkd.model.network import NetworkPolicy
    from forkd.model.pack import UnpackRequest
    from forkd.network.plan import Plan
    from forkd.network.upstream import Via
    from forkd.service.jail import UidRange

LONGEST_SOCKET_NAME = "s/sb-abcdefghijklmnopqrstuvwxyz/vsock.sock_1025"
"""The longest socket's path below the run folder."""

TOPS_PATH_BYTES_MAX = 200
"""Longest path of the folder of private disk layers: each child of a fork is told it."""

ZYGOTE_IDLE_S = 600.0
"""How long a snapshot's zygote stays after its last fork: it costs memory, a start some 100 ms."""

SETTLE_S = 1.0
"""How long the guest is left alone before its instant is taken.

What its kernel has put off (freeing what the warm-up's processes left, throttling timers, the end
of a thread) would otherwise be done again by every child, each time on pages of its own.
"""


@dataclass(frozen=True, slots=True)
class PackPolicy:
    """What packs a host takes; a request may only be stricter.

    Attributes:
        trusted_keys: Public keys, of 32 bytes each, whose signature is believed; None to leave
            that to each request.
        allow_unsigned: Whether a request may take a pack that is unsigned, or signed by another.
    """

    trusted_keys: frozenset[bytes] | None = None
    allow_unsigned: bool = False

    def restrict(self, request: UnpackRequest) -> UnpackRequest:
        """Return what a request may have of what it asks for.

        Raises:
            InvalidRequest: It asks to take unsigned packs, and this host does not.
        """
        if request.allow_unsigned and not self.allow_unsigned:
            raise InvalidRequest(
                "this host takes no unsigned packs: have the pack signed by a key that you trust, "
                "or the operator set FORKD_PACK_UNSIGNED=allow",
                field="allow_unsigned",
            )
        if self.trusted_keys is None:
            return request
        wanted = request.trusted or tuple(self.trusted_keys)
        return replace(request, trusted=tuple(k for k in wanted if k in self.trusted_keys))


@dataclass(frozen=True, slots=True)
class DiskPolicy:
    """What the private disk layers of sandboxes may take of the host's disk.

    Attributes:
        directory: Where they lie, as files without names; None for `tops` in the state folder.
        limit_mib: Of each sandbox that asks for no limit of its own.
        reserve_mib: What writes leave free there; those that would not fail in the guest.
    """

    directory: Path | None = None
    limit_mib: int = limits.DISK_LIMIT_MIB_DEFAULT
    reserve_mib: int = limits.DISK_RESERVE_MIB_DEFAULT


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """What new work must leave of the host.

    Attributes:
        memory_reserve_mib: Memory that must be available before anything new is started.
        memory_overcommit: Most memory that guests may be promised together, as a multiple of the
            host's; None for no limit.
        memory_pressure_max: In how many percent of the last ten seconds nothing could run for want
            of memory, at most.
        io_pressure_max: Likewise because all waited for I/O; None for no limit.
        cpu_pressure_max: In how many percent of them something waited for a processor, at most;
            None for no limit.
    """

    memory_reserve_mib: int = limits.MEMORY_RESERVE_MIB_DEFAULT
    memory_overcommit: float | None = None
    memory_pressure_max: float = limits.MEMORY_PRESSURE_MAX_DEFAULT
    io_pressure_max: float | None = None
    cpu_pressure_max: float | None = None


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Where a host's things are.

    Attributes:
        vmm: The VMM's program.
        agent: The agent's program, static, put into each initramfs.
        cache_dir: Where kernels and images are built and kept; may be removed at any time.
        state_dir: What must survive a restart: snapshots and the database.
        run_dir: Machines' sockets and logs; must have a short path.
        recipe_dirs: Folders whose recipes a request may name.
        cgroup_root: The group below which limited sandboxes get theirs; None to derive it, and
            to stay with it.
        cgroups: Whether every sandbox has a cgroup, with limits that follow from its snapshot where
            none were asked for; otherwise only those have one that were asked for with a limit.
        network: Which taps and addresses sandboxes get; None likewise.
        sandbox_ttl_s: How long sandboxes live whose time to live is left to the host.
        zygote_idle_s: How long a snapshot's zygote stays after its last fork.
        zygotes_max: How many zygotes there may be; the one that was idle longest ends for another.
        settle_s: How long a guest is left alone before its instant is taken.
        budgets: How far a tree of sandboxes may grow.
        packs: What packs are taken.
        disks: What private disk layers may take.
        admission: What new work must leave of the host.
        uids: Users for the processes of machines; None to have them be the daemon's, not jailed.
        rootless_jail: Whether they are jailed without users of their own, by a daemon that is not
            root.
        build_uids: Users for builds of images, for their root and others; None to have them be the
            daemon's, not in cells.
        build_network: What downloads of builds may reach; None for all that this host does.
        registries: Which registries need no TLS, and credentials for them.
        image_cache_mib: What images that no named snapshot needs, and snapshots of images without a
            name, may take together.
        filtered: Whether these processes may make only the system calls that they need.
        own_cores: Whether each machine has a core to itself while it runs on it.
        dns: Whom the resolver of sandboxes asks, addresses and ports; none for the host's own.
        egress_proxy: By which proxy connections of sandboxes go out; None for straight.
        egress_ca: Certificates that the egress proxy trusts beside the host's; None for none.
        network_slots: How many network slots are kept ready for forks, once there was one with a
            network.

    Raises:
        InvalidRequest: `run_dir` is so long that sockets in it could not be named, or the path of
            the private disk layers so long that a request could not name it for each child.
    """

    vmm: Path
    agent: Path
    cache_dir: Path
    state_dir: Path = Path("/var/lib/forkd")
    run_dir: Path = Path("/run/forkd")
    recipe_dirs: tuple[Path, ...] = ()
    cgroup_root: Path | None = None
    cgroups: bool = False
    network: Plan | None = None
    sandbox_ttl_s: float = limits.SANDBOX_TTL_S_DEFAULT
    zygote_idle_s: float = ZYGOTE_IDLE_S
    zygotes_max: int = limits.ZYGOTES_DEFAULT
    settle_s: float = SETTLE_S
    budgets: TreeBudgets = field(default_factory=TreeBudgets)
    packs: PackPolicy = field(default_factory=PackPolicy)
    disks: DiskPolicy = field(default_factory=DiskPolicy)
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    uids: UidRange | None = None
    rootless_jail: bool = False
    build_uids: UidRange | None = None
    build_network: NetworkPolicy | None = None
    image_cache_mib: int = limits.IMAGE_CACHE_MIB_DEFAULT
    registries: Registries = field(default_factory=Registries)
    filtered: bool = True
    own_cores: bool = True
    dns: tuple[tuple[str, int], ...] = ()
    egress_proxy: Via | None = None
    egress_ca: Path | None = None
    network_slots: int = 0

    def __post_init__(self) -> None:
        room = PATH_BYTES_MAX - len(f"/{LONGEST_SOCKET_NAME}")
        if len(bytes(self.run_dir)) > room:
            raise InvalidRequest(
                f"run_dir must have at most {room} bytes, because sockets in it have longer "
                f"paths: {self.run_dir}",
                field="run_dir",
            )

        if len(bytes(self.tops_dir)) > TOPS_PATH_BYTES_MAX:
            raise InvalidRequest(
                f"disk_dir must have at most {TOPS_PATH_BYTES_MAX} bytes; without it, it is `tops` "
                f"in state_dir: {self.tops_dir}",
                field="disk_dir",
            )

    @property
    def jailed(self) -> bool:
        """Whether machines are jailed."""
        return self.uids is not None or self.rootless_jail

    @property
    def tops_dir(self) -> Path:
        """Where private disk layers lie."""
        return self.disks.directory or self.state_dir / "tops"

    @property
    def staging_dir(self) -> Path:
        """Where snapshots lie that are being written."""
        return self.state_dir / "staging"

    @property
    def snapshots_dir(self) -> Path:
        """Where snapshots lie."""
        return self.state_dir / "snapshots"

    @property
    def jail_dirs(self) -> tuple[Path, ...]:
        """What jailed processes see, and may write to as far as they own it."""
        return (
            self.sandboxes_dir,
            self.zygotes_dir,
            self.bakes_dir,
            self.tops_dir,
            self.staging_dir,
        )

    @property
    def sandboxes_dir(self) -> Path:
        """Where each sandbox has its folder."""
        return self.run_dir / "s"

    @property
    def zygotes_dir(self) -> Path:
        """Where each zygote has its folder."""
        return self.run_dir / "z"

    @property
    def bakes_dir(self) -> Path:
        """Where each machine being baked has its folder."""
        return self.run_dir / "b"
