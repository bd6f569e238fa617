"""Give cells to builds of images and to packs: who they are on the host, what they may take of it.

Each build under way has users that no other has, by a place among as many as may be under way, and
a cgroup of that place's name.  So what a killed daemon left in one is known to the next daemon, and
ended as what is left of sandboxes.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.cgroups.limits import Limits
from forkd.cgroups.tree import END_TIMEOUT_S
from forkd.errors import CapacityError, InvalidRequest
from forkd.host import nftables, places
from forkd.host.cells import Cell
from forkd.host.places import Place
from forkd.limits import (
    BUILD_MEMORY_BYTES_MAX,
    BUILD_PIDS_MAX,
    BUILD_UIDS,
    BUILDS_MAX,
    LONG_RETRY_S,
    PACKS_MAX,
)
from forkd.network.build_rules import table_name
from forkd.service import build_network

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.cgroups.tree import CgroupTree
    from forkd.service.build_network import BuildNetwork
    from forkd.service.jail import UidRange

UIDS_MIN = BUILDS_MAX * BUILD_UIDS + PACKS_MAX
"""Least users of a range for cells."""

PLACES = Path("/run/forkd-places")
"""Where all daemons of this host see which users of cells are somebody's; root's alone, as `/run`
is, where `/run/lock` often is everybody's."""

log = logging.getLogger(__name__)


class Cells:
    """The cells of one host.

    Args:
        vmm: The VMM's program, which makes them.
        uids: Whose numbers users have in them: `BUILD_UIDS` for each build, then one for each pack.
        others: Those of jailed machines.
        cgroups: Where each gets a group; None for none.
        network: What downloads of builds may reach; None for all that the host does.
    """

    def __init__(
        self,
        vmm: Path,
        uids: UidRange,
        others: UidRange | None,
        cgroups: CgroupTree | None,
        network: BuildNetwork | None = None,
    ) -> None:
        self._vmm = vmm
        self._uids = uids
        self._others = others
        self._cgroups = cgroups
        self._network = network

    def check(self) -> None:
        """Make sure that these users are nobody's.

        Raises:
            InvalidRequest: They are somebody's, or too few.
            HostError: The kernel does not let us look.
        """
        uids, others = self._uids, self._others
        if uids.count < UIDS_MIN:
            raise InvalidRequest(
                f"FORKD_BUILD_UID_RANGE must have {UIDS_MIN} users: {BUILD_UIDS} for each of "
                f"{BUILDS_MAX} builds, and one for each of {PACKS_MAX} packs",
                field="build_uid_range",
            )
        if others is not None and others.overlaps(uids.first, uids.count):
            raise InvalidRequest(
                "FORKD_BUILD_UID_RANGE overlaps FORKD_UID_RANGE", field="build_uid_range"
            )
        uids.check("build_uid_range")

    @contextlib.contextmanager
    def build(self, memory_bytes: int = BUILD_MEMORY_BYTES_MAX) -> Iterator[Cell]:
        """Give a cell to one build, for the block; blocks, and ends what is left in it.

        Args:
            memory_bytes: What all of its processes together may take.

        Raises:
            CapacityError: As many builds as may be are under way.
            HostError: A limit could not be set.
        """
        place, held = self._take()
        name = f"build-{place}"
        try:
            first = self._first_of(place)
            with self._confined(first):
                limits = Limits(pids=BUILD_PIDS_MAX, memory_bytes=memory_bytes)
                group = self._cgroups.create(name, limits) if self._cgroups is not None else None
                cell = Cell(self._vmm, first, BUILD_UIDS, group)
                try:
                    yield cell
                finally:
                    cell.end(END_TIMEOUT_S)
                    if self._cgroups is not None:
                        self._cgroups.remove(name)
        finally:
            held.close()

    @contextlib.contextmanager
    def pack(self) -> Iterator[Cell]:
        """Give a cell to what reads or writes one pack, for the block; blocks likewise.

        Raises:
            CapacityError: As many packs as may be are read and written.
        """
        first = self._uids.first + BUILDS_MAX * BUILD_UIDS
        for uid in range(first, first + PACKS_MAX):
            if (held := Place.take(PLACES, f"pack-{uid}")) is not None:
                with contextlib.closing(held):
                    cell = Cell(self._vmm, uid)
                    try:
                        yield cell
                    finally:
                        cell.end(END_TIMEOUT_S)
                return
        raise CapacityError(
            f"{PACKS_MAX} packs are being read and written", retry_after_s=LONG_RETRY_S
        )

    def tidy(self) -> list[str]:
        """Remove what was for the cells of a killed daemon; blocks, and returns the tables' names.

        Raises:
            HostError: The kernel refused.
        """
        tables, removed = nftables.tables(), []
        for first in map(self._first_of, range(BUILDS_MAX)):
            if (table := table_name(first)) not in tables:
                continue
            if (held := Place.take(PLACES, f"build-{first}")) is not None:
                with contextlib.closing(held):
                    build_network.release(first)
                    removed.append(table)
        places.sweep(PLACES)
        return removed

    @contextlib.contextmanager
    def _confined(self, first: int) -> Iterator[None]:
        """Have the network of a build be what it may reach, for the block."""
        if self._network is None:
            yield
            return
        self._network.confine(first, BUILD_UIDS)
        try:
            yield
        finally:
            build_network.release(first)

    def _first_of(self, place: int) -> int:
        return self._uids.first + place * BUILD_UIDS

    def _take(self) -> tuple[int, Place]:
        """Return a place whose users no build has, of whatever daemon, and its lock."""
        for place in range(BUILDS_MAX):
            held = Place.take(PLACES, f"build-{self._first_of(place)}")
            if held is not None:
                return place, held
        raise CapacityError(f"{BUILDS_MAX} images are being built", retry_after_s=LONG_RETRY_S)
