"""Between the reference's words (`wire.v1`) and what we think in (`model`)."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from forkd.daemon.convert import ancestors_of, unix
from forkd.errors import InvalidRequest
from forkd.model.ids import Tag, parse_tag
from forkd.model.network import HOST
from forkd.model.recipe import parse_recipe_source
from forkd.model.sandbox import ForkOptions
from forkd.model.snapshot import SnapshotRequest, SnapshotStatus
from forkd.wire import v1

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from fastapi import Response
    from pydantic import BaseModel

    from forkd.model.exec import EvalResult, Exited
    from forkd.model.guest import GuestStatus
    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from forkd.model.snapshot import Snapshot

IGNORED_HEADER = "X-Forkd-Ignored"
"""Names the options of a request that had no effect."""

WITHOUT_EFFECT: dict[type[BaseModel], tuple[str, ...]] = {
    v1.SnapshotCreate: ("kernel", "rw", "tap", "boot_wait_secs"),
    v1.SandboxCreate: ("prewarm", "live_fork", "hugepages"),
    v1.BranchCreate: ("measure_diff",),
}
"""Options of the reference that mean nothing here, by the request that has them."""

AGENT_PORT = 8888
"""Port of the reference's agent, which its addresses of guests end with; ours listens on none."""

IMAGES = (".ext4", ".squashfs", ".img", ".raw", ".qcow2")
"""How the names of images of file systems end."""


# Requests


def say_ignored(request: BaseModel, response: Response) -> None:
    """Name in a header what a request asks for that has no effect."""
    fields = type(request).model_fields
    asked = [
        name
        for name in WITHOUT_EFFECT[type(request)]
        if getattr(request, name) != fields[name].default
    ]
    if asked:
        response.headers[IGNORED_HEADER] = ", ".join(asked)


def snapshot_request(request: v1.SnapshotCreate) -> SnapshotRequest:
    """Return what to bake.

    Raises:
        InvalidRequest: `rootfs` cannot be a recipe.
    """
    if request.rootfs.endswith(IMAGES):
        raise InvalidRequest(
            f"rootfs: an image ({request.rootfs[:200]}) is not taken from a path: name a recipe "
            "instead, such as python-numpy; a recipe can have an image of its own",
            field="rootfs",
        )
    recipe = parse_recipe_source(request.rootfs, field="rootfs")
    return SnapshotRequest(parse_tag(request.tag), recipe)


def fork_options(request: v1.SandboxCreate) -> ForkOptions:
    """Return what each child of a fork gets."""
    return ForkOptions(
        network=HOST if request.per_child_netns else None,
        memory_limit_mib=request.memory_limit_mib,
        all_or_nothing=True,
        wait=False,
    )


def branch_tag(request: v1.BranchCreate, source: Sandbox, now: datetime) -> Tag:
    """Return the name of the snapshot that a branch makes.

    Raises:
        InvalidRequest: What the request asks for excludes itself.
    """
    legacy = [name for name in ("diff", "live") if getattr(request, name)]
    if request.mode is not None and legacy:
        raise InvalidRequest(f"mode and {legacy[0]} exclude each other", field="mode")
    if len(legacy) > 1:
        raise InvalidRequest("diff and live exclude each other", field="live")
    mode = request.mode or (legacy[0] if legacy else "full")
    if request.measure_diff and mode != "full":
        raise InvalidRequest(f"measure_diff and {mode} exclude each other", field="measure_diff")
    if not request.wait and mode != "live":
        raise InvalidRequest("wait may be false only if mode is live", field="wait")
    if request.parent_tag is not None and (mode != "diff" or request.parent_tag != source.tag):
        raise InvalidRequest(
            f"parent_tag goes with mode diff, and must be the sandbox's own snapshot, {source.tag}",
            field="parent_tag",
        )
    if request.tag is not None:
        return parse_tag(request.tag)
    return parse_tag(f"branch-{source.id}-{unix(now)}-{secrets.token_hex(2)}")


# Answers


def snapshot(stored: Snapshot) -> v1.SnapshotInfo:
    """Return a snapshot as the reference's clients see it."""
    is_branch = stored.source is not None
    return v1.SnapshotInfo(
        tag=stored.tag,
        dir=str(stored.directory),
        created_at_unix=unix(stored.created_at),
        branched_from=stored.source,
        pause_ms=stored.pause_ms,
        diff_physical_bytes=stored.stored_bytes if is_branch else None,
        diff_logical_bytes=stored.memory_bytes if is_branch else None,
        warning=stored.error,
        status=stored.status.value,
        bootable=stored.status is SnapshotStatus.READY,
    )


def snapshot_detail(stored: Snapshot, every: Iterable[Snapshot]) -> v1.SnapshotInfoDetail:
    """Return a snapshot with its place among `every` other."""
    by_tag = {each.tag: each for each in every}
    return v1.SnapshotInfoDetail(
        tag=stored.tag,
        dir=str(stored.directory),
        created_at_unix=unix(stored.created_at),
        memory_logical_bytes=stored.memory_bytes,
        memory_physical_bytes=stored.stored_bytes,
        parent_tag=stored.parent,
        chain_depth=stored.depth,
        ancestors=list(ancestors_of(stored, by_tag)),
        dependents=[each.tag for each in by_tag.values() if each.parent == stored.tag],
    )


def branch_counts(every: Iterable[Snapshot]) -> dict[SandboxId, int]:
    """Return how many snapshots there are of each sandbox that has any."""
    counts: dict[SandboxId, int] = {}
    for each in every:
        if each.source is not None:
            counts[each.source] = counts.get(each.source, 0) + 1
    return counts


def sandbox(live: Sandbox, branches: int = 0) -> v1.SandboxInfo:
    """Return a sandbox as the reference's clients see it."""
    return v1.SandboxInfo(
        id=live.id,
        snapshot_tag=live.tag,
        guest_addr="" if live.address is None else f"{live.address}:{AGENT_PORT}",
        created_at_unix=unix(live.created_at),
        pid=live.pid,
        memory_limit_mib=live.memory_limit_mib,
        has_branched=branches > 0,
        branch_count=branches,
    )


def pong(status: GuestStatus) -> v1.Pong:
    """Return how a guest's agent is."""
    runtime = status.runtime.value
    return v1.Pong(
        pid=status.pid,
        agent_lang="none" if runtime == "none" else "python",
        warmup_ready=runtime in {"none", "ready"},
    )


def exit_code(ended: Exited) -> int:
    """Return the exit code as Python's `subprocess` has it; 1 if the time was over."""
    if ended.timed_out:
        return 1
    return -(ended.signal or 0) if ended.exit_code is None else ended.exit_code


def eval_result(result: EvalResult, timeout_s: float) -> v1.EvalResult:
    """Return what an evaluation gave."""
    error = None if result.error is None else f"{result.error.type}: {result.error.message}"
    if result.timed_out:
        error = f"timed out after {timeout_s:g} s"
    return v1.EvalResult(result=result.repr, error=error, exit_code=0 if error is None else 1)
