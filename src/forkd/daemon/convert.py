"""Between what clients see (`wire`) and what we think in (`model`): the only file that knows both.

Requests become model values, which check themselves once more; model values become answers.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest
from forkd.model import exec as model_exec
from forkd.model.filters import SandboxFilter
from forkd.model.ids import SandboxId, Tag, is_sandbox_id, parse_sandbox_name, parse_tag
from forkd.model.image import Image
from forkd.model.labels import parse_label_filter
from forkd.model.network import NetworkPolicy, parse_policy
from forkd.model.pack import UnpackRequest
from forkd.model.recipe import RecipeChanges, parse_image_source, parse_recipe_source
from forkd.model.sandbox import (
    BranchOptions,
    DefaultTtl,
    ForkOptions,
    Keep,
    NewLimits,
    SandboxChange,
    SandboxState,
)
from forkd.model.snapshot import LinkRequest, Snapshot, SnapshotRequest, SnapshotStatus
from forkd.wire import parts, v2, v2_builds, v2_files, v2_packs, v2_trees
from forkd.wire.text import encoded, is_utf8, readable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from forkd.model.diff import Difference
    from forkd.model.files import ArchiveResult, FileEntry
    from forkd.model.guest import GuestStatus
    from forkd.model.host import HostInfo
    from forkd.model.image import ImageConfig
    from forkd.model.pack import Unpacked
    from forkd.model.progress import Progress
    from forkd.model.recipe import StoredRecipe
    from forkd.model.sandbox import (
        BranchResult,
        ForkFailure,
        ForkResult,
        Promotion,
        Sandbox,
        SpawnTimes,
        Ttl,
    )
    from forkd.model.snapshot import Removed, SnapshotCpu
    from forkd.model.tree import TreeBudgets, TreeNode

MIB = 1 << 20


# Requests


def snapshot_request(request: v2.SnapshotCreate) -> SnapshotRequest | LinkRequest:
    """Return what to bake, or what to write down."""
    given = (request.image, request.recipe, request.source)
    if sum(each is not None for each in given) != 1:
        raise InvalidRequest("give exactly one of image, recipe and source", field="source")
    tag = parse_tag(request.tag)
    changes = RecipeChanges(
        run=tuple(request.run),
        ready=request.ready,
        memory_mib=request.memory_mib,
        vcpus=request.vcpus,
        disk_mib=request.disk_mib,
    )
    if request.source is None:
        if request.exec is not None or not request.wait or request.network:
            message = "exec, wait and network go with source, not with an image or a recipe"
            raise InvalidRequest(message, field="exec")
        if request.image is not None:
            return SnapshotRequest(tag, parse_image_source(request.image), changes)
        return SnapshotRequest(tag, parse_recipe_source(str(request.recipe)), changes)
    if changes != RecipeChanges():
        message = "run, ready, memory_mib, vcpus and disk_mib go with image or recipe, not source"
        raise InvalidRequest(message, field="source")
    return LinkRequest(
        tag=tag,
        source=parse_tag(str(request.source), field="source"),
        command=request.exec,
        timeout_s=request.exec_timeout_secs,
        wait=request.wait,
        network=parse_policy(request.network),
    )


def unpack_request(tag: Tag, terms: v2_packs.Unpack) -> UnpackRequest:
    """Return under which name and on which terms a pack is taken."""
    keys = filter(None, terms.trusted.split(","))
    return UnpackRequest(tag, tuple(map(bytes.fromhex, keys)), terms.allow_unsigned)


def fork_options(request: v2.SandboxCreate) -> ForkOptions:
    """Return what each child of a fork gets."""
    return ForkOptions(
        network=parse_policy(request.network),
        hold_egress=request.hold_egress,
        memory_limit_mib=request.memory_limit_mib,
        disk_limit_mib=request.disk_limit_mib,
        cpu_limit=request.cpu_limit,
        cpu_weight=request.cpu_weight,
        pids_limit=request.pids_limit,
        io_limit_mib_s=request.io_limit_mib_s,
        io_limit_ops=request.io_limit_ops,
        bandwidth_limit_mbit=request.bandwidth_limit_mbit,
        all_or_nothing=request.all_or_nothing,
        deadline_s=request.deadline_secs,
        ttl_s=_ttl(request.ttl_secs),
        idle_ttl_s=request.idle_ttl_secs,
        wait=request.wait,
        secrets=tuple(request.secrets),
        name=None if request.name is None else parse_sandbox_name(request.name),
        labels=request.labels,
        env=request.env,
    )


def sandbox_change(request: v2.SandboxPatch) -> SandboxChange:
    """Return what is to become different of a sandbox: the members that were given."""
    given = request.model_fields_set
    name = None if request.name is None else parse_sandbox_name(request.name)
    return SandboxChange(
        name=name if "name" in given else Keep.KEEP,
        labels=request.labels if "labels" in given else Keep.KEEP,
        label_changes=request.label_changes,
        ttl_s=_ttl(request.ttl_secs) if "ttl_secs" in given else Keep.KEEP,
        idle_ttl_s=request.idle_ttl_secs if "idle_ttl_secs" in given else Keep.KEEP,
    )


def sandbox_filter(query: v2.SandboxFilter) -> SandboxFilter:
    """Return which sandboxes are to be listed."""
    tag, name, status = query.snapshot_tag, query.name, query.status
    return SandboxFilter(
        tag=None if tag is None else parse_tag(tag, field="snapshot_tag"),
        name=None if name is None else parse_sandbox_name(name),
        state=None if status is None else SandboxState(status),
        labels=tuple(map(parse_label_filter, query.label)),
    )


def _ttl(given: parts.TtlSecs | None) -> Ttl:
    return DefaultTtl.DEFAULT if isinstance(given, str) else given


def new_limits(request: v2.LimitsPatch) -> NewLimits:
    """Return the limits that a running sandbox is to get."""
    return NewLimits(
        memory_limit_mib=request.memory_limit_mib,
        cpu_limit=request.cpu_limit,
        cpu_weight=request.cpu_weight,
        pids_limit=request.pids_limit,
        io_limit_mib_s=request.io_limit_mib_s,
        io_limit_ops=request.io_limit_ops,
        bandwidth_limit_mbit=request.bandwidth_limit_mbit,
    )


def branch_options(request: v2_trees.BranchCreate) -> BranchOptions:
    """Return how siblings are made."""
    return BranchOptions(
        all_or_nothing=request.all_or_nothing,
        deadline_s=request.deadline_secs,
        ttl_s=_ttl(request.ttl_secs),
        labels=request.labels,
        hold_egress=request.hold_egress,
        network=None if request.network is None else _link(request.network),
    )


def _link(network: parts.Network) -> NetworkPolicy:
    policy = parse_policy(network)
    if policy is None:
        raise InvalidRequest(
            "a sibling has a network if its source has one; deny-all closes it", field="network"
        )
    return policy


def exec_request(request: v2.Exec | v2.ExecStart) -> model_exec.ExecRequest:
    """Return a command to run."""
    tty = request.tty if isinstance(request, v2.ExecStart) else None
    return model_exec.ExecRequest(
        args=tuple(request.args),
        env=request.env,
        cwd=request.cwd,
        user=request.user,
        timeout_s=request.timeout_secs,
        stdin=bool(request.stdin),
        tty=None if tty is None else tty_size(tty),
    )


def tty_size(size: v2.TerminalSize) -> model_exec.TtySize:
    """Return a terminal's size."""
    return model_exec.TtySize(rows=size.rows, columns=size.columns)


