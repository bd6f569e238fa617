"""A host: every component of the service, open for as long as everything in it works.

    async with open_host(settings) as host:
        await host.sandboxes.fork(caller, tag, 3, ForkOptions())

Opening adopts what an earlier daemon left, and reaps what is dead or half-made.  Leaving the block
lets go of everything: sandboxes live on, bakes in progress are undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from forkd.cgroups import tree
from forkd.cgroups.limits import CONTROLLERS
from forkd.cgroups.tree import CgroupTree
from forkd.errors import Conflict, HostError
from forkd.host import files, proc, threads
from forkd.model.event import EventKind
from forkd.model.sandbox import SandboxState
from forkd.network.upstream import Upstreams
from forkd.service import jail_trial, names, rootless
from forkd.service.admission import Admission
from forkd.service.answers import Answers
from forkd.service.build_links import BuildLinks
from forkd.service.build_network import BuildNetwork
from forkd.service.cells import Cells
from forkd.service.chains import Chains
from forkd.service.clock import WallClock
from forkd.service.egress import Egress
from forkd.service.figures import Figures
from forkd.service.guest_clocks import GuestClocks
from forkd.service.guests import Guests
from forkd.service.image_cache import ImageCache
from forkd.service.image_snapshots import ImageSnapshots
from forkd.service.images import Images
from forkd.service.introduction import Introduction
from forkd.service.jail import Jail
from forkd.service.journal import Journal
from forkd.service.leases import Leases
from forkd.service.ledger import Ledger
from forkd.service.networks import Networks
from forkd.service.over_base import OverBase
from forkd.service.packs import Packs
from forkd.service.recipes import Recipes
from forkd.service.records import Records
from forkd.service.recovery import Recovery
from forkd.service.sandboxes.component import Sandboxes
from forkd.service.sandboxes.roster import Roster
from forkd.service.secrets import Secrets
from forkd.service.slots import Slots
from forkd.service.snapshots.bake_leases import BakeLeases
from forkd.service.snapshots.catalog import Catalog
from forkd.service.snapshots.compaction import Compaction
from forkd.service.snapshots.component import Snapshots
from forkd.service.snapshots.upkeep import Upkeep
from forkd.service.snapshots.writing import LinkWriter
from forkd.service.supervision import Supervisor, TaskKind
from forkd.service.system import System
from forkd.service.tenants import Tenants
from forkd.service.tokens import Tokens
from forkd.service.trees.branches import Branches
from forkd.service.trees.comparisons import Comparisons
from forkd.service.trees.growth import Growth
from forkd.service.trees.promotion import Promotions
from forkd.service.trees.trees import Trees
from forkd.service.usage import UsageOfSandboxes
from forkd.service.vault import Vault
from forkd.service.workers import Workers
from forkd.service.zygotes import Accounts, ZygotePool
from forkd.store.database import Database
from forkd.store.pending import PendingStore
from forkd.store.recipes import RecipeStore
from forkd.store.snapshots import SnapshotStore
from forkd.telemetry.lag import LoopLag
from forkd.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from forkd.service.names import Names
    from forkd.service.recovery import Recovered
    from forkd.service.settings import HostSettings
    from forkd.store.database import SandboxRow

THREADS_MIN, THREADS_MAX = 4, 32
"""How many threads wait for the kernel: one for each CPU besides the least, up to the most."""

LOCK_FILE = "daemon.lock"
DATABASE_FILE = "forkd.db"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Host:
    """What a front end may ask, by noun; `forkd.service.api` documents each.

    Attributes:
        telemetry: What it does, in figures.
        tasks: Runs what outlives a request; says whether the host can go on.
    """

    recipes: Recipes
    images: Images
    snapshots: Snapshots
    chains: Chains
    packs: Packs
    sandboxes: Sandboxes
    branches: Branches
    promotions: Promotions
    comparisons: Comparisons
    trees: Trees
    guests: Guests
    system: System
    tokens: Tokens
    tenants: Tenants
    journal: Journal
    figures: Figures
    usage: UsageOfSandboxes
    networks: Networks
    secrets: Secrets
    image_cache: ImageCache
    image_snapshots: ImageSnapshots
    build_links: BuildLinks
    answers: Answers
    telemetry: Telemetry
    tasks: Supervisor


@contextlib.asynccontextmanager
async def open_host(
    settings: HostSettings, telemetry: Telemetry | None = None
) -> AsyncGenerator[Host, None]:
    """Open the host that these settings describe, for the block.

    Args:
        settings: Where its things are.
        telemetry: Where it is noted what the host does; None to note it for nobody.

    Raises:
        Conflict: Another daemon has the same state or run folder, or the same names.
        StoreError: The database is damaged, or of a later version.
        HostError: The kernel refused something.
        CapacityError: It has no room for more files, processes or threads, or the disk is full.
    """
    async with contextlib.AsyncExitStack() as stack:
        ground = await _open_ground(settings, stack)
        host, rows = await _compose(settings, telemetry or Telemetry(), ground, stack)
        promoted = []
        for row in rows:
            owner = host.sandboxes.adopt(row)
            if row.renaming:
                promoted.append(owner)
        await host.networks.begin()
        for owner in promoted:
            host.promotions.finish_in_background(owner)
        host.image_cache.trim_soon()  # now that it is known which snapshots are used
        log.info("host opened", extra={"sandboxes": len(rows)})
        yield host


@dataclass(frozen=True, slots=True)
class _Ground:
    """What everything else is built on: locked folders and names, and the database."""

    names: Names
    cgroups: CgroupTree
    records: Records
    store: SnapshotStore
    pending: PendingStore
    jail: Jail
    cells: Cells | None


async def _open_ground(settings: HostSettings, stack: contextlib.AsyncExitStack) -> _Ground:
    proc.raise_open_files_limit()
    _start_threads(stack)
    await asyncio.to_thread(_make_folders, settings)
    for folder in (settings.state_dir, settings.run_dir):
        if not stack.enter_context(files.try_lock(folder / LOCK_FILE)):
            raise Conflict(f"another daemon uses {folder}")
    database = await asyncio.to_thread(Database, settings.state_dir / DATABASE_FILE)
    stack.callback(database.close)
    records = Records(database)
    stack.callback(records.close)
    delegated = await asyncio.to_thread(tree.delegated)
    chosen = await asyncio.to_thread(names.choose, settings, database, delegated)
    uids = settings.uids
    zygotes = None if uids is None else uids.zygotes
    cgroups = CgroupTree(chosen.cgroup_root, settings.tops_dir, zygotes)
    _prepare_cgroups(cgroups, required=settings.cgroups)
    chosen = stack.enter_context(names.reserved(chosen, settings, database))
    stack.callback(cgroups.close)
    store = SnapshotStore(settings.state_dir)
    pending = PendingStore(settings.state_dir)
    jail = Jail(
        uids,
        settings.jail_dirs,
        settings.tops_dir,
        rootless=settings.rootless_jail,
        cgroups=cgroups.root if cgroups.prepared else None,
    )
    if settings.rootless_jail:
        await asyncio.to_thread(rootless.try_out, settings.vmm)
    await asyncio.to_thread(jail.prepare)
    if uids is not None:
        await asyncio.to_thread(jail_trial.check, settings.vmm, uids)
    cells = await asyncio.to_thread(_cells, settings, cgroups)
    return _Ground(chosen, cgroups, records, store, pending, jail, cells)


def _cells(settings: HostSettings, cgroups: CgroupTree) -> Cells | None:
    """Return the cells of builds and packs, whose users are nobody's; None if there are none."""
    if settings.build_uids is None:
        log.warning("builds of images are not jailed: maintainer scripts run as the daemon's user")
        return None
    group = cgroups if settings.cgroups else None
    network = BuildNetwork.of(settings.build_network)
    cells = Cells(settings.vmm, settings.build_uids, settings.uids, group, network)
    cells.check()
    cells.tidy()
    return cells


