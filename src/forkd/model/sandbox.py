"""What a user holds: one forked machine, and how it was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any

from forkd import limits
from forkd.errors import InvalidRequest
from forkd.model.caller import DEFAULT_OWNER, Owner
from forkd.model.checks import in_range
from forkd.model.exec import check_variables
from forkd.model.labels import check_labels
from forkd.model.secret import SecretUse, check_names

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from forkd.model.ids import SandboxId, SandboxName, Tag
    from forkd.model.network import NetworkPolicy
    from forkd.model.snapshot import Snapshot


_RANGES: dict[str, tuple[float, float]] = {
    "memory_limit_mib": (limits.MEMORY_LIMIT_MIB_MIN, limits.MEMORY_LIMIT_MIB_MAX),
    "disk_limit_mib": (1, limits.DISK_LIMIT_MIB_MAX),
    "cpu_limit": (0.01, limits.CPU_LIMIT_MAX),
    "cpu_weight": (limits.CPU_WEIGHT_MIN, limits.CPU_WEIGHT_MAX),
    "io_limit_mib_s": (limits.IO_LIMIT_MIB_S_MIN, limits.IO_LIMIT_MIB_S_MAX),
    "io_limit_ops": (limits.IO_LIMIT_OPS_MIN, limits.IO_LIMIT_OPS_MAX),
    "pids_limit": (limits.PIDS_LIMIT_MIN, limits.PIDS_LIMIT_MAX),
    "bandwidth_limit_mbit": (limits.BANDWIDTH_LIMIT_MBIT_MIN, limits.BANDWIDTH_LIMIT_MBIT_MAX),
}
"""Least and most of each limit."""


class DefaultTtl(Enum):
    """The time to live of who leaves it to the host."""

    DEFAULT = "default"

    def __str__(self) -> str:
        return self.value


Ttl = float | DefaultTtl | None
"""How long something lives, in seconds; None for no end."""


class Keep(Enum):
    """Stands for a value that stays as it is, where None is a value."""

    KEEP = "keep"


class SandboxState(StrEnum):
    """Where a sandbox is in its life; `forkd.service.lifecycle` has the transitions."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    EXITED = "exited"

    @property
    def has_machine(self) -> bool:
        """Whether there is a machine that was ready, and that nobody is ending."""
        return self in {SandboxState.RUNNING, SandboxState.PAUSED}


@dataclass(frozen=True, slots=True)
class SpawnTimes:
    """What the zygote measured for one child, in milliseconds.

    Attributes:
        clone_ms: Until the child's process existed.
        build_ms: Building its VM.
        resume_ms: Loading state and starting the vCPUs.
        agent_ms: Until the agent in it had finished the post-fork hook.
        total_ms: From the clone to that answer.
    """

    clone_ms: float
    build_ms: float
    resume_ms: float
    agent_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class Sandbox:
    """One sandbox, as its owner last published it.

    Attributes:
        id: Its name, unguessable.
        tag: The snapshot that it was forked from.
        state: Where it is in its life.
        created_at: When its fork was asked for.
        hostname: What the guest calls itself.
        pid: The VMM process; None unless it runs.
        address: The guest's address, without the prefix length; None without a network.
        address_v6: Its IPv6 address, likewise; None if it has none.
        memory_limit_mib: Limit of the VMM process; None if none was set.
        disk_limit_mib: Limit of the disk blocks of its own, over all its branches; None if none was
            set.
        spawn: How long the fork took; None until it is ready.
        exit_reason: Why it ended; None unless `exited`.
        ancestors: The sandboxes that it was branched from, the oldest first, its parent
            last, whether they are still there or not; empty if it was forked from a snapshot.
        branched_at: At which instant of its parent's life it was branched; None for a fork.
        expires_at: When it is ended; None for never.
        idle_ttl_s: How long nobody may use it before it is ended; None for no limit.
        cpu_limit: Limit of CPU time, in cores; None if none was set.
        cpu_weight: Its share of CPU time beside other sandboxes; None for the kernel's default.
        pids_limit: Limit of the VMM's threads; None if none was set.
        io_limit_mib_s: Limit of what it reads, and of what it writes, of the disk that its private
            layer is on, in MiB a second; None if none was set.
        io_limit_ops: Limit of its operations there, likewise.
        bandwidth_limit_mbit: Limit of what goes over its network, each way, in millions of bits a
            second; None if none was set.
        owner: Whose it is.
        attempts: How often it was forked until its agent answered.
        network: What it may reach; None without a network.
        egress_held: Whether it may reach nothing until it is promoted.
        secrets: Names of its tenant's secrets that it uses.
        name: What its tenant calls it; unique among the tenant's sandboxes that have not ended.
        labels: Text by key, to find it by.
        env: Added to the environment of each exec; never shown.
    """

    id: SandboxId
    tag: Tag
    state: SandboxState
    created_at: datetime
    hostname: str
    pid: int | None = None
    address: str | None = None
    address_v6: str | None = None
    memory_limit_mib: int | None = None
    disk_limit_mib: int | None = None
    spawn: SpawnTimes | None = None
    exit_reason: str | None = None
    ancestors: tuple[SandboxId, ...] = ()
    branched_at: datetime | None = None
    expires_at: datetime | None = None
    idle_ttl_s: float | None = None
    cpu_limit: float | None = None
    cpu_weight: int | None = None
    pids_limit: int | None = None
    io_limit_mib_s: int | None = None
    io_limit_ops: int | None = None
    bandwidth_limit_mbit: int | None = None
    owner: Owner = DEFAULT_OWNER
    attempts: int = 1
    network: NetworkPolicy | None = None
    egress_held: bool = False
    secrets: tuple[str, ...] = ()
    name: SandboxName | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    env: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)

    @property
    def use(self) -> SecretUse | None:
        """Which secrets it uses; None for none."""
        if not self.secrets:
            return None
        return SecretUse(self.owner.tenant, self.root, self.secrets)

    @property
    def parent(self) -> SandboxId | None:
        """The sandbox that it was branched from; None for a fork of a snapshot."""
        return self.ancestors[-1] if self.ancestors else None

    @property
    def root(self) -> SandboxId:
        """The oldest ancestor, which names the tree; a fork of a snapshot is its own."""
        return self.ancestors[0] if self.ancestors else self.id


