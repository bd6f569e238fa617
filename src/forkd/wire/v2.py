"""Requests, answers and events of version 1 of the REST API.

Clients see these types and nothing else of forkd, so fields are added, never renamed or removed.
Requests refuse members they do not know: a misspelt option must not become a silent default.
Answers ignore them when read: an older client talks to a newer daemon.

Sizes and times carry their unit in their name.  Names that another implementation of the same
idea made popular are kept (`snapshot_tag`, `timeout_secs`, `created_at_unix`, `exit_code`);
its own clients have `wire.v1`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from forkd import limits
from forkd.wire import v2_exec
from forkd.wire.parts import (
    Answer,
    DiskMib,
    Env,
    IdleTtlSecs,
    ImageName,
    LabelChanges,
    Labels,
    MemoryMib,
    Network,
    Number,
    Page,
    Query,
    Recipe,
    Request,
    RunLine,
    SandboxName,
    SecretName,
    Tag,
    TimeoutSecs,
    TtlSecs,
    Vcpus,
)
from forkd.wire.v2_builds import ImageConfigInfo

SandboxStatus = Literal["starting", "running", "stopping", "exited"]
"""Closed: clients that were published refuse a status that they do not know."""

SandboxCondition = SandboxStatus | Literal["paused"]

# Errors


class ErrorBody(Answer):
    """Body of every answer that is not a success, and last event of a stream that failed."""

    error: str = Field(description="What went wrong, in a sentence; may be reworded at any time.")
    code: str = Field(description="Stable name of the kind of error; see errors.json.")
    field: str | None = Field(default=None, description="The request's field at fault.")
    context: dict[str, str | int] = Field(
        default_factory=dict, description="Ids and numbers that belong to the message."
    )


# System


class Health(Answer):
    """The daemon answers."""

    ok: bool


class Readiness(Answer):
    """Whether the daemon serves."""

    ready: bool


class Version(Answer):
    """What runs here."""

    version: str
    api: Literal["v2"] = "v2"


class HostInfo(Answer):
    """The host the daemon runs on, and what it carries."""

    version: str
    hostname: str
    kernel: str
    cpu_model: str
    cpus: int
    memory_total_mib: int
    memory_available_mib: int
    state_free_mib: int = Field(description="Free space where snapshots are stored.")
    kvm: bool
    pvm: bool = Field(description="This KVM is PVM, which emulates guests; they will be very slow.")
    cgroups: bool
    network: bool
    jail: bool = Field(
        default=False,
        description="Machines are jailed, without rights or files of the host.",
    )
    snapshots: int = Field(description="How many the caller may use.")
    sandboxes: int = Field(description="How many of those that the caller may see are alive.")
    uptime_s: float


# Snapshots


class SnapshotCreate(Request):
    """Make a snapshot: of an image or a recipe (boot, warm up, freeze), a sandbox, or a snapshot.

    Exactly one of `image`, `recipe` and `source`.
    """

    tag: Tag
    recipe: Recipe | None = None
    image: ImageName | None = None
    run: list[RunLine] = Field(
        default=[],
        max_length=limits.RUN_LINES_MAX,
        description="Shell lines that are run in the guest, in order, before it is frozen; with "
        "`image` or `recipe`. One that fails fails the request.",
    )
    ready: RunLine | None = Field(
        default=None,
        description="A shell command, repeated in the guest until it exits with 0; likewise.",
    )
    memory_mib: MemoryMib | None = Field(
        default=None, description="Memory of each fork, an even number; likewise."
    )
    vcpus: Vcpus | None = Field(default=None, description="Virtual CPUs of each; likewise.")
    disk_mib: DiskMib | None = Field(default=None, description="Disk of each; likewise.")
    source: Tag | None = Field(
        default=None,
        description="Id of a running sandbox; or a snapshot, of which one is forked for `exec`.",
    )
    exec: str | None = Field(
        default=None,
        min_length=1,
        max_length=limits.LINK_EXEC_CHARS_MAX,
        description="Run by `sh -c` in the fork before it is written down.",
    )
    exec_timeout_secs: TimeoutSecs = limits.LINK_EXEC_TIMEOUT_S_DEFAULT
    wait: bool = Field(
        default=True, description="False: answer while the snapshot is still being written."
    )
    network: Network = Field(
        default=False,
        description="What the fork in which `exec` runs may reach, as of a fork's `network`.",
    )


class SnapshotInfo(Answer):
    """One stored snapshot."""

    tag: str
    dir: str
    created_at_unix: int
    status: Literal["writing", "ready", "failed"]
    bootable: bool = Field(description="Whether sandboxes can be forked from it now.")
    recipe: str
    image_key: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    runtime: str = Field(description="The warm runtime: `python`, `node`, …, or `none`.")
    stored_bytes: int = Field(description="What its own files take in the store.")
    parent_tag: str | None = Field(description="Its parent, if it has one that may be told.")
    chain_depth: int = Field(description="How many snapshots are under it.")
    source_id: str | None = Field(default=None, description="The sandbox that it was taken of.")
    pause_ms: float | None = Field(
        default=None, description="How long that sandbox was paused for it."
    )
    sandboxes: int = Field(description="How many forks of it that may be told are alive.")
    error: str | None = Field(default=None, description="Why `status` is `failed`.")
    tenant: str = "default"
    created_by: str = Field(default="", description="Whose request made it: a token, a user.")
    shared: bool = Field(default=False, description="Every tenant may use it.")
    cached: bool = Field(
        default=False, description="Made without a name; removed for want of room."
    )
    build_key: str | None = Field(
        default=None, description="The key of the step of a build that made it."
    )


class SnapshotCpuInfo(Answer):
    """What a snapshot's guest saw of a processor, which a host must have to run it."""

    model: str = Field(description="What the processor calls itself.")
    features: list[str] = Field(description="Its features, as Linux names them.")