def _prepare_cgroups(cgroups: CgroupTree, *, required: bool) -> None:
    """Make the group of all sandboxes, if this host lets us.

    Raises:
        HostError: It does not, and every sandbox is to have one.
    """
    if cgroups.usable():
        cgroups.prepare()
    elif required:
        raise HostError(
            f"every sandbox gets a cgroup, and this host has no cgroup v2 with "
            f"{', '.join(CONTROLLERS)} at {cgroups.root.parent} that is ours: boot with "
            "systemd.unified_cgroup_hierarchy=1, start a container with --privileged, or set "
            "FORKD_CGROUPS=off to have sandboxes without limits. A daemon that is not root needs "
            "a unit with Delegate=yes"
        )
    else:
        log.warning("sandboxes have no cgroups", extra={"root": str(cgroups.root)})


def _start_threads(stack: contextlib.AsyncExitStack) -> None:
    """Have every thread run that `asyncio.to_thread` may need, so that none is refused later."""
    loop = asyncio.get_running_loop()
    executor = threads.start(min(THREADS_MAX, THREADS_MIN + proc.cpus_available()), "forkd")
    stack.callback(executor.shutdown)
    loop.set_default_executor(executor)
    stack.callback(lambda: loop.set_default_executor(ThreadPoolExecutor()))