# Answers


def host_info(host: HostInfo) -> v2.HostInfo:
    """Return the host as clients see it."""
    return v2.HostInfo(
        version=host.version,
        hostname=host.hostname,
        kernel=host.kernel,
        cpu_model=host.cpu_model,
        cpus=host.cpus,
        memory_total_mib=host.memory_bytes // MIB,
        memory_available_mib=host.memory_available_bytes // MIB,
        state_free_mib=host.state_free_bytes // MIB,
        kvm=host.kvm,
        pvm=host.pvm,
        cgroups=host.cgroups,
        network=host.network,
        jail=host.jail,
        snapshots=host.snapshots,
        sandboxes=host.sandboxes,
        uptime_s=host.uptime_s,
    )


def progress(event: Progress) -> v2.ProgressEvent:
    """Return one step of a long operation."""
    return v2.ProgressEvent(stage=event.stage, message=event.message, fraction=event.fraction)


def snapshot_event(event: Progress | Snapshot) -> v2.ProgressEvent | v2.SnapshotEvent:
    """Return one event of a bake."""
    if isinstance(event, Snapshot):
        return v2.SnapshotEvent(snapshot=snapshot(event))
    return progress(event)


def image_event(event: Progress | Image) -> v2.ProgressEvent | v2.ImageEvent:
    """Return one event of a build."""
    if isinstance(event, Image):
        return v2.ImageEvent(image=image(event))
    return progress(event)