class SnapshotInfoDetail(SnapshotInfo):
    """One stored snapshot, with what it depends on and what depends on it."""

    memory_logical_bytes: int
    chain_bytes: int = Field(description="What its files and those of its ancestors take.")
    shared_fraction: float = Field(description="How much of `chain_bytes` is its ancestors'.")
    ancestors: list[str] = Field(description="Its chain without itself, base first.")
    dependents: list[str] = Field(description="Snapshots that name it as their parent.")
    sandbox_ids: list[str] = Field(description="Live forks of it.")
    config: ImageConfigInfo | None = Field(
        default=None, description="What its image says of programs; null if that is not known."
    )
    cpu: SnapshotCpuInfo | None = Field(
        default=None,
        description="What its guest saw of a processor; null if that is not known.",
    )


class SnapshotDelete(Query):
    """What to do about snapshots that depend on one that is removed; without either, refuse."""

    cascade: bool = Field(default=False, description="Remove them as well, all or nothing.")
    force: bool = Field(default=False, description="Leave them; they cannot be used any more.")


class SnapshotCompact(Request):
    """Write a snapshot so that it needs no other."""

    to: Tag | None = Field(default=None, description="Under this name; None: in its place.")


class SnapshotGc(Request):
    """Remove what is unused."""

    dry_run: bool = Field(default=False, description="Only say what that is.")


class RemovedInfo(Answer):
    """One thing that was removed, or would be."""

    kind: str = Field(
        description="`snapshot`, `failed`, `staging`, `folder`, `image`, `initramfs` or `recipe`."
    )
    name: str
    bytes: int


class SnapshotGcInfo(Answer):
    """What was removed, or would be."""

    removed: list[RemovedInfo]
    bytes: int


# Recipes and images


class RecipeInfo(Answer):
    """One uploaded recipe."""

    recipe: str = Field(description="What names it in a request: `sha256:` and a digest.")
    name: str = Field(description="What it calls itself.")
    bytes: int = Field(description="What its files take.")


class ImageBuild(Request):
    """Build an image, or find it built already."""

    recipe: Recipe


class ImageInfo(Answer):
    """One built image; paths are on the daemon's host."""

    key: str = Field(description="Names the contents: the same recipe gives the same key.")
    name: str
    kernel: str
    initramfs: str | None
    rootfs: str
    disk_mib: int


# Streams of progress (application/x-ndjson)


class ProgressEvent(Answer):
    """A long operation has come this far."""

    event: Literal["progress"] = "progress"
    stage: str
    message: str
    fraction: float | None = Field(default=None, ge=0, le=1, description="None: not known.")


class SnapshotEvent(Answer):
    """Last event of a bake that succeeded."""

    event: Literal["snapshot"] = "snapshot"
    snapshot: SnapshotInfo


class ImageEvent(Answer):
    """Last event of a build that succeeded."""

    event: Literal["image"] = "image"
    image: ImageInfo


class ErrorEvent(ErrorBody):
    """Last event of an operation that failed after its stream had begun."""

    event: Literal["error"] = "error"


SnapshotStreamEvent = Annotated[
    ProgressEvent | SnapshotEvent | ErrorEvent, Field(discriminator="event")
]
ImageStreamEvent = Annotated[ProgressEvent | ImageEvent | ErrorEvent, Field(discriminator="event")]


# Sandboxes


