"""What this daemon's things on the host are called, so that two daemons never touch each other's.

A daemon ends and removes what it finds under its names and does not know.  So the names follow
from the run folder, are written down at the first start, and are locked for as long as it runs.
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
from forkd.network.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.service.settings import HostSettings
    from forkd.store.database import Database

FIRST_RUN_DIR = Path("/run/forkd")
"""The run folder of a system's daemon, whose names are the plain ones."""

NAMED_SINCE = 3
"""Version of the database from which on names are written down."""

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
    def locked(self) -> Iterator[None]:
        """Keep other daemons from using these names within the block.

        The cgroup is locked itself, if it was made; taps and addresses by names in the network
        namespace that they are in.

        Raises:
            Conflict: One uses them.
        """
        pool, prefix = self.network.pool, self.network.tap_prefix
        with contextlib.ExitStack() as stack:
            if files.is_there(self.cgroup_root) and not stack.enter_context(
                files.try_lock_folder(self.cgroup_root)
            ):
                raise _taken(f"the cgroup {self.cgroup_root}")
            for name, what in (
                (_of_pool(pool), f"the addresses {pool}"),
                (f"forkd/taps/{prefix}", f"taps named {prefix}…"),
            ):
                held = sockets.take_name(name)
                if held is None:
                    raise _taken(what)
                stack.enter_context(held)
            yield


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
        pool = database.host_setting("address_pool", str(_free(derived.network.pool)))
        prefix = database.host_setting("tap_prefix", derived.network.tap_prefix)
        network = Plan(IPv4Network(pool), tap_prefix=prefix)
    # The one place that decides whether sandboxes have IPv6; all else asks the plan, or a slot.
    return Names(root, replace(network, ipv6=network.ipv6 and netlink.has_ipv6()))


def _free(first: IPv4Network) -> IPv4Network:
    """Return the first address pool, from this one on, that no other daemon uses."""
    pools = [IPv4Network(f"10.{200 + number}.0.0/16") for number in range(_POOLS)]
    start = pools.index(first)
    for pool in pools[start:] + pools[:start]:
        held = sockets.take_name(_of_pool(pool))
        if held is not None:
            held.close()
            return pool
    return first


def _of_pool(pool: IPv4Network) -> str:
    return f"forkd/addresses/{pool}"


def derive(run_dir: Path) -> Names:
    """Return the names that follow from a run folder; pure.

    There are so few address pools that another daemon may use this one; `choose` takes the next.
    """
    if run_dir == FIRST_RUN_DIR:
        return Names(CGROUP_ROOT / "forkd", Plan())
    digest = blake2b(bytes(run_dir), digest_size=4).digest()
    pool = IPv4Network(f"10.{200 + digest[0] % _POOLS}.0.0/16")
    return Names(
        CGROUP_ROOT / f"forkd-{digest.hex()}", Plan(pool, tap_prefix=f"fk{digest.hex()[:5]}")
    )
