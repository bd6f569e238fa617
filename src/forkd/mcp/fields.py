"""Arguments that several tools take, and what several answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from forkd import limits
from forkd.mcp.call import Result

if TYPE_CHECKING:
    from forkd.wire.v2 import SandboxFailure, SandboxInfo, SnapshotInfo

NO_EFFECT = "Accepted for clients of another server; has no effect here."

SandboxName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=limits.ID_CHARS_MAX,
        description="The sandbox: its id, the beginning of its id, or its name.",
    ),
]
Tag = Annotated[
    str, Field(pattern=limits.TAG_PATTERN, description="The name of a snapshot (its tag).")
]
Path = Annotated[
    str,
    Field(
        min_length=1,
        max_length=limits.PATH_BYTES_MAX,
        description="An absolute path inside the sandbox.",
    ),
]
Ttl = Annotated[
    float | None,
    Field(
        ge=limits.TTL_S_MIN,
        le=limits.TTL_S_MAX,
        description="Seconds until the sandbox is deleted by itself; null: it lives until it is "
        "killed.",
    ),
]
Network = Annotated[
    Annotated[str, Field(max_length=limits.PATH_BYTES_MAX)]
    | Annotated[
        list[Annotated[str, Field(max_length=limits.PATH_BYTES_MAX)]],
        Field(max_length=limits.NETWORK_RULES_MAX),
    ],
    Field(
        description='What the sandbox may reach: "none" (no network at all), "deny-all", '
        '"internet", "host" (what the host reaches), or rules such as '
        '["pypi.example:443", "192.0.2.0/24:80,443/tcp"].',
    ),
]
TimeoutSecs = Annotated[float, Field(ge=0.001, le=limits.EXEC_TIMEOUT_S_MAX)]


class Sandbox(Result):
    """A sandbox."""

    id: str
    name: str | None
    snapshot_tag: str = Field(description="The snapshot that it was forked from.")
    status: Literal["starting", "running", "paused", "stopping", "exited"]
    parent_id: str | None = Field(description="The sandbox that it was branched from.")
    created_at_unix: int
    expires_at_unix: int | None = Field(description="When it is deleted by itself; null: never.")
    memory_limit_mib: int | None
    network: list[str] | None = Field(description="What it may reach; null without a network.")
    guest_addr: str | None = Field(description="Its address for programs of the host.")
    labels: dict[str, str]
    exit_reason: str | None = Field(description="Why it has ended, if it has.")


class Failure(Result):
    """A sandbox that did not become ready."""

    error: str
    code: str


class Snapshot(Result):
    """A stored snapshot: sandboxes are forked from it."""

    tag: str
    status: Literal["writing", "ready", "failed"]
    bootable: bool = Field(description="Whether sandboxes can be forked from it now.")
    created_at_unix: int
    runtime: str = Field(description="The warm interpreter of eval_code: python or none.")
    memory_mib: int
    disk_mib: int
    stored_bytes: int
    parent_tag: str | None = Field(description="The snapshot that it is stored as a change of.")
    source_id: str | None = Field(description="The sandbox that it was taken of.")
    sandboxes: int = Field(description="How many live sandboxes were forked from it.")
    error: str | None


def sandbox(info: SandboxInfo) -> Sandbox:
    """Return a sandbox as tools tell of it."""
    return Sandbox(
        id=info.id,
        name=info.name,
        snapshot_tag=info.snapshot_tag,
        status=info.condition,
        parent_id=info.parent_id,
        created_at_unix=info.created_at_unix,
        expires_at_unix=info.expires_at_unix,
        memory_limit_mib=info.memory_limit_mib,
        network=info.network,
        guest_addr=info.guest_addr,
        labels=info.labels,
        exit_reason=info.exit_reason,
    )


def failure(failed: SandboxFailure) -> Failure:
    """Return why a sandbox did not become ready."""
    return Failure(error=failed.error, code=failed.code)


def snapshot(info: SnapshotInfo) -> Snapshot:
    """Return a snapshot as tools tell of it."""
    return Snapshot(
        tag=info.tag,
        status=info.status,
        bootable=info.bootable,
        created_at_unix=info.created_at_unix,
        runtime=info.runtime,
        memory_mib=info.memory_mib,
        disk_mib=info.disk_mib,
        stored_bytes=info.stored_bytes,
        parent_tag=info.parent_tag,
        source_id=info.source_id,
        sandboxes=info.sandboxes,
        error=info.error,
    )
