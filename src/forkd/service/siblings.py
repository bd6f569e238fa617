"""Users for the siblings of sandboxes: a user namespace for each sandbox that is branched.

A seed has no right to make its siblings others but in a user namespace of its source's, which the
daemon has made at the source's first branch and hands to each seed.  In it there are the users of
one tree of sandboxes, and of these neither the source nor any that it was branched from: whoever
takes a seed over can become others of its tree, below it or beside it, and no other sandbox.

    source ── in its zygote's namespace: a block of users that no other tree has
       sibling ── in its source's namespace: what there is in that, but the sibling
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from forkd.errors import Conflict
from forkd.host import files, ownership, userns

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.host.userns import Extent
    from forkd.service.jail import Jail

SPARE = 2
"""How many users a tree gets for each sibling that is asked for: siblings are branched, too."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SiblingUsers:
    """Who the siblings of one sandbox can be.

    Attributes:
        extents: Which users, by number.
        namespace: The namespace in which they become them; None if they stay their source's, since
            there are too many namespaces above it.
        block: The block of a tree; None if it is that of an ancestor.
    """

    extents: tuple[Extent, ...]
    namespace: int | None
    block: Extent | None = None

    def suffices(self, jail: Jail, count: int) -> bool:
        """Whether so many are nobody's, or it is as good as another would be."""
        return self.namespace is None or jail.free_of(self.extents) >= count

    def duplicate(self) -> int | None:
        """Return a descriptor of the namespace, which is the caller's.

        Raises:
            Conflict: The sandbox was deleted meanwhile.
        """
        if self.namespace is None:
            return None
        if self.namespace < 0:
            raise Conflict("the sandbox was deleted while it was being branched")
        return userns.duplicate(self.namespace)

    def close(self, jail: Jail) -> None:
        """Let go of the namespace, which lives on with whoever is in it; idempotent."""
        block, self.block = self.block, None
        jail.give_block_back(block)
        if self.namespace is not None and self.namespace >= 0:
            files.close(self.namespace)
            self.namespace = -1


class Holder(Protocol):
    """What a sandbox holds of the host, as far as users go."""

    directory: Path
    uid: int | None
    siblings: SiblingUsers | None


async def prepare(vmm: Path, jail: Jail, source: Holder, pid: int, count: int) -> None:
    """Have so many users for siblings of a process, which is to be had exclusively.

    Raises:
        CapacityError: There are not so many left.
        HostError: The kernel makes no user namespace for them.
    """
    there = source.siblings
    if source.uid is None or (there is not None and there.suffices(jail, count)):
        return
    made = await make(vmm, jail, pid, source.uid, count)
    release(jail, source)
    source.siblings = made


def take(jail: Jail, source: Holder) -> int | None:
    """Return a user for a sibling; None without a jail.

    Raises:
        CapacityError: All that it could be are somebody's.
    """
    there = source.siblings
    if there is None or there.namespace is None:
        return jail.hold(source.uid)
    return jail.take_of(there.extents)


def share(jail: Jail, lease: Holder, source: Holder) -> None:
    """Make a sibling, of which there is no process yet, its source's user; blocks.

    Raises:
        HostError: The kernel refused.
    """
    before, lease.uid = lease.uid, jail.hold(source.uid)
    jail.give_back(before)
    ownership.give(lease.directory, lease.uid)


def release(jail: Jail, source: Holder) -> None:
    """Let go of what a sandbox has for siblings; idempotent."""
    there, source.siblings = source.siblings, None
    if there is not None:
        there.close(jail)


async def make(vmm: Path, jail: Jail, pid: int, uid: int, count: int) -> SiblingUsers:
    """Make what `count` siblings of a process need to become users of their own.

    Raises:
        CapacityError: There are not so many users left.
        HostError: The kernel makes no user namespace.
    """
    above = await asyncio.to_thread(userns.extents, pid)
    with contextlib.ExitStack() as undo:
        block = None
        part = jail.part_of(above)
        if part is not None:
            block = jail.take_block(SPARE * count, part)
            undo.callback(jail.give_block_back, block)
            above = (block,)
        users = without(uid, above or ())
        namespace = await asyncio.to_thread(userns.make, vmm, pid, uid, users)
        undo.pop_all()
    if namespace is None:
        about = {"pid": pid, "uid": uid}
        log.warning("siblings have their source's user: it was branched too deep", extra=about)
    return SiblingUsers(users, namespace, block)


def without(uid: int, extents: tuple[Extent, ...]) -> tuple[Extent, ...]:
    """Return users but one."""
    left = []
    for first, count in extents:
        if first <= uid < first + count:
            left += [(first, uid - first), (uid + 1, first + count - uid - 1)]
        else:
            left.append((first, count))
    return tuple(extent for extent in left if extent[1] > 0)