def recipe(stored: StoredRecipe) -> v2.RecipeInfo:
    """Return an uploaded recipe as clients see it."""
    return v2.RecipeInfo(recipe=str(stored.source), name=stored.name, bytes=stored.bytes)


def image(built: Image) -> v2.ImageInfo:
    """Return an image as clients see it."""
    return v2.ImageInfo(
        key=built.key,
        name=built.name,
        kernel=str(built.kernel),
        initramfs=None if built.initramfs is None else str(built.initramfs),
        rootfs=str(built.rootfs),
        disk_mib=built.disk_bytes // MIB,
    )


def snapshot(stored: Snapshot) -> v2.SnapshotInfo:
    """Return a snapshot as clients see it."""
    return v2.SnapshotInfo(
        tag=stored.tag,
        dir=str(stored.directory),
        created_at_unix=unix(stored.created_at),
        status=stored.status.value,
        bootable=stored.status is SnapshotStatus.READY,
        recipe=stored.recipe,
        image_key=stored.image_key,
        vcpus=stored.vcpus,
        memory_mib=stored.memory_bytes // MIB,
        disk_mib=stored.disk_bytes // MIB,
        runtime=stored.runtime,
        stored_bytes=stored.stored_bytes,
        parent_tag=stored.parent,
        chain_depth=stored.depth,
        source_id=stored.source,
        pause_ms=stored.pause_ms,
        sandboxes=stored.sandboxes,
        error=stored.error,
        tenant=stored.owner.tenant,
        created_by=stored.owner.principal,
        shared=stored.shared,
        cached=stored.cached,
        build_key=stored.build_key,
    )


def snapshot_detail(
    stored: Snapshot, every: Iterable[Snapshot], forks: Iterable[Sandbox]
) -> v2.SnapshotInfoDetail:
    """Return a snapshot with its place among `every` other and its live `forks`."""
    by_tag = {each.tag: each for each in every}
    ancestors = ancestors_of(stored, by_tag)
    return v2.SnapshotInfoDetail(
        **snapshot(stored).model_dump(),
        memory_logical_bytes=stored.memory_bytes,
        chain_bytes=stored.chain_bytes,
        shared_fraction=round(stored.shared_fraction, 4),
        ancestors=list(ancestors),
        dependents=[each.tag for each in by_tag.values() if each.parent == stored.tag],
        sandbox_ids=[each.id for each in forks],
        config=None if stored.config is None else image_config(stored.config),
        cpu=None if stored.cpu is None else snapshot_cpu(stored.cpu),
    )


def snapshot_cpu(seen: SnapshotCpu) -> v2.SnapshotCpuInfo:
    """Return what a guest saw of a processor as clients see it."""
    return v2.SnapshotCpuInfo(model=seen.model, features=list(seen.features))


def image_config(found: ImageConfig) -> v2_builds.ImageConfigInfo:
    """Return what an image says of programs as clients see it."""
    return v2_builds.ImageConfigInfo.model_validate(asdict(found))


def removed(things: Iterable[Removed]) -> v2.SnapshotGcInfo:
    """Return what was removed from the store."""
    each = [v2.RemovedInfo(kind=one.kind, name=one.name, bytes=one.bytes) for one in things]
    return v2.SnapshotGcInfo(removed=each, bytes=sum(one.bytes for one in each))