@dataclass(frozen=True, slots=True)
class ForkOptions:
    """What each child of one fork gets; a limit of None is not set.

    Attributes:
        network: What each child may reach, by an interface of its own; None for no interface.
        hold_egress: Whether each may reach nothing at the moment.
        memory_limit_mib: Memory of each child's process, guest and VMM together; no swap.
        disk_limit_mib: Disk blocks that each child may have of its own, before and after branches.
        cpu_limit: CPU time of each child, in cores.
        cpu_weight: Share of CPU time of each child, beside other sandboxes.
        pids_limit: Threads of each child's process.
        io_limit_mib_s: What each child reads, and what it writes, of the disk that private layers
            are on, in MiB a second.
        io_limit_ops: Operations of each child there, likewise.
        bandwidth_limit_mbit: What goes over each child's network, each way, in millions of bits a
            second.
        all_or_nothing: If one child fails, end the others too, and raise.
        deadline_s: For each child, from its clone until its agent has answered.
        ttl_s: How long each child lives before it is ended; None for no end.
        idle_ttl_s: How long nobody may use a child before it is ended; None for no limit.
        name: What a single child is called.
        labels: Those of each child.
        env: What is added to the environment of each exec in them.
        wait: Wait for a snapshot that is being written, instead of refusing.
        die_with_daemon: Whether the next daemon ends them; for what it forks for itself.
        secrets: Names of secrets that each uses.

    Raises:
        InvalidRequest: A value is out of range; the field is named.
    """

    network: NetworkPolicy | None = None
    hold_egress: bool = False
    memory_limit_mib: int | None = None
    disk_limit_mib: int | None = None
    cpu_limit: float | None = None
    cpu_weight: int | None = None
    pids_limit: int | None = None
    io_limit_mib_s: int | None = None
    io_limit_ops: int | None = None
    bandwidth_limit_mbit: int | None = None
    all_or_nothing: bool = False
    deadline_s: float = limits.FORK_DEADLINE_S_DEFAULT
    ttl_s: Ttl = None
    idle_ttl_s: float | None = None
    wait: bool = True
    die_with_daemon: bool = False
    secrets: tuple[str, ...] = ()
    name: SandboxName | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_names(self.secrets)
        check_labels(self.labels)
        check_variables(self.env, limits.SANDBOX_ENV_BYTES_MAX)
        if self.secrets and self.network is None:
            raise InvalidRequest(
                "secrets go with a network that reaches the hosts that they are for",
                field="secrets",
            )
        if self.hold_egress and self.network is None:
            raise InvalidRequest(
                "hold_egress goes with a network: there is none to hold", field="hold_egress"
            )
        _check_ranges(self)
        if self.bandwidth_limit_mbit is not None and self.network is None:
            raise InvalidRequest(
                "bandwidth_limit_mbit goes with a network: there is none to limit",
                field="bandwidth_limit_mbit",
            )
        in_range(
            "deadline_s", self.deadline_s, limits.FORK_DEADLINE_S_MIN, limits.FORK_DEADLINE_S_MAX
        )
        _check_ttl(self.ttl_s)
        _check_idle_ttl(self.idle_ttl_s)


