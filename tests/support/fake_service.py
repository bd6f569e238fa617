"""A host in memory, for tests of everything above `forkd.service.api.Host`.

Guests are dictionaries, programs are the few of `fake_programs`, and evaluating runs the code
here.  What a test wants to go wrong it says by name: a recipe called `fails`, a program called
`nope`, a snapshot tag ending in `-flaky`, whose odd children fail.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import (
    BudgetError,
    BuildError,
    Conflict,
    EngineError,
    EngineTimeout,
    InvalidRequest,
    NotFound,
    StoreError,
    WarmUpError,
)
from forkd.model.caller import Scope
from forkd.model.diff import Change, Difference, FileChange
from forkd.model.filters import EVERY_SANDBOX
from forkd.model.host import HostInfo
from forkd.model.ids import (
    SandboxId,
    Tag,
    is_sandbox_id,
    new_sandbox_id,
    only_sandbox,
    parse_sandbox_start,
)
from forkd.model.image import Image
from forkd.model.progress import Progress
from forkd.model.sandbox import (
    BranchResult,
    ForkFailure,
    ForkOptions,
    ForkResult,
    Promotion,
    Sandbox,
    SandboxState,
    SpawnTimes,
    check_fork_count,
    end_of,
)
from forkd.model.snapshot import Removed, Snapshot, SnapshotStatus
from forkd.model.tree import TreeBudgets, TreeNode, grow
from forkd.service.allowance import limits_of
from forkd.service.ledger import Ledger
from forkd.service.sandboxes.lifecycle import paused
from forkd.service.secrets import Secrets
from forkd.service.tenants import Tenants
from forkd.service.tokens import Tokens
from forkd.service.vault import Vault
from forkd.telemetry.telemetry import Telemetry
from tests.support import fake_packs
from tests.support.fake_answers import FakeAnswers
from tests.support.fake_guests import Contents, FakeGuest, FakeGuests
from tests.support.fake_history import MIB, THEN, FakeJournal, FakeUsages
from tests.support.fake_images import FakeBuildLinks, FakeImageCache, FakeImageSnapshots
from tests.support.fake_networks import FakeNetworks
from tests.support.fake_recipes import FakeRecipes
from tests.support.no_records import no_records, records_in_memory

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable

    from forkd.model.caller import Caller
    from forkd.model.filters import SandboxFilter
    from forkd.model.ids import SandboxName
    from forkd.model.pack import Unpacked, UnpackRequest
    from forkd.model.recipe import RecipeSource
    from forkd.model.sandbox import BranchOptions, NewLimits, SandboxChange
    from forkd.model.snapshot import LinkRequest, SnapshotRequest
    from tests.support.fake_guests import FakePort
    from tests.support.fake_programs import FakeExec

FAKE_BUDGETS = TreeBudgets(live_max=100, depth_max=2, private_mib_max=1_024)


@dataclass
class Component:
    """One component of the host; all share its world."""

    world: FakeService


class FakeImages(Component):
    async def build(
        self, caller: Caller, recipe: RecipeSource
    ) -> AsyncGenerator[Progress | Image, None]:
        caller.require(Scope.SNAPSHOTS)
        name = await self.world.recipes.name(caller, recipe)
        yield Progress("rootfs", 0.5, "half of the root file system")
        yield Image("key", name, Path("/k"), None, Path("/r"), 2048 * MIB)


class FakeSnapshots(Component):
    async def bake(
        self, caller: Caller, request: SnapshotRequest
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        caller.require(Scope.SNAPSHOTS)
        self.world.check_free(request.tag)
        name = await self.world.recipes.name(caller, request.recipe)
        self.world.asked = request
        done = False
        try:
            yield Progress("boot", None, "booting")
            await self.world.bake(name)
            yield Progress("warm", 1.0, "warm")
            made = a_snapshot(request.tag, recipe=name)
            self.world.stored[request.tag] = made
            done = True
            yield made
        finally:
            if not done:
                self.world.bake_undone.set()

    async def list(self, caller: Caller) -> tuple[Snapshot, ...]:
        caller.require(Scope.READ)
        return tuple(self.world.stored[tag] for tag in sorted(self.world.stored))

    async def get(self, caller: Caller, tag: Tag) -> Snapshot:
        caller.require(Scope.READ)
        if tag not in self.world.stored:
            raise NotFound(f"no snapshot {tag!r}", tag=tag)
        return self.world.stored[tag]

    async def tidy(self, caller: Caller, *, dry_run: bool = False) -> tuple[Removed, ...]:
        caller.require(Scope.ADMIN)
        failed = [tag for tag, each in self.world.stored.items() if each.status == "failed"]
        if not dry_run:
            for tag in failed:
                del self.world.stored[tag]
        return tuple(Removed("failed", tag, MIB) for tag in failed)

    async def share(self, caller: Caller, tag: Tag, *, shared: bool) -> Snapshot:
        found = self.world.stored[tag] = replace(await self.get(caller, tag), shared=shared)
        return found

    async def delete(
        self, caller: Caller, tag: Tag, *, cascade: bool = False, force: bool = False
    ) -> None:
        caller.require(Scope.SNAPSHOTS)
        if cascade and force:
            raise InvalidRequest("cascade and force exclude each other", field="force")
        await self.world.snapshots.get(caller, tag)
        standing = self.world.standing_on(tag)
        if standing and not cascade and not force:
            raise Conflict(
                f"snapshot {tag} is the parent of {', '.join(standing)}; delete those first, or "
                "with cascade",
                tag=tag,
            )
        running = [each.sandbox for each in self.world.running.values()]
        if using := [each.id for each in running if each.tag in {tag, *standing}]:
            raise Conflict(f"snapshot {tag} is in use by {', '.join(using)}", tag=tag)
        for each in (tag, *(standing if cascade else ())):
            del self.world.stored[each]


class FakeChains(Component):
    async def extend(
        self, caller: Caller, request: LinkRequest
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        caller.require(Scope.SNAPSHOTS)
        self.world.check_free(request.tag)
        if request.of_sandbox:
            sandbox = SandboxId(request.source)
        else:
            (forked,) = (
                await self.world.sandboxes.fork(caller, Tag(request.source), 1, ForkOptions())
            ).sandboxes
            sandbox = forked.id
        yield Progress("exec", None, request.command or "")
        if request.command == "false":
            raise BuildError("the command exited with 1: it printed nothing")
        yield self.world.snapshot_sandbox(
            self.world.guest(caller, sandbox), request.tag, wait=request.wait
        )
        if not request.of_sandbox:
            await self.world.sandboxes.delete(caller, sandbox)

    async def compact(self, caller: Caller, tag: Tag, to: Tag | None = None) -> Snapshot:
        caller.require(Scope.SNAPSHOTS)
        old = await self.world.snapshots.get(caller, tag)
        if to is not None:
            self.world.check_free(to)
        made = replace(old, tag=to or tag, parent=None, depth=0, chain_bytes=old.stored_bytes)
        self.world.stored[made.tag] = made
        self.world.contents[made.tag] = self.world.contents[tag]
        return made


class FakePacks(Component):
    async def pack(self, caller: Caller, tag: Tag) -> AsyncGenerator[bytes, None]:
        caller.require(Scope.SNAPSHOTS)
        await self.world.snapshots.get(caller, tag)
        async with contextlib.aclosing(fake_packs.packed(tag)) as pieces:
            async for piece in pieces:
                yield piece

    async def unpack(
        self, caller: Caller, request: UnpackRequest, pieces: AsyncIterable[bytes]
    ) -> Unpacked:
        caller.require(Scope.SNAPSHOTS)
        made = a_snapshot(request.tag, recipe="python-numpy")
        return await fake_packs.unpacked(request, pieces, self.world.stored, made)


class FakeSandboxes(Component):
    async def fork(self, caller: Caller, tag: Tag, count: int, options: ForkOptions) -> ForkResult:
        caller.require(Scope.RUN)
        if count:
            check_fork_count(count, options.name)
        self.world.check_name(options.name)
        self.world.vault.check(caller.tenant, options.secrets)
        snapshot = await self.world.snapshots.get(caller, tag)
        if snapshot.status is SnapshotStatus.FAILED:
            raise StoreError(f"snapshot {tag} cannot be used: {snapshot.error}", tag=tag)
        if snapshot.status is SnapshotStatus.WRITING and not options.wait:
            raise Conflict(f"snapshot {tag} is still being written", tag=tag)
        flaky = tag.endswith(("-flaky", "-broken"))
        bad = [each for each in range(count) if flaky and (each % 2 or tag.endswith("-broken"))]
        if bad and options.all_or_nothing:
            raise EngineError(f"{len(bad)} of {count} failed", tag=tag)
        good = [self.world.fork_one(tag, options) for _ in range(count - len(bad))]
        failures = [ForkFailure(new_sandbox_id(), "agent", "guest", "no answer") for _ in bad]
        return ForkResult(tuple(good), tuple(failures), wall_ms=12.5)

    async def list(
        self, caller: Caller, wanted: SandboxFilter = EVERY_SANDBOX
    ) -> tuple[Sandbox, ...]:
        caller.require(Scope.READ)
        return wanted.of(each.sandbox for each in self.world.running.values())

    async def named(self, caller: Caller, ref: SandboxId | SandboxName) -> SandboxId:
        if is_sandbox_id(ref):
            return SandboxId(ref)
        if (found := self.world.find_name(ref)) is None:
            raise NotFound(f"no sandbox is named {ref}", sandbox=ref)
        return found

    async def change(self, caller: Caller, sandbox: SandboxId, change: SandboxChange) -> Sandbox:
        guest = self.world.guest(caller, sandbox)
        changed = change.of(guest.sandbox, THEN, 300.0)
        if changed.name != guest.sandbox.name:
            self.world.check_name(changed.name)
        guest.sandbox = changed
        return changed

    async def get(self, caller: Caller, sandbox: SandboxId) -> Sandbox:
        return self.world.guest(caller, sandbox, Scope.READ).sandbox

    async def find(self, caller: Caller, start: str) -> Sandbox:
        caller.require(Scope.READ)
        if (named := self.world.find_name(start)) is not None:
            return self.world.running[named].sandbox
        start = parse_sandbox_start(start)
        found = (each for each in self.world.running if each.startswith(start))
        return self.world.running[only_sandbox(start, found)].sandbox

    async def pause(self, caller: Caller, sandbox: SandboxId) -> Sandbox:
        return self._become(caller, sandbox, SandboxState.PAUSED)

    async def resume(self, caller: Caller, sandbox: SandboxId) -> Sandbox:
        return self._become(caller, sandbox, SandboxState.RUNNING)

    def _become(self, caller: Caller, sandbox: SandboxId, state: SandboxState) -> Sandbox:
        guest = self.world.guest(caller, sandbox)
        guest.sandbox = replace(guest.sandbox, state=state)
        return guest.sandbox

    async def delete(self, caller: Caller, sandbox: SandboxId) -> None:
        guest = self.world.guest(caller, sandbox)
        await asyncio.sleep(0)  # others go on meanwhile, as during a real one
        guest.ended.set()
        del self.world.running[sandbox]

    async def reset(self, caller: Caller, sandbox: SandboxId, *, deadline_s: float) -> float:
        guest = self.world.running_guest(caller, sandbox)
        if deadline_s < 1:
            raise EngineTimeout("the agent did not answer in time")
        guest.contents = guest.forked.copy()
        return 2.5

    async def set_limits(self, caller: Caller, sandbox: SandboxId, limits: NewLimits) -> Sandbox:
        guest = self.world.guest(caller, sandbox)
        found = guest.sandbox
        if limits.bandwidth_limit_mbit is not None and found.network is None:
            raise Conflict(f"sandbox {sandbox} was forked without a network")
        had, has = limits_of(found), limits_of(limits.of(found))
        if had is None and has is not None:
            raise Conflict(f"sandbox {sandbox} was forked without limits, and has no cgroup")
        guest.sandbox = limits.of(found)
        return guest.sandbox

    async def console_log(self, caller: Caller, sandbox: SandboxId) -> bytes:
        return self.world.guest(caller, sandbox, Scope.READ).console

    async def follow_console_log(
        self, caller: Caller, sandbox: SandboxId
    ) -> AsyncGenerator[bytes, None]:
        guest = self.world.guest(caller, sandbox, Scope.READ)
        yield guest.console
        guest.followed.set()
        await guest.ended.wait()
        yield b"reboot: Power down\n"


class FakeBranches(Component):
    async def branch(
        self,
        caller: Caller,
        sandbox: SandboxId,
        count: int,
        options: BranchOptions,
        *,
        tag: Tag | None = None,
        wait: bool = True,
    ) -> BranchResult:
        source = self.world.running_guest(caller, sandbox)
        if tag is not None:
            caller.require(Scope.SNAPSHOTS)
            self.world.check_free(tag)
        if len(source.sandbox.ancestors) == FAKE_BUDGETS.depth_max:
            raise BudgetError("too deep", budget="depth")
        result = await self.world.sandboxes.fork(
            caller, source.sandbox.tag, count, options.of(source.sandbox)
        )
        siblings = []
        for each in result.sandboxes:
            guest = self.world.running[each.id]
            guest.contents, guest.forked = source.contents.copy(), source.contents.copy()
            ancestors = (*source.sandbox.ancestors, sandbox)
            guest.sandbox = replace(each, ancestors=ancestors, branched_at=THEN)
            siblings.append(guest.sandbox)
        snapshot = None
        if tag is not None:
            snapshot = self.world.snapshot_sandbox(source, tag, wait=wait)
        fork = replace(result, sandboxes=tuple(siblings))
        return BranchResult(fork, pause_ms=1.25, branched_at=THEN, stall_ms=2.5, snapshot=snapshot)


class FakePromotions(Component):
    async def promote(self, caller: Caller, sandbox: SandboxId) -> Promotion:
        guest = self.world.running_guest(caller, sandbox)
        parent = guest.sandbox.parent
        if parent is None:
            raise Conflict(f"sandbox {sandbox} was not branched from another", sandbox=sandbox)
        below = [
            each.sandbox.id for each in self.world.running.values() if each.sandbox.parent == parent
        ]
        name = self.world.running[parent].sandbox.name
        for each in (parent, *below):
            del self.world.running[each]
        guest.sandbox = replace(guest.sandbox, id=parent, name=name, ancestors=(), branched_at=None)
        self.world.running[parent] = guest
        return Promotion(guest.sandbox, tuple(below))


class FakeComparisons(Component):
    async def compare(
        self, caller: Caller, before: SandboxId | Tag, after: SandboxId | Tag
    ) -> Difference:
        caller.require(Scope.RUN)
        was, now = (self._files(caller, name) for name in (before, after))
        found = []
        for path in sorted(was.keys() | now.keys()):
            one, other = was.get(path), now.get(path)
            if other is None:
                found.append(FileChange(path, Change.REMOVED, "f", len(one or b"")))
            elif one != other:
                change = Change.ADDED if one is None else Change.CHANGED
                found.append(FileChange(path, change, "f", len(other)))
        return Difference(tuple(found), pages_apart=5)

    def _files(self, caller: Caller, name: SandboxId | Tag) -> dict[str, bytes]:
        if name in self.world.stored:
            return self.world.contents[Tag(name)].files
        return self.world.guest(caller, SandboxId(name)).contents.files


class FakeTrees(Component):
    async def draw(self, caller: Caller, member: SandboxId | None = None) -> tuple[TreeNode, ...]:
        caller.require(Scope.READ)
        everybody = [each.sandbox for each in self.world.running.values()]
        if member is not None:
            root = self.world.guest(caller, member, Scope.READ).sandbox.root
            everybody = [each for each in everybody if each.root == root]
        return grow(everybody, {each.id: 3 * MIB for each in everybody})

    async def budgets(self, caller: Caller) -> TreeBudgets:
        caller.require(Scope.READ)
        return FAKE_BUDGETS


class FakeSystem(Component):
    async def info(self, caller: Caller) -> HostInfo:
        caller.require(Scope.READ)
        return HostInfo(
            version="0.1.0",
            hostname="fake",
            kernel="6.1.0",
            cpu_model="Fake CPU",
            cpus=2,
            memory_bytes=1 << 34,
            memory_available_bytes=1 << 33,
            kvm=True,
            pvm=False,
            cgroups=True,
            jail=True,
            network=True,
            state_free_bytes=1 << 35,
            snapshots=len(self.world.stored),
            sandboxes=len(self.world.running),
            uptime_s=1.5,
        )


class FakeFigures(Component):
    async def exposition(self, caller: Caller, accept: str) -> tuple[bytes, str]:
        return self.world.telemetry.exposition(accept)


class FakeVault(Vault):
    """Secrets in memory, with a key that is on no disk."""

    def unlock(self, *, make: bool) -> None:
        del make
        self._key = bytes(32)


class FakeService:
    """Every component, in memory, and what they work on."""

    def __init__(self) -> None:
        self.stored: dict[Tag, Snapshot] = {}
        self.contents: dict[Tag, Contents] = defaultdict(Contents)
        self.running: dict[SandboxId, FakeGuest] = {}
        self.baking = asyncio.Event()
        self.bake_undone = asyncio.Event()
        self.execs: list[FakeExec] = []
        self.ports: list[FakePort] = []
        self.exec_fed = asyncio.Event()
        self.eval_goes_on = asyncio.Event()
        self.eval_goes_on.set()
        self.eval_left = asyncio.Event()
        self.crashes_expected = 0
        self.failure: str | None = None
        self.recipes = FakeRecipes()
        self.images = FakeImages(self)
        self.asked: SnapshotRequest | None = None
        self.image_cache = FakeImageCache()
        self.image_snapshots = FakeImageSnapshots(self.keep_cached)
        self.build_links = FakeBuildLinks(self.keep_cached)
        self.snapshots = FakeSnapshots(self)
        self.chains = FakeChains(self)
        self.packs = FakePacks(self)
        self.sandboxes = FakeSandboxes(self)
        self.branches = FakeBranches(self)
        self.promotions = FakePromotions(self)
        self.comparisons = FakeComparisons(self)
        self.trees = FakeTrees(self)
        self.guests = FakeGuests(self)
        self.system = FakeSystem(self)
        self.telemetry = Telemetry()
        self.tokens = Tokens(self.telemetry, no_records())
        self.tenants = Tenants(self.telemetry, records_in_memory(), Ledger())
        self.figures = FakeFigures(self)
        self.journal = FakeJournal(self)
        self.usage = FakeUsages(self)
        self.networks = FakeNetworks(self)
        self.answers = FakeAnswers()
        self.vault = FakeVault(Path("/nowhere"))
        self.secrets = Secrets(self.telemetry, no_records(), self.vault)

    async def bake(self, recipe: str) -> None:
        self.baking.set()
        if recipe == "fails":
            raise WarmUpError("the warm-up raised ValueError: no", recipe=recipe)
        if recipe == "hangs":
            await asyncio.Event().wait()

    def keep_cached(self, tag: str) -> Snapshot:
        made = self.stored[Tag(tag)] = replace(a_snapshot(tag), cached=True)
        return made

    def check_free(self, tag: Tag) -> None:
        if tag in self.stored:
            raise Conflict(f"snapshot {tag} exists", tag=tag)

    def find_name(self, name: str | None) -> SandboxId | None:
        named = (id_ for id_, each in self.running.items() if each.sandbox.name == name)
        return None if name is None else next(named, None)

    def check_name(self, name: str | None) -> None:
        if (taken := self.find_name(name)) is not None:
            raise Conflict(f"the name {name} is taken by sandbox {taken}", field="name")

    def standing_on(self, tag: Tag) -> list[Tag]:
        """Return every snapshot that depends on one, the nearest first."""
        above = [each.tag for each in self.stored.values() if each.parent == tag]
        return [*above, *(other for each in above for other in self.standing_on(each))]

    def snapshot_sandbox(self, guest: FakeGuest, tag: Tag, *, wait: bool) -> Snapshot:
        source = guest.sandbox
        made = replace(
            a_snapshot(tag, status=SnapshotStatus.READY if wait else SnapshotStatus.WRITING),
            parent=source.tag,
            depth=self.stored[source.tag].depth + 1,
            chain_bytes=400 * MIB,
            source=source.id,
            pause_ms=1.25,
        )
        self.stored[tag], self.contents[tag] = made, guest.contents.copy()
        return made

    def fork_one(self, tag: Tag, options: ForkOptions) -> Sandbox:
        made = Sandbox(
            id=new_sandbox_id(),
            tag=tag,
            state=SandboxState.RUNNING,
            created_at=THEN,
            hostname="guest",
            pid=4711,
            address="10.200.0.2" if options.network else None,
            address_v6="fd66:6b64:ac8::2" if options.network else None,
            memory_limit_mib=options.memory_limit_mib,
            disk_limit_mib=options.disk_limit_mib,
            cpu_limit=options.cpu_limit,
            cpu_weight=options.cpu_weight,
            pids_limit=options.pids_limit,
            io_limit_mib_s=options.io_limit_mib_s,
            io_limit_ops=options.io_limit_ops,
            bandwidth_limit_mbit=options.bandwidth_limit_mbit,
            spawn=SpawnTimes(0.5, 1, 0.25, 3, 4.75),
            expires_at=end_of(options.ttl_s, THEN, 300.0),
            idle_ttl_s=options.idle_ttl_s,
            name=options.name,
            labels=options.labels,
            env=options.env,
            network=options.network,
            egress_held=options.hold_egress,
            secrets=options.secrets,
        )
        stored = self.contents[tag]
        self.running[made.id] = FakeGuest(made, stored.copy(), stored.copy())
        return made

    def guest(self, caller: Caller, sandbox: SandboxId, scope: Scope = Scope.RUN) -> FakeGuest:
        caller.require(scope)
        if sandbox not in self.running:
            raise NotFound(f"no sandbox {sandbox}", sandbox=sandbox)
        return self.running[sandbox]

    def running_guest(
        self, caller: Caller, sandbox: SandboxId, scope: Scope = Scope.RUN
    ) -> FakeGuest:
        found = self.guest(caller, sandbox, scope)
        if found.sandbox.state is SandboxState.PAUSED:
            raise paused(found.sandbox)
        return found


def a_snapshot(tag: str, *, recipe: str = "good", status: SnapshotStatus | None = None) -> Snapshot:
    made = Snapshot(
        tag=Tag(tag),
        status=SnapshotStatus.READY,
        created_at=THEN,
        recipe=recipe,
        image_key="key",
        vcpus=1,
        memory_bytes=512 * MIB,
        disk_bytes=2048 * MIB,
        stored_bytes=100 * MIB,
        chain_bytes=100 * MIB,
        runtime="python",
        parent=None,
        sandboxes=0,
        directory=Path("/var/lib/forkd/snapshots") / tag,
    )
    return made if status is None else replace(made, status=status)


def some_snapshots(*tags: str) -> dict[Tag, Snapshot]:
    return {Tag(each): a_snapshot(each) for each in tags}
