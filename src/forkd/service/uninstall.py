"""End and remove all that a daemon, and the daemons before it, have left on this host.

For a host that is to be without forkd.  A daemon that runs keeps it out, by the locks that keep out
a second one.  Which cgroups, taps and tables are meant is in the database, or follows from the run
folder if that is gone.  Folders go as far as what is in them is ours: one that has something else
in it stays, and is named.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from forkd.cgroups.tree import CgroupTree
from forkd.errors import Conflict, ForkdError
from forkd.host import files, netlink, nftables
from forkd.network import rules, taps
from forkd.network.walls import Walls
from forkd.service import names
from forkd.service.cells import Cells
from forkd.service.host import DATABASE_FILE, LOCK_FILE
from forkd.service.records import Records
from forkd.service.recovery import end_processes
from forkd.service.vault import KEY_FILE
from forkd.store.database import Database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from forkd.service.names import Names
    from forkd.service.settings import HostSettings

AUDIT_LOG = "audit.log"
STATE_FOLDERS = ("snapshots", "images", "recipes", "staging", "writing", "tops", "cache")
STATE_FILES = (
    DATABASE_FILE,
    f"{DATABASE_FILE}-wal",
    f"{DATABASE_FILE}-shm",
    KEY_FILE,
    "token",
    AUDIT_LOG,
    LOCK_FILE,
)
"""What a daemon keeps in its state folder, by itself."""

CACHE_FOLDERS = ("kernels", "initramfs", "images", "locks")
"""What it keeps in its cache folder."""


@dataclass(slots=True)
class Uninstalled:
    """What became of what was left.

    Attributes:
        removed: What is gone, by kind.
        left: What is not, and why.
    """

    removed: dict[str, list[str]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return it as one event."""
        return {"event": "uninstalled", "removed": self.removed, "left": self.left}

    def note(self, kind: str, what: Iterable[object]) -> None:
        """Note what is gone."""
        if found := [str(each) for each in what]:
            self.removed.setdefault(kind, []).extend(found)

    def done(self, kind: str, what: object, remove: Callable[[], object]) -> None:
        """Remove something, and note it or why it is left."""
        try:
            remove()
        except ForkdError as error:
            self.left.append(f"{what}: {error}")
        else:
            self.note(kind, [what])


async def uninstall(
    settings: HostSettings, others: tuple[Path, ...] = (), *, state: bool = False
) -> Uninstalled:
    """End every sandbox of this host's daemon, and remove what it has made.

    Args:
        settings: Where its things are.
        others: Files of the daemon's in its run folder, such as its socket.
        state: Whether to remove snapshots, images and the database, too.

    Raises:
        Conflict: A daemon uses these folders, or these names.
        StoreError: The database is damaged, or of a later version.
        HostError: The kernel does not let us look.
    """
    found = Uninstalled()
    async with contextlib.AsyncExitStack() as stack:
        for folder in (settings.state_dir, settings.run_dir):
            if files.is_folder(folder) and not stack.enter_context(
                files.try_lock(folder / LOCK_FILE)
            ):
                raise Conflict(f"a daemon uses {folder}: stop it first")
        database = None
        if files.is_there(settings.state_dir / DATABASE_FILE):
            database = await asyncio.to_thread(Database, settings.state_dir / DATABASE_FILE)
            stack.callback(database.close)
        chosen = _names(settings, database)
        with names.reserved_for_removal(chosen):
            await _end(settings, database, found)
            await asyncio.to_thread(_remove_from_host, settings, chosen, found)
        await asyncio.to_thread(_remove_run_folder, settings, others, found)
        if state:
            await asyncio.to_thread(_remove_state, settings, found)
    return found


def _names(settings: HostSettings, database: Database | None) -> Names:
    if database is not None:
        return names.choose(settings, database)
    derived = names.derive(settings.run_dir)
    return names.Names(
        settings.cgroup_root or derived.cgroup_root, settings.network or derived.network
    )


async def _end(settings: HostSettings, database: Database | None, found: Uninstalled) -> None:
    """End every process of ours, and forget the sandboxes."""
    found.note("processes", await end_processes(settings.run_dir))
    if database is not None:
        with contextlib.closing(Records(database)) as records:
            await records.remove([row.sandbox.id for row in await records.rows()])


def _remove_from_host(settings: HostSettings, chosen: Names, found: Uninstalled) -> None:
    """Remove cgroups, taps and tables; blocks."""
    root = chosen.cgroup_root
    tree = CgroupTree(root)
    for name in tree.names():
        found.done("cgroups", tree.path(name), partial(tree.remove, name))
    if files.is_folder(root):
        found.done("cgroups", root, tree.remove_root)
    for tap in taps.left_over(chosen.network, set()):
        found.done("links", tap, partial(netlink.remove, [tap]))
    table = rules.table_name(chosen.network)
    if table in nftables.tables():
        Walls(chosen.network).begin(())
        if table in nftables.tables():
            found.left.append(f"the nftables table {table}")
        else:
            found.note("tables", [table])
    if settings.build_uids is not None:
        found.note("tables", Cells(settings.vmm, settings.build_uids, None, None).tidy())


def _remove_run_folder(
    settings: HostSettings, others: tuple[Path, ...], found: Uninstalled
) -> None:
    folder = settings.run_dir
    ours = (settings.sandboxes_dir, settings.zygotes_dir, settings.bakes_dir)
    _remove_folder(folder, (*ours, *others, folder / LOCK_FILE), found)


def _remove_state(settings: HostSettings, found: Uninstalled) -> None:
    folder = settings.state_dir
    ours = [folder / name for name in (*STATE_FOLDERS, *STATE_FILES)]
    for apart in (settings.tops_dir, settings.cache_dir):
        if apart.parent != folder:
            _remove_folder(apart, tuple(apart / name for name in CACHE_FOLDERS), found)
    _remove_folder(folder, tuple(ours), found)


def _remove_folder(folder: Path, ours: tuple[Path, ...], found: Uninstalled) -> None:
    """Remove what is ours in a folder, and then the folder if nothing else is in it."""
    if not files.is_folder(folder):
        return
    for each in ours:
        if each.is_relative_to(folder):
            files.remove_tree(each)
    if rest := files.entries(folder):
        found.left.append(f"{folder} has {', '.join(each.name for each in rest)}")
    else:
        found.done("folders", folder, partial(files.remove_tree, folder))