@dataclass(frozen=True, slots=True)
class SandboxChange:
    """What is to become different of a sandbox.

    Attributes:
        name: Its name from now on; None for none.
        labels: All its labels from now on.
        label_changes: Labels to set, and with None those to remove; the others stay.
        ttl_s: How long it lives from now on; None for no end.
        idle_ttl_s: How long nobody may use it, from now on; None for no limit.

    Raises:
        InvalidRequest: A value is out of range, and is named; or all are to stay.
    """

    name: SandboxName | Keep | None = Keep.KEEP
    labels: Mapping[str, str] | Keep = Keep.KEEP
    label_changes: Mapping[str, str | None] = field(default_factory=dict)
    ttl_s: Ttl | Keep = Keep.KEEP
    idle_ttl_s: float | Keep | None = Keep.KEEP

    def __post_init__(self) -> None:
        values = (self.name, self.labels, self.ttl_s, self.idle_ttl_s)
        kept = all(each is Keep.KEEP for each in values)
        if kept and not self.label_changes:
            raise InvalidRequest(
                "there is nothing to change: give name, labels, label_changes, ttl_secs or "
                "idle_ttl_secs",
                field="name",
            )
        if self.labels is not Keep.KEEP:
            check_labels(self.labels)
            if self.label_changes:
                raise InvalidRequest("give labels or label_changes, not both", field="labels")
        check_labels({key: value or "" for key, value in self.label_changes.items()})
        if self.ttl_s is not Keep.KEEP:
            _check_ttl(self.ttl_s)
        if self.idle_ttl_s is not Keep.KEEP:
            _check_idle_ttl(self.idle_ttl_s)

    def of(self, sandbox: Sandbox, now: datetime, default_ttl_s: float) -> Sandbox:
        """Return a sandbox with what is to become different.

        Raises:
            InvalidRequest: It would have too many labels.
        """
        changed = sandbox
        if self.name is not Keep.KEEP:
            changed = replace(changed, name=self.name)
        if self.labels is not Keep.KEEP:
            changed = replace(changed, labels=self.labels)
        if self.label_changes:
            labels = {**sandbox.labels, **self.label_changes}
            left = {key: value for key, value in labels.items() if value is not None}
            check_labels(left)
            changed = replace(changed, labels=left)
        if self.ttl_s is not Keep.KEEP:
            changed = replace(changed, expires_at=end_of(self.ttl_s, now, default_ttl_s))
        if self.idle_ttl_s is not Keep.KEEP:
            changed = replace(changed, idle_ttl_s=self.idle_ttl_s)
        return changed


def end_of(ttl_s: Ttl, now: datetime, default_ttl_s: float) -> datetime | None:
    """Return when what lives so long from `now` on is ended; None for never."""
    match ttl_s:
        case None:
            return None
        case DefaultTtl.DEFAULT:
            return now + timedelta(seconds=default_ttl_s)
        case seconds:
            return now + timedelta(seconds=seconds)


def _check_ttl(ttl_s: Ttl) -> None:
    if isinstance(ttl_s, int | float):
        in_range("ttl_s", ttl_s, limits.TTL_S_MIN, limits.TTL_S_MAX)


def _check_idle_ttl(idle_ttl_s: float | None) -> None:
    if idle_ttl_s is not None:
        in_range("idle_ttl_s", idle_ttl_s, limits.TTL_S_MIN, limits.TTL_S_MAX)


@dataclass(frozen=True, slots=True)
class NewLimits:
    """Limits that a running sandbox gets in the place of those it has; None leaves one as it is.

    Attributes:
        memory_limit_mib: As of `ForkOptions`.
        cpu_limit: As of `ForkOptions`.
        cpu_weight: As of `ForkOptions`.
        pids_limit: As of `ForkOptions`.
        io_limit_mib_s: As of `ForkOptions`.
        io_limit_ops: As of `ForkOptions`.
        bandwidth_limit_mbit: As of `ForkOptions`; a sandbox without a network cannot have it.

    Raises:
        InvalidRequest: A value is out of range, and is named; or all are None.
    """

    memory_limit_mib: int | None = None
    cpu_limit: float | None = None
    cpu_weight: int | None = None
    pids_limit: int | None = None
    io_limit_mib_s: int | None = None
    io_limit_ops: int | None = None
    bandwidth_limit_mbit: int | None = None

    def __post_init__(self) -> None:
        given = self._given()
        if not given:
            names = ", ".join(each.name for each in fields(self))
            raise InvalidRequest(
                f"no limit is given: name {names}, or several", field="memory_limit_mib"
            )
        _check_ranges(self)

    def of(self, sandbox: Sandbox) -> Sandbox:
        """Return a sandbox with these limits in the place of its own."""
        return replace(sandbox, **self._given())

    def _given(self) -> dict[str, Any]:
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in values if value is not None}