def _make_folders(settings: HostSettings) -> None:
    for folder in (
        settings.state_dir,
        settings.run_dir,
        settings.sandboxes_dir,
        settings.zygotes_dir,
        settings.bakes_dir,
        settings.tops_dir,
        settings.staging_dir,
        settings.snapshots_dir,
    ):
        files.make_folder(folder, parents=True, exist_ok=True)


async def _open_rights(
    telemetry: Telemetry, records: Records, clock: WallClock
) -> tuple[Ledger, Tokens, Tenants]:
    ledger = Ledger()
    tokens, tenants = Tokens(telemetry, records, clock), Tenants(telemetry, records, ledger)
    await tokens.load()
    await tenants.load()
    return ledger, tokens, tenants


async def _open_secrets(
    settings: HostSettings, telemetry: Telemetry, records: Records
) -> tuple[Introduction, Secrets]:
    vault = Vault(settings.state_dir)
    secrets = Secrets(telemetry, records, vault)
    await secrets.load()
    return Introduction(vault), secrets


async def _open_answers(records: Records, tasks: Supervisor) -> Answers:
    answers = Answers(records, partial(tasks.run, TaskKind.ANSWER))
    await answers.load()
    return answers


async def _recover(
    settings: HostSettings, telemetry: Telemetry, ground: _Ground, stack: contextlib.AsyncExitStack
) -> tuple[Journal, tuple[SandboxRow, ...]]:
    """Open the journal and tidy up after an earlier daemon; return which sandboxes live on."""
    journal = Journal(telemetry, ground.records)
    await journal.begin()  # before anything is changed that it should have: it knows of a crash
    stack.push_async_callback(journal.close)
    recovery = Recovery(settings, ground.records, ground.cgroups, ground.names.network)
    recovered = await recovery.recover()
    _note_recovered(journal, recovered)
    return journal, recovered.kept


async def _prepare(*stores: SnapshotStore | PendingStore | RecipeStore) -> None:
    """Remove what an earlier daemon was about to write: nobody goes on with it."""
    for each in stores:
        await asyncio.to_thread(each.prepare)


def _open_leases(
    settings: HostSettings,
    ground: _Ground,
    tasks: Supervisor,
    vault: Vault,
    stack: contextlib.AsyncExitStack,
) -> tuple[Egress, Slots, Leases]:
    plan, jail = ground.names.network, ground.jail
    outward = Upstreams(settings.egress_proxy, settings.egress_ca)
    egress = Egress(plan, tasks, settings.dns, vault, outward)
    stack.callback(egress.close)
    slots = Slots(plan, egress, tasks, settings.network_slots, opened=jail.is_on)
    stack.push_async_callback(slots.close)
    leases = Leases(settings.sandboxes_dir, ground.cgroups, slots, jail, egress)
    return egress, slots, leases