class LimitsPatch(Request):
    """Change limits of a running sandbox; those that are not named stay as they are."""

    memory_limit_mib: int | None = Field(
        default=None,
        ge=limits.MEMORY_LIMIT_MIB_MIN,
        le=limits.MEMORY_LIMIT_MIB_MAX,
        description="Memory of a sandbox's process, guest and VMM together; no swap.",
    )
    cpu_limit: Number | None = Field(
        default=None,
        ge=0.01,
        le=limits.CPU_LIMIT_MAX,
        description="CPU time of a sandbox, in cores.",
    )
    cpu_weight: int | None = Field(
        default=None,
        ge=limits.CPU_WEIGHT_MIN,
        le=limits.CPU_WEIGHT_MAX,
        description="Share of CPU time beside other sandboxes; 100 unless it is set.",
    )
    pids_limit: int | None = Field(
        default=None,
        ge=limits.PIDS_LIMIT_MIN,
        le=limits.PIDS_LIMIT_MAX,
        description="Threads of a sandbox's process on the host, not of its guest.",
    )
    io_limit_mib_s: int | None = Field(
        default=None,
        ge=limits.IO_LIMIT_MIB_S_MIN,
        le=limits.IO_LIMIT_MIB_S_MAX,
        description="What a sandbox reads, and what it writes, of its disk, in MiB a second.",
    )
    io_limit_ops: int | None = Field(
        default=None,
        ge=limits.IO_LIMIT_OPS_MIN,
        le=limits.IO_LIMIT_OPS_MAX,
        description="Operations of a sandbox on its disk, each way, in a second.",
    )
    bandwidth_limit_mbit: int | None = Field(
        default=None,
        ge=limits.BANDWIDTH_LIMIT_MBIT_MIN,
        le=limits.BANDWIDTH_LIMIT_MBIT_MAX,
        description="What goes over a sandbox's network, each way, in millions of bits a second; "
        "for one that has a network.",
    )


class SandboxCreate(LimitsPatch):
    """Fork `n` sandboxes from a snapshot.

    Where sandboxes have cgroups, limits that are not named follow from the snapshot: memory for its
    guest and the VMM, one core more than it has virtual CPUs, and 64 threads.  Disk I/O and
    bandwidth are not limited unless that is named.
    """

    snapshot_tag: Tag
    n: int = Field(default=1, ge=1, le=limits.FORK_COUNT_MAX)
    disk_limit_mib: int | None = Field(
        default=None,
        ge=1,
        le=limits.DISK_LIMIT_MIB_MAX,
        description="Disk blocks that each sandbox may have of its own.",
    )
    network: Network = Field(
        default=False,
        description="What each may reach: `none`, `internet`, `host`, `deny-all`, or rules such as "
        "`example.com:443`; `true` is `host`, the host's end of its own link.",
    )
    hold_egress: bool = Field(
        default=False, description="Each may reach nothing until that is changed."
    )
    secrets: list[SecretName] = Field(
        default_factory=list,
        max_length=limits.SECRETS_PER_SANDBOX_MAX,
        description="Names of secrets that each uses: they are put into its requests on the host.",
    )
    all_or_nothing: bool = Field(
        default=False, description="If one fails, end those that are ready and answer an error."
    )
    deadline_secs: Number = Field(
        default=limits.FORK_DEADLINE_S_DEFAULT,
        ge=limits.FORK_DEADLINE_S_MIN,
        le=limits.FORK_DEADLINE_S_MAX,
        description="Time each child has until its agent has answered.",
    )
    ttl_secs: TtlSecs | None = Field(
        default=None,
        description="Each is ended after this time; null: never, `default`: after the daemon's "
        "`FORKD_SANDBOX_TTL_S`.",
    )
    idle_ttl_secs: IdleTtlSecs | None = Field(
        default=None,
        description="Each is ended once nobody has used it for this time; null: never. A program, "
        "an evaluation, a file, a connection or a change uses a sandbox; a ping does not.",
    )
    name: SandboxName | None = Field(
        default=None,
        description="Its name, for `n` of 1: wherever an id of a sandbox is asked for, the name "
        "is taken, too. No other live sandbox of the tenant may have it.",
    )
    labels: Labels = Field(
        default_factory=dict, description="Text by key, to find and group sandboxes by."
    )
    env: Env = Field(
        default_factory=dict,
        description="Added to the environment of each exec; an exec's own `env` comes before it.",
    )
    wait: bool = Field(
        default=True, description="Wait for a snapshot that is being written; false: refuse."
    )


class LogsRead(Query):
    """How to read a console log."""

    follow: bool = Field(default=False, description="Go on until the sandbox ends.")