def ancestors_of(stored: Snapshot, by_tag: Mapping[Tag, Snapshot]) -> list[Tag]:
    """Return what a snapshot depends on, base first."""
    found: list[Tag] = []
    parent = stored.parent
    while parent is not None and parent not in found:
        found.insert(0, parent)
        above = by_tag.get(parent)
        parent = above.parent if above is not None else None
    return found


def unpacked(pack: Unpacked) -> v2_packs.Unpacked:
    """Return a pack that was taken, as clients see it."""
    return v2_packs.Unpacked(
        snapshot=snapshot(pack.snapshot),
        links=[v2_packs.UnpackedLink(tag=each.tag, reused=each.reused) for each in pack.links],
        signed_by=None if pack.signed_by is None else pack.signed_by.hex(),
        missing_features=list(pack.missing_features),
    )


_STATUS: Mapping[SandboxState, v2.SandboxStatus] = {
    SandboxState.STARTING: "starting",
    SandboxState.RUNNING: "running",
    SandboxState.PAUSED: "running",
    SandboxState.STOPPING: "stopping",
    SandboxState.EXITED: "exited",
}
"""The names that clients know which were published before sandboxes could be paused."""


def sandbox(live: Sandbox) -> v2.SandboxInfo:
    """Return a sandbox as clients see it."""
    return v2.SandboxInfo(
        id=live.id,
        name=live.name,
        labels=dict(live.labels),
        snapshot_tag=live.tag,
        status=_STATUS[live.state],
        paused=live.state is SandboxState.PAUSED,
        created_at_unix=unix(live.created_at),
        hostname=live.hostname,
        pid=live.pid,
        guest_addr=live.address,
        guest_addr_v6=live.address_v6,
        memory_limit_mib=live.memory_limit_mib,
        disk_limit_mib=live.disk_limit_mib,
        cpu_limit=live.cpu_limit,
        cpu_weight=live.cpu_weight,
        pids_limit=live.pids_limit,
        io_limit_mib_s=live.io_limit_mib_s,
        io_limit_ops=live.io_limit_ops,
        bandwidth_limit_mbit=live.bandwidth_limit_mbit,
        fork_ms=None if live.spawn is None else _times(live.spawn),
        attempts=live.attempts,
        exit_reason=live.exit_reason,
        parent_id=live.parent,
        branched_at_unix_ms=None if live.branched_at is None else _unix_ms(live.branched_at),
        expires_at_unix=None if live.expires_at is None else unix(live.expires_at),
        idle_ttl_secs=live.idle_ttl_s,
        tenant=live.owner.tenant,
        created_by=live.owner.principal,
        network=None if live.network is None else list(live.network.rules()),
        egress_held=live.egress_held,
        secrets=list(live.secrets),
    )


def _times(spawn: SpawnTimes) -> v2.ForkTimes:
    return v2.ForkTimes(
        clone=spawn.clone_ms,
        build=spawn.build_ms,
        resume=spawn.resume_ms,
        agent=spawn.agent_ms,
        total=spawn.total_ms,
    )


def outcomes(tag: str, result: ForkResult) -> list[v2.ForkOutcome]:
    """Return what became of each child: the ready first, then the failed."""
    failed = [_failure(tag, each) for each in result.failures]
    return [*(sandbox(each) for each in result.sandboxes), *failed]


def _failure(tag: str, failure: ForkFailure) -> v2.SandboxFailure:
    return v2.SandboxFailure(
        id=failure.id,
        snapshot_tag=tag,
        stage=failure.stage,
        error=failure.message,
        code=failure.code,
        attempts=failure.attempts,
    )


def branch(tag: str, result: BranchResult) -> v2_trees.BranchInfo:
    """Return what became of a branch."""
    return v2_trees.BranchInfo(
        pause_ms=result.pause_ms,
        stall_ms=result.stall_ms,
        stall_unknown=result.stall_unknown,
        branched_at_unix_ms=_unix_ms(result.branched_at),
        sandboxes=outcomes(tag, result.fork),
        snapshot=None if result.snapshot is None else snapshot(result.snapshot),
    )


def promotion(result: Promotion) -> v2_trees.PromotionInfo:
    """Return what became of a promotion."""
    return v2_trees.PromotionInfo(sandbox=sandbox(result.sandbox), ended=list(result.ended))


