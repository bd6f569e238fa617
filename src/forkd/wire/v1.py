"""The protocol of the reference implementation: its requests and answers, as its clients know them.

It is another's, so nothing here is ours to improve: members, defaults and meanings are those that
its published clients rely on (docs/adr/0025).  Requests ignore members that they do not know, and
so do those clients.  What we have beyond that is in `wire.v2`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from forkd import limits

Tag = Annotated[str, Field(pattern=limits.TAG_PATTERN, description="Name of a snapshot.")]
Arg = Annotated[str, Field(max_length=limits.EXEC_ARG_BYTES_MAX + 1)]
Path = Annotated[str, Field(min_length=1, max_length=limits.PATH_BYTES_MAX)]
TimeoutSecs = Annotated[float, Field(ge=0.001, le=limits.EXEC_TIMEOUT_S_MAX, allow_inf_nan=False)]

NO_EFFECT = "Accepted; has no effect here."


class Request(BaseModel):
    """What a client sends."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Query(BaseModel):
    """A request's query string."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Answer(BaseModel):
    """What a client receives."""

    model_config = ConfigDict(frozen=True)


# Snapshots


class SnapshotCreate(Request):
    """Bake a snapshot."""

    tag: Tag
    kernel: Path = Field(description=NO_EFFECT + " A recipe has its own kernel.")
    rootfs: Path = Field(
        description="A recipe of the daemon's host, by name or by its path in a folder of recipes; "
        "or what an upload of one answered. An image of a file system is refused."
    )
    rw: bool = Field(default=False, description=NO_EFFECT)
    tap: str | None = Field(default=None, description=NO_EFFECT)
    boot_wait_secs: int = Field(
        default=limits.BOOT_WAIT_SECS_DEFAULT,
        ge=0,
        le=limits.BOOT_WAIT_SECS_MAX,
        description=NO_EFFECT + " A bake ends when the warm-up says so.",
    )


class SnapshotInfo(Answer):
    """One snapshot; members that are null here are left out."""

    tag: str
    dir: str
    created_at_unix: int
    branched_from: str | None = Field(default=None, description="Id of the sandbox it is of.")
    pause_ms: float | None = Field(default=None, description="How long that one was paused.")
    diff_physical_bytes: int | None = Field(
        default=None, description="Of a branch: what its files take."
    )
    diff_logical_bytes: int | None = Field(default=None, description="Of a branch: guest memory.")
    warning: str | None = Field(default=None, description="Why `status` is `failed`.")
    status: Literal["writing", "ready", "failed"]
    bootable: bool


class SnapshotInfoDetail(Answer):
    """One snapshot and its chain; members that are null here are left out."""

    tag: str
    dir: str
    created_at_unix: int
    memory_logical_bytes: int
    memory_physical_bytes: int = Field(description="What all of its own files take.")
    vmstate_bytes: int = Field(default=0, description="Counted in `memory_physical_bytes`.")
    parent_tag: str | None = None
    chain_depth: int
    ancestors: list[str] = Field(description="Its chain without itself, base first.")
    dependents: list[str]


class SnapshotDelete(Query):
    """What to do about snapshots that depend on one that is removed."""

    cascade: bool = False
    force: bool = False


class SnapshotCompact(Request):
    """Write a snapshot so that it needs no other."""

    to: Tag


# Sandboxes


class SandboxCreate(Request):
    """Fork sandboxes: all of them, or an error."""

    snapshot_tag: Tag
    n: int = Field(default=1, ge=1, le=limits.REFERENCE_FORK_COUNT_MAX)
    per_child_netns: bool = Field(
        default=False, description="Give each a network interface and an address of its own."
    )
    memory_limit_mib: int | None = Field(
        default=None, ge=limits.MEMORY_LIMIT_MIB_MIN, le=limits.MEMORY_LIMIT_MIB_MAX
    )
    prewarm: bool = Field(default=False, description=NO_EFFECT)
    live_fork: bool = Field(
        default=False, description=NO_EFFECT + " Every sandbox can be branched while it runs."
    )
    hugepages: bool = Field(default=False, description=NO_EFFECT)


class SandboxInfo(Answer):
    """One sandbox that has not ended."""

    id: str
    snapshot_tag: str
    netns: str | None = Field(default=None, description="Always null: there is no such namespace.")
    guest_addr: str = Field(
        description="Its address with the port 8888; empty without `per_child_netns`."
    )
    created_at_unix: int
    pid: int | None
    memory_limit_mib: int | None
    has_branched: bool = Field(description="Whether there is a snapshot of it.")
    last_branch_memory_path: str | None = Field(default=None, description="Always null.")
    branch_count: int = Field(description="How many snapshots of it there are.")


class BranchCreate(Request):
    """Write a running sandbox down as a snapshot; it goes on after some milliseconds."""

    tag: Tag | None = Field(
        default=None, description="Without one, `branch-<id>-<time>-<4 hex digits>`."
    )
    mode: Literal["full", "diff", "live"] | None = Field(
        default=None,
        description="Each writes what differs from the sandbox's snapshot, while it runs on.",
    )
    diff: bool = Field(default=False, description="As `mode` `diff`.")
    live: bool = Field(default=False, description="As `mode` `live`.")
    measure_diff: bool = Field(default=False, description=NO_EFFECT)
    wait: bool = Field(
        default=True, description="False, only if live: answer 202 while it is being written."
    )
    parent_tag: Tag | None = Field(
        default=None, description="The snapshot of the sandbox, only if diff; that is its parent."
    )


class Pong(Answer):
    """The agent in the guest answered."""

    pong: bool = True
    numpy_version: str | None = Field(default=None, description="Always null; ask with an eval.")
    pid: int
    agent_lang: str = Field(description="The warm runtime: `python` or `none`.")
    warmup_ready: bool


class Exec(Request):
    """Run a program and wait for it."""

    args: list[Arg] = Field(min_length=1, max_length=limits.EXEC_ARGS_MAX, description="No shell.")
    timeout_secs: TimeoutSecs = limits.EXEC_TIMEOUT_S_DEFAULT


class ExecResult(Answer):
    """What a program wrote, and how it ended.

    `exit_code` is 1 if it could not be run, or its time was over (`stderr` ends with why), and -n
    if signal n ended it.
    """

    stdout: str
    stderr: str
    exit_code: int


class Eval(Request):
    """Run code in the warm runtime."""

    code: str = Field(max_length=limits.EVAL_CODE_BYTES_MAX)


class EvalResult(Answer):
    """What the code gave."""

    result: str | None = Field(description="`repr` of the last expression; null without one.")
    error: str | None = Field(description="What it raised; null if nothing.")
    exit_code: int