class SandboxFilter(Page):
    """Which sandboxes to list: those that are all of this."""

    snapshot_tag: Tag | None = None
    name: SandboxName | None = None
    status: SandboxCondition | None = Field(
        default=None, description="`running`: those that are not paused."
    )
    label: list[str] = Field(
        default_factory=list,
        max_length=limits.LABELS_MAX,
        description="`key`, or `key=value`; several: those that have all of them.",
    )


class SandboxPatch(Request):
    """Change a sandbox; members that are left out stay as they are."""

    name: SandboxName | None = Field(default=None, description="Null: it has none any more.")
    labels: Labels = Field(
        default_factory=dict, description="All its labels, in the place of those that it has."
    )
    label_changes: LabelChanges = Field(
        default_factory=dict,
        description="Labels to set, and with null those to remove; all others stay.",
    )
    ttl_secs: TtlSecs | None = Field(
        default=None,
        description="It is ended so long after this request; null: never, `default`: after the "
        "daemon's `FORKD_SANDBOX_TTL_S`.",
    )
    idle_ttl_secs: IdleTtlSecs | None = Field(
        default=None,
        description="It is ended once nobody has used it for this time; null: never.",
    )


class ForkTimes(Answer):
    """Stages of one fork, in milliseconds; `total` from its clone to its agent's answer."""

    clone: float
    build: float
    resume: float
    agent: float
    total: float


class SandboxInfo(Answer):
    """One sandbox."""

    id: str
    name: str | None = Field(default=None, description="Null if it was given none.")
    snapshot_tag: str
    status: SandboxStatus = Field(description="`running` also while it is paused.")
    paused: bool = Field(default=False, description="No virtual CPU runs; memory is kept.")
    created_at_unix: int
    labels: dict[str, str] = Field(default_factory=dict)
    hostname: str
    pid: int | None = Field(description="Its VMM process; None unless it runs.")
    guest_addr: str | None = Field(description="None without a network.")
    guest_addr_v6: str | None = Field(
        default=None, description="Its IPv6 address; None if it has none."
    )
    memory_limit_mib: int | None
    disk_limit_mib: int | None
    cpu_limit: float | None = Field(default=None, description="In cores; null if not limited.")
    cpu_weight: int | None = Field(
        default=None, description="Null if it was not set, which is 100."
    )
    pids_limit: int | None = Field(default=None, description="Null if not limited.")
    io_limit_mib_s: int | None = Field(default=None, description="Null if not limited.")
    io_limit_ops: int | None = Field(default=None, description="Null if not limited.")
    bandwidth_limit_mbit: int | None = Field(default=None, description="Null if not limited.")
    fork_ms: ForkTimes | None
    attempts: int = Field(default=1, description="How often it was forked until it was ready.")
    exit_reason: str | None = Field(
        default=None, description="`ttl` if its time had come, `idle` if nobody had used it."
    )
    parent_id: str | None = Field(default=None, description="What it was branched from.")
    branched_at_unix_ms: int | None = Field(default=None, description="At which instant.")
    expires_at_unix: int | None = Field(default=None, description="When it will be ended.")
    idle_ttl_secs: float | None = Field(
        default=None, description="It is ended once nobody has used it for this time."
    )
    tenant: str = "default"
    created_by: str = Field(default="", description="Whose request made it: a token, a user.")
    network: list[str] | None = Field(
        default=None, description="What it may reach, as rules; null without a network."
    )
    egress_held: bool = Field(default=False, description="It may reach nothing at the moment.")
    secrets: list[str] = Field(
        default_factory=list, description="Names of the secrets that it uses."
    )

    @property
    def condition(self) -> SandboxCondition:
        """`paused`, or else its status."""
        return "paused" if self.paused else self.status


class SandboxFailure(Answer):
    """A fork that did not become a sandbox.  Nothing of it remains."""

    id: str
    snapshot_tag: str
    status: Literal["failed"] = "failed"
    stage: str
    error: str
    code: str = Field(description="In the words of the control protocol.")
    attempts: int = Field(default=1, description="How often it was forked.")


ForkOutcome = SandboxInfo | SandboxFailure


class Pong(Answer):
    """The agent in the guest answered."""

    pong: bool = True
    version: str
    pid: int
    uptime_s: float
    runtime: Literal["none", "starting", "ready", "failed"]
    warmup_ready: bool


# Exec and eval, which are in a file of their own

Eval = v2_exec.Eval
EvalException = v2_exec.EvalException
EvalForms = v2_exec.EvalForms
EvalResult = v2_exec.EvalResult
Exec = v2_exec.Exec
ExecControl = v2_exec.ExecControl
ExecExit = v2_exec.ExecExit
ExecResult = v2_exec.ExecResult
ExecStart = v2_exec.ExecStart
ExecStarted = v2_exec.ExecStarted
Kind = v2_exec.Kind
TerminalSize = v2_exec.TerminalSize