def tree(budgets: TreeBudgets, roots: Iterable[TreeNode]) -> v2_trees.TreeInfo:
    """Return trees, and how far each may grow."""
    return v2_trees.TreeInfo(
        limits=v2_trees.TreeLimits(
            live=budgets.live_max,
            depth=budgets.depth_max,
            private_mib=budgets.private_mib_max,
        ),
        roots=[_tree_node(root) for root in roots],
    )


def difference(found: Difference) -> v2_trees.DiffInfo:
    """Return how two machines differ."""
    changes = [
        v2_trees.FileChange(
            path=each.path,
            change=each.change.value,
            kind=each.kind,
            size_bytes=each.size_bytes,
        )
        for each in found.changes
    ]
    return v2_trees.DiffInfo(changes=changes, more=found.more, pages_apart=found.pages_apart)


def machine_name(text: str, field: str) -> SandboxId | Tag:
    """Return the id of a sandbox, or the name of a snapshot."""
    return SandboxId(text) if is_sandbox_id(text) else parse_tag(text, field=field)


def _tree_node(node: TreeNode) -> v2_trees.TreeNode:
    return v2_trees.TreeNode(
        id=node.id,
        status="gone" if node.sandbox is None else _STATUS[node.sandbox.state],
        sandbox=None if node.sandbox is None else sandbox(node.sandbox),
        private_bytes=node.private_bytes,
        children=[_tree_node(child) for child in node.children],
    )


def pong(status: GuestStatus) -> v2.Pong:
    """Return how a guest's agent is."""
    return v2.Pong(
        version=status.version,
        pid=status.pid,
        uptime_s=status.uptime_s,
        runtime=status.runtime.value,
        warmup_ready=status.runtime.value in {"none", "ready"},
    )


def exec_exit(ended: model_exec.Exited) -> v2.ExecExit:
    """Return how a command ended."""
    return v2.ExecExit(
        exit_code=ended.exit_code,
        signal=ended.signal,
        timed_out=ended.timed_out,
        duration_s=ended.duration_s,
        truncated=ended.truncated,
    )


def archive_written(result: ArchiveResult) -> v2_files.ArchiveWritten:
    """Return what became of an archive."""
    skipped = [v2_files.SkippedEntry(path=path, reason=why) for path, why in result.skipped]
    return v2_files.ArchiveWritten(
        entries=result.entries,
        bytes=result.bytes,
        skipped=skipped,
        more_skipped=result.more_skipped,
    )


def eval_result(result: model_exec.EvalResult) -> v2.EvalResult:
    """Return what an evaluation gave."""
    fault = result.error
    return v2.EvalResult(
        result=result.repr,
        has_value=result.has_value,
        value=result.value,
        value_is_json=result.value_is_json,
        stdout=result.stdout,
        stderr=result.stderr,
        truncated=result.output_truncated,
        error=None if fault is None else f"{fault.type}: {fault.message}",
        exception=None if fault is None else _exception(fault),
        timed_out=result.timed_out,
        results=[
            v2.EvalForms(is_main=each.is_main, data=dict(each.data), omitted=dict(each.omitted))
            for each in result.results
        ],
        more_results=result.more_results,
        exit_code=1 if fault is not None or result.timed_out else 0,
    )


def _exception(fault: model_exec.EvalFault) -> v2.EvalException:
    return v2.EvalException(type=fault.type, message=fault.message, traceback=fault.traceback)


def file_entry(entry: FileEntry) -> v2_files.FileEntry:
    """Return one entry of a guest's file system."""
    return v2_files.FileEntry(
        name=readable(entry.name),
        name_b64=None if is_utf8(entry.name) else encoded(entry.name),
        kind=entry.kind.value,
        size_bytes=entry.size_bytes,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        modified_at_ns=entry.modified_at_ns,
        target=None if entry.target is None else readable(entry.target),
        target_b64=None if is_utf8(entry.target or "") else encoded(entry.target or ""),
    )


def unix(when: datetime) -> int:
    """Return an instant in seconds since 1970."""
    return int(when.timestamp())


def _unix_ms(when: datetime) -> int:
    return int(when.timestamp() * 1_000)