def _check_ranges(asked: ForkOptions | NewLimits) -> None:
    for name, (least, most) in _RANGES.items():
        value = getattr(asked, name, None)
        if value is not None:
            in_range(name, value, least, most)


@dataclass(frozen=True, slots=True)
class ForkFailure:
    """A child that did not become ready; nothing of it remains.

    Attributes:
        id: The id that it would have had.
        stage: Where it failed, in the zygote's words: `clone`, `build`, `resume`, `agent`, ...
        code: What failed, in the control protocol's words.
        message: One sentence for a person.
        attempts: How often it was forked.
    """

    id: SandboxId
    stage: str
    code: str
    message: str
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class ForkResult:
    """What became of every child of one fork.

    Attributes:
        sandboxes: The ready ones, in no particular order.
        failures: The others.
        wall_ms: From the request to the zygote until its last answer.
    """

    sandboxes: tuple[Sandbox, ...]
    failures: tuple[ForkFailure, ...]
    wall_ms: float


@dataclass(frozen=True, slots=True)
class BranchOptions:
    """How a running sandbox is branched; its siblings have the limits and network it has.

    Attributes:
        all_or_nothing: If one sibling fails, end the others too, and raise.
        deadline_s: For each sibling, from its clone until its agent has answered.
        ttl_s: How long each sibling lives before it is ended; None for no end.
        labels: Those of each sibling; None for the source's.
        hold_egress: Whether each may reach nothing until it is promoted.
        network: What each may reach, if not what the source may.
        die_with_daemon: As of `ForkOptions`.

    Raises:
        InvalidRequest: A value is out of range; the field is named.
    """

    all_or_nothing: bool = False
    deadline_s: float = limits.FORK_DEADLINE_S_DEFAULT
    ttl_s: Ttl = None
    hold_egress: bool = False
    network: NetworkPolicy | None = None
    die_with_daemon: bool = False
    labels: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        labels = self.labels or {}
        ForkOptions(deadline_s=self.deadline_s, ttl_s=self.ttl_s, labels=labels)  # the same ranges

    def of(self, source: Sandbox) -> ForkOptions:
        """Return the options under which siblings of `source` are forked.

        Raises:
            InvalidRequest: A network or its being held is asked for, and the source has none.
        """
        if self.network is not None and source.network is None:
            raise InvalidRequest(
                f"sandbox {source.id} has no network, so its siblings have none", field="network"
            )
        return ForkOptions(
            network=self.network or source.network,
            hold_egress=self.hold_egress or source.egress_held,
            memory_limit_mib=source.memory_limit_mib,
            disk_limit_mib=source.disk_limit_mib,
            cpu_limit=source.cpu_limit,
            cpu_weight=source.cpu_weight,
            pids_limit=source.pids_limit,
            io_limit_mib_s=source.io_limit_mib_s,
            io_limit_ops=source.io_limit_ops,
            bandwidth_limit_mbit=source.bandwidth_limit_mbit,
            all_or_nothing=self.all_or_nothing,
            deadline_s=self.deadline_s,
            ttl_s=self.ttl_s,
            idle_ttl_s=source.idle_ttl_s,
            secrets=source.secrets,
            die_with_daemon=self.die_with_daemon,
            labels=source.labels if self.labels is None else self.labels,
            env=source.env,
        )


@dataclass(frozen=True, slots=True)
class BranchResult:
    """What became of every sibling of one branch.

    Attributes:
        fork: The siblings.
        pause_ms: How long the source was paused, from its first vCPU stopped to its last running.
        branched_at: The instant that all of them share.
        stall_ms: The longest time for which the source's guest saw itself paused, from just
            before the pause until siblings had answered; None if that is not known.
        stall_unknown: Why it is not known.
        snapshot: That instant as a snapshot, if one was asked for.
    """

    fork: ForkResult
    pause_ms: float
    branched_at: datetime
    stall_ms: float | None = None
    stall_unknown: str | None = None
    snapshot: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class Promotion:
    """What became of a promotion.

    Attributes:
        sandbox: The promoted one, under its parent's id.
        ended: The ids of those that lost; the old parent's is the one that its child had.
    """

    sandbox: Sandbox
    ended: tuple[SandboxId, ...]


def check_fork_count(count: int, name: SandboxName | None = None) -> None:
    """Return if `count` children can be forked at once, and so be named.

    Raises:
        InvalidRequest: It is not 1 to `FORK_COUNT_MAX`, or not 1 with a name.
    """
    in_range("n", count, 1, limits.FORK_COUNT_MAX)
    if name is not None and count != 1:
        raise InvalidRequest(
            f"name goes with one sandbox, and n is {count}; labels can be the same for all",
            field="name",
        )
