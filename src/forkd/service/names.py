"""What this daemon's things on the host are called, so that two daemons never touch each other's.

A daemon ends and removes what it finds under its names and does not know.  So the names follow
from the run folder, are written down at the first start, and are reserved for as long as it runs.
A database from before they were written down keeps those that every daemon had then.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from hashlib import blake2b
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import Conflict
from forkd.host import files, netlink, sockets
from forkd.host.cgroupfs import CGROUP_ROOT
from forkd.network import taps
from forkd.network.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.service.settings import HostSettings
    from forkd.store.database import Database

FIRST_RUN_DIR = Path("/run/forkd")
"""The run folder of a system's daemon, whose names are the plain ones."""

NAMED_SINCE = 3
"""Version of the database from which on names are written down."""

_POOL = "address_pool"
"""What the database calls the pool of addresses."""

_POOLS = 56
"""How many address pools there are to choose from: 10.200.0.0/16 and those after it."""


@dataclass(frozen=True, slots=True)
class Names:
    """A daemon's names on the host.

    Attributes:
        cgroup_root: The cgroup below which limited sandboxes get theirs.
        network: Which taps and addresses sandboxes get.
    """

    cgroup_root: Path
    network: Plan


@contextlib.contextmanager
def reserved(chosen: Names, settings: HostSettings, database: Database) -> Iterator[Names]:
    """Keep other daemons from using these names within the block, which gets them.

    Addresses that another daemon took while this one did not run, or that this host has routes
    to, are replaced by free ones, and those are written down: unless they were set, or taps of
    ours are there, whose sandboxes have them.

    Args:
        chosen: What `choose` returned.  Its cgroup was made, if there is to be one.
        settings: What was set.
        database: Where names are written down.

    Raises:
        Conflict: Another daemon uses one of them, which cannot be replaced.
        HostError: The kernel does not say which routes or links there are.
        StoreError: The database does not work.
    """
    network = chosen.network
    with contextlib.ExitStack() as stack:
        _reserve_what_follows(chosen, stack)
        if settings.network is not None or taps.left_over(network, set()):
            pools = [network.pool]
        else:
            pools = _by_use(network.pool)
        pool = _reserve_pool(pools, stack)
        if pool != network.pool:
            database.replace_host_setting(_POOL, str(pool))
        yield replace(chosen, network=replace(network, pool=pool))


@contextlib.contextmanager
def reserved_for_removal(chosen: Names) -> Iterator[None]:
    """Keep other daemons from using what bears these names within the block.

    Nothing on the host bears the name of a pool of addresses, so another daemon may have it.

    Raises:
        Conflict: One uses them.
    """
    with contextlib.ExitStack() as stack:
        _reserve_what_follows(chosen, stack)
        yield


def _reserve_what_follows(chosen: Names, stack: contextlib.ExitStack) -> None:
    """Reserve the cgroup, if it was made, and the names of taps.

    The cgroup is locked itself; taps and addresses by names in the network namespace that they
    are in.
    """
    root, prefix = chosen.cgroup_root, chosen.network.tap_prefix
    if files.is_there(root) and not stack.enter_context(files.try_lock_folder(root)):
        raise _taken(f"the cgroup {root}")
    if not _reserve(f"forkd/taps/{prefix}", stack):
        raise _taken(f"taps named {prefix}…")


def _reserve_pool(pools: list[IPv4Network], stack: contextlib.ExitStack) -> IPv4Network:
    """Reserve the first of these that no other daemon has, and return it."""
    for pool in pools:
        if _reserve(f"forkd/addresses/{pool}", stack):
            return pool
    raise _taken(f"the addresses {pools[0]}")


def _reserve(name: str, stack: contextlib.ExitStack) -> bool:
    taken = sockets.take_name(name)
    if taken is not None:
        stack.enter_context(taken)
    return taken is not None


def _by_use(first: IPv4Network) -> list[IPv4Network]:
    """Return all address pools, from this one on; those that this host has routes to come last."""
    pools = [IPv4Network(f"10.{200 + number}.0.0/16") for number in range(_POOLS)]
    start = pools.index(first) if first in pools else 0
    routes = netlink.routes()
    in_turn = dict.fromkeys([first, *pools[start:], *pools[:start]])
    return sorted(in_turn, key=lambda pool: any(map(pool.overlaps, routes)))


def _taken(what: str) -> Conflict:
    return Conflict(
        f"another daemon of this host uses {what}; give one of them another run folder "
        "(FORKD_RUN_DIR)"
    )


def choose(settings: HostSettings, database: Database, delegated: Path | None = None) -> Names:
    """Return the names of the daemon that has these settings and this database; blocks.

    Args:
        settings: What was set.
        database: Where names are written down.
        delegated: The group that the daemon has to have its sandboxes' in, without root or in a
            container.  It may be another one at each start, and is written down for who removes
            what is left.

    Raises:
        StoreError: The database does not work.
    """
    derived = derive(settings.run_dir)
    if 0 < database.was_version < NAMED_SINCE:
        derived = derive(FIRST_RUN_DIR)
    root = settings.cgroup_root
    if root is None and delegated is not None:
        root = delegated / derived.cgroup_root.name
        database.replace_host_setting("cgroup_root", str(root))
    elif root is None:
        root = Path(database.host_setting("cgroup_root", str(derived.cgroup_root)))
        if not files.is_there(root.parent):  # it was a container's, which is gone
            root = derived.cgroup_root
            database.replace_host_setting("cgroup_root", str(root))
    network = settings.network
    if network is None:
        pool = database.host_setting(_POOL, str(derived.network.pool))
        prefix = database.host_setting("tap_prefix", derived.network.tap_prefix)
        network = Plan(IPv4Network(pool), tap_prefix=prefix)
    # The one place that decides whether sandboxes have IPv6; all else asks the plan, or a slot.
    return Names(root, replace(network, ipv6=network.ipv6 and netlink.has_ipv6()))


def derive(run_dir: Path) -> Names:
    """Return the names that follow from a run folder; pure.

    There are so few address pools that another daemon may use this one; `reserved` takes the next.
    """
    if run_dir == FIRST_RUN_DIR:
        return Names(CGROUP_ROOT / "forkd", Plan())
    digest = blake2b(bytes(run_dir), digest_size=4).digest()
    pool = IPv4Network(f"10.{200 + digest[0] % _POOLS}.0.0/16")
    return Names(
        CGROUP_ROOT / f"forkd-{digest.hex()}", Plan(pool, tap_prefix=f"fk{digest.hex()[:5]}")
    )