async def _compose(
    settings: HostSettings, telemetry: Telemetry, ground: _Ground, stack: contextlib.AsyncExitStack
) -> tuple[Host, tuple[SandboxRow, ...]]:
    """Reap and tidy, and give each component what it works with."""
    store, pending, records, jail = ground.store, ground.pending, ground.records, ground.jail
    journal, rows = await _recover(settings, telemetry, ground, stack)
    await _prepare(store, pending, uploaded := RecipeStore(settings.state_dir))
    tasks, clock = Supervisor(), WallClock()
    ledger, tokens, tenants = await _open_rights(telemetry, records, clock)
    introduction, secrets = await _open_secrets(settings, telemetry, records)
    workers = stack.enter_context(Workers())
    recipes = Recipes(telemetry, settings.recipe_dirs, uploaded, workers, ledger, tasks)
    await recipes.load()
    admission = Admission(settings.admission, ledger, settings.tops_dir, settings.disks.reserve_mib)
    made_with = (recipes, ground.cells, ledger, admission)
    images = await stack.enter_async_context(Images(telemetry, settings, tasks, *made_with))
    roster = Roster()
    catalog = Catalog(store, pending, records, ledger, journal, roster.users_of)
    accounts = Accounts(ledger, catalog.tenant_of)
    zygotes = await stack.enter_async_context(ZygotePool(settings, store, tasks, jail, accounts))
    await stack.enter_async_context(tasks)
    _begin_vital_tasks(tasks, journal, clock)
    clock.on_step.append(GuestClocks(tasks, roster).note_step)
    await catalog.load()
    upkeep = Upkeep(telemetry, settings, store, pending, records, catalog, zygotes, recipes)
    await upkeep.drop_unused_images()
    egress, slots, leases = _open_leases(settings, ground, tasks, introduction.vault, stack)
    for_forks = (admission, leases, ledger, journal, roster, catalog, zygotes, introduction, clock)
    sandboxes = Sandboxes(telemetry, settings, tasks, records, *for_forks)
    guests = Guests(telemetry, roster, introduction)
    lag, tops = stack.enter_context(LoopLag()), files.real_path(settings.tops_dir)
    growth, writer = Growth(settings.budgets, roster), LinkWriter(tasks, store, pending, catalog)
    branches = Branches(telemetry, settings, tasks, sandboxes, growth, writer)
    compaction = Compaction(telemetry, tasks, store, catalog, zygotes)
    bakes = BakeLeases(settings, admission, ledger, jail, ground.cgroups)
    over = OverBase(settings, tasks, recipes, images, catalog, sandboxes, branches, store)
    for_bakes = (admission, store, catalog, images, upkeep, bakes, over)
    snapshots = Snapshots(telemetry, settings, tasks, *for_bakes)
    image_cache = ImageCache(telemetry, settings, images, catalog, upkeep, store, tasks)
    for_images = (recipes, images, snapshots, image_cache, catalog, store)
    over.image_snapshots = ImageSnapshots(telemetry, settings, tasks, *for_images)
    for_packs = (store, catalog, upkeep.drop_unused_images, ground.cells, workers)
    for_comparisons = (store, catalog, sandboxes, branches, jail, workers)
    for_figures = (catalog, zygotes, images, journal, lag, slots, workers)
    return Host(
        recipes=recipes,
        images=images,
        snapshots=snapshots,
        chains=Chains(telemetry, catalog, sandboxes, branches, guests, compaction),
        packs=Packs(telemetry, settings.packs, *for_packs),
        sandboxes=sandboxes,
        branches=branches,
        promotions=Promotions(telemetry, tasks, records, leases, sandboxes, growth),
        comparisons=Comparisons(telemetry, settings.vmm, *for_comparisons),
        trees=Trees(telemetry, roster, growth, workers),
        guests=guests,
        system=System(telemetry, settings, ground.cgroups, catalog, roster, time.monotonic()),
        tokens=tokens,
        tenants=tenants,
        journal=journal,
        figures=Figures(telemetry, settings, roster, *for_figures),
        usage=UsageOfSandboxes(telemetry, roster, ground.cgroups, tops, workers),
        networks=Networks(telemetry, roster, records, egress),
        secrets=secrets,
        image_cache=image_cache,
        image_snapshots=over.image_snapshots,
        build_links=BuildLinks(telemetry, roster, branches, image_cache, catalog, store),
        answers=await _open_answers(records, tasks),
        telemetry=telemetry,
        tasks=tasks,
    ), rows


def _begin_vital_tasks(tasks: Supervisor, journal: Journal, clock: WallClock) -> None:
    """Run what the host cannot go on without."""
    for work, what in ((journal.write(), "events"), (journal.tell(), "followers")):
        tasks.run(TaskKind.JOURNAL, work, what, vital=True)
    tasks.run(TaskKind.CLOCK, clock.watch(), "of the host", vital=True)


def _note_recovered(journal: Journal, recovered: Recovered) -> None:
    """Note what became of sandboxes while no daemon ran; those that were starting nobody knew."""
    for row in recovered.ended:
        reason = row.sandbox.exit_reason
        journal.note(EventKind.SANDBOX_EXITED, row.sandbox.id, row.sandbox.owner, reason=reason)
    for row in recovered.dropped:
        if row.sandbox.state is not SandboxState.STARTING:
            journal.note(EventKind.SANDBOX_DELETED, row.sandbox.id, row.sandbox.owner)
