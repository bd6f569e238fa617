"""Who the processes of machines are, and what they see of the host.

Each sandbox's process is a user of its own, from a range that is nobody's on this host.  A user of
the range is written down nowhere: the owner of a sandbox's folder is it, so that the next daemon
finds it there.

A zygote is a user of its own, too, in a user namespace with the users that its children are.  The
kernel lets it have whichever there are, so both halves of the range are cut into slots, and each
zygote that reads a base has a run of them that no other has: its part.  A quarter of the part is
for its own children; of the rest each zygote that is derived from it gets a slot, in a namespace
below.  One that is derived from a derived one shares that one's part.  The first slot is of
processes that no zygote has forked.

The upper half of the range, and so of a part, is for siblings of branches.  Their seeds, too, can
have whichever users there are in their namespace (`forkd.service.siblings`), so slots are cut into
blocks there, of which no two trees of sandboxes have one in common.

    forks     │ slot 0 │ slot 1 │ slot 2 │ slot 3 │ …     part: slots 1 to 4, of which 1 is its own
    siblings  │ blocks │ blocks │ blocks │ blocks │ …     derived from it: slots 2, 3 and 4

The first number of the range is the group of all jailed processes: it may pass through our folders
to those that are a process's own; no other user may.  The second is the group of zygotes, which may
have their children be born in cgroups.  Neither is anybody's user.

A daemon that is not root has no users to give.  Its machines stay its user, in the jail that such a
user can have: see `forkd.service.rootless`.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import logging
import re
import threading
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forkd.cgroups.tree import ZYGOTES
from forkd.engine.configs import CgroupsConfig, JailConfig
from forkd.errors import CapacityError, ForkdError, InvalidRequest
from forkd.host import ownership, users
from forkd.limits import SHORT_RETRY_S, UIDS_MIN

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Container, Iterator, Sequence
    from pathlib import Path

    from forkd.host.userns import Extent

UID_MAX = (1 << 32) - 2
"""The greatest user; one more stands for none."""

THROUGH = 0o710
"""Mode of folders that jailed processes pass through, and do not list."""

SLOTS_AIM, SLOT_USERS_MIN, SLOT_USERS_MAX = 512, 256, 32_768
"""How many slots are made of a half of a range, at least if it is no small one, and how many users
are in one: at most what the largest fork takes, three times over."""

SLOT_BLOCKS = 128
"""How many blocks are in a slot of the upper half."""

TREE_BLOCKS = 4
"""How many blocks a tree gets at most if it asks for fewer: it may be branched again."""

PART_OF_FREE = 32
"""A zygote gets this part of the slots that are nobody's, and a tree of the blocks, so that there
are some for the next."""

OWN_OF_PART = 4
"""This part of them is for its own children; the others are for zygotes derived from it."""

TOPS = 0o1730
"""Mode of the folder in which they make files without names."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UidRange:
    """Users and groups, by number, that are the jail's.

    Attributes:
        first: The first; as a group, that of all jailed processes.
        count: How many.
    """

    first: int
    count: int

    @classmethod
    def parse(cls, text: str) -> UidRange:
        """Return what `FIRST:COUNT` says.

        Raises:
            ValueError: It makes no sense.
        """
        found = re.fullmatch(r"(\d{1,10}):(\d{1,10})", text)
        if found is None:
            raise ValueError("must be FIRST:COUNT, such as 1879048192:262144000")
        first, count = map(int, found.groups())
        if first == 0 or count < UIDS_MIN or first + count - 1 > UID_MAX:
            raise ValueError(f"must be at least {UIDS_MIN} users above 0 and below {UID_MAX + 2}")
        return cls(first, count)

    def __contains__(self, uid: object) -> bool:
        return isinstance(uid, int) and self.first <= uid < self.first + self.count

    @property
    def zygotes(self) -> int:
        """As a group, that of zygotes, and as a user nobody: who may have children in cgroups."""
        return self.first + 1

    @property
    def forks_first(self) -> int:
        """The first user that anybody is."""
        return self.first + 2

    @property
    def block(self) -> int:
        """How many users are in a block for siblings."""
        wanted = max(SLOT_USERS_MIN, min(SLOT_USERS_MAX, self.count // 2 // SLOTS_AIM))
        return wanted // SLOT_BLOCKS

    @property
    def slot(self) -> int:
        """How many users are in a slot of each half."""
        return self.block * SLOT_BLOCKS

    @property
    def slots(self) -> int:
        """How many slots there are in each half."""
        return self.count // 2 // self.slot

    @property
    def siblings_first(self) -> int:
        """The first user of the upper half."""
        return self.first + self.count - self.slots * self.slot

    def slot_of(self, uid: int) -> int:
        """Return in which slot a user of the range is."""
        first = self.first if uid < self.siblings_first else self.siblings_first
        return (uid - first) // self.slot

    def in_slots(self, first: int, count: int) -> tuple[Extent, Extent]:
        """Return the users of some slots: for forks, and for siblings."""
        start, users = first * self.slot, count * self.slot
        return (self.first + start, users), (self.siblings_first + start, users)

    def overlaps(self, first: int, count: int) -> bool:
        """Whether it has a number of another range."""
        return first < self.first + self.count and self.first < first + count

    def check(self, field: str = "uid_range") -> None:
        """Make sure that nobody on this host is in the range, which is that setting's.

        Raises:
            InvalidRequest: Somebody is; it says who.
            HostError: The kernel does not let us look.
        """
        for name, first, count in ownership.taken():
            if self.overlaps(first, count):
                raise InvalidRequest(
                    f"FORKD_{field.upper()} {self.first}:{self.count} overlaps {name}; choose "
                    "numbers that are nobody's on this host",
                    field=field,
                )


@dataclass(frozen=True, slots=True)
class Part:
    """The slots of a zygote.

    Attributes:
        first: The first of them.
        count: How many.
        own: How many of these, from the first on, are of its children.
        uid: The user that it is.
    """

    first: int
    count: int
    own: int
    uid: int

    @property
    def slots(self) -> range:
        """Which they are."""
        return range(self.first, self.first + self.count)


_COMMON = Part(0, 1, 1, 0)
"""That of processes which no zygote forks; nobody is the user in it that is a zygote's."""


def _own(count: int) -> int:
    return max(1, count // OWN_OF_PART)


def _part_of(uids: UidRange, extents: Sequence[Extent]) -> Part | None:
    (first, users), *_ = extents
    slot, count = uids.slot_of(first), users // uids.slot
    if tuple(extents) != uids.in_slots(slot, count):
        return None
    return Part(slot, count, _own(count), first)


class Jail:
    """The jail of one host.  Without a range there is none, and everything is as the daemon is.

    Args:
        uids: Whose numbers its inmates have.
        folders: What they see of the host's files, each of which jailed processes pass through.
        tops: That of them in which they make files.
        rootless: Whether there is one without a range, whose inmates are the daemon's user.
        cgroups: The group below which sandboxes have theirs; None if they have none.
    """

    def __init__(
        self,
        uids: UidRange | None,
        folders: tuple[Path, ...],
        tops: Path,
        *,
        rootless: bool = False,
        cgroups: Path | None = None,
    ) -> None:
        self._uids = uids
        self._rootless = rootless and uids is None
        self._folders = folders
        self._tops = tops
        self._cgroups = cgroups
        self._users: Counter[int] = Counter()
        self._blocks: Counter[int] = Counter()
        self._slots: Counter[int] = Counter()
        self._parts: set[Part] = set()
        self._last: dict[int, int] = {}
        self._last_block = self._last_slot = -1
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether there is one."""
        return self._uids is not None or self._rootless

    def prepare(self) -> None:
        """Let inmates pass through the folders.

        Raises:
            InvalidRequest: Somebody of this host is in the range of users.
            HostError: The kernel refused.
        """
        if self._rootless:
            log.info("machines are jailed, all as the user of the daemon")
            return
        if self._uids is None:
            log.warning("machines are not jailed: whoever takes one over is the daemon's user")
            return
        self._uids.check()
        for folder in self._folders:
            mode = TOPS if folder == self._tops else THROUGH
            ownership.share(folder, self._uids.first, mode)
        self._sweep(self._uids)

    def sweep(self, uid: int | None) -> None:
        """Remove what a machine that has ended has left under a name among tops, which have none.

        Only one that was taken over leaves anything there.

        Raises:
            HostError: The kernel refused.
        """
        if self._uids is not None and uid is not None:
            self._sweep((uid,))

    def _sweep(self, users: Container[int]) -> None:
        if removed := ownership.remove_of(self._tops, users):
            log.warning("a machine left files among tops", extra={"files": len(removed)})

    def let_through(self, folder: Path) -> None:
        """Let inmates pass through another folder.

        Raises:
            HostError: The kernel refused.
        """
        if self._uids is not None:
            ownership.share(folder, self._uids.first, THROUGH)

    def config(self, uid: int | None = None) -> JailConfig | None:
        """Return what a process is told of its jail; None without one."""
        if self._rootless:
            return JailConfig(None, self._folders, rootless=True)
        if self._uids is None:
            return None
        return JailConfig(self._uids.first, self._folders, uid)

    def zygote_config(self, part: Part | None) -> JailConfig | None:
        """Return what a zygote is told of its jail, which has a part; None without one."""
        uids, path = self._uids, self._cgroups
        config = self.config(None if part is None else part.uid)
        if config is None:
            return None
        cgroups = None if path is None else CgroupsConfig(path)
        if uids is None or part is None:
            return replace(config, cgroups=cgroups)
        if path is not None:
            cgroups = CgroupsConfig(path, uids.zygotes, path / ZYGOTES)
        return replace(config, users=self.users_of(part), cgroups=cgroups)

    def take_part(self) -> Part | None:
        """Return a part that no zygote has, and in which nobody is; None without users to give.

        Raises:
            CapacityError: There is none.
        """
        uids = self._uids
        if uids is None:
            return None
        with self._lock:
            held = {slot for part in self._parts for slot in part.slots}
            free = [each for each in range(1, uids.slots) if self._is_free(each, held)]
            run = _run_after(self._last_slot, free, max(1, len(free) // PART_OF_FREE))
            if not run:
                raise _all_used(f"all {uids.slots - 1} slots of {uids.slot} users for zygotes")
            self._last_slot = run[-1]
            own = _own(len(run))
            part = Part(run[0], len(run), own, self._take(uids, run[0], own))
            self._parts.add(part)
            return part

    def derive_part(self, above: Part) -> Part:
        """Return a part for a zygote that is derived from one: of that one's, or the same.

        Raises:
            CapacityError: Somebody is in all that there are.
        """
        uids = self._uids
        if uids is None or above not in self._parts:
            self.hold(above.uid)
            return above
        with self._lock:
            for slot in above.slots[above.own :]:
                if self._is_free(slot, ()):
                    return Part(slot, 1, 1, self._take(uids, slot, 1))
        raise _all_used(f"all {above.count - above.own} slots for zygotes derived from this one")

    def give_part_back(self, part: Part | None) -> None:
        """Undo one `take_part` or `derive_part`; who is in it keeps it from others."""
        if part is not None:
            self.give_back(part.uid)
            with self._lock:
                if self._users[part.uid] == 0:
                    self._parts.discard(part)

    def users_of(self, part: Part) -> tuple[Extent, ...]:
        """Return which users a part has."""
        return () if self._uids is None else self._uids.in_slots(part.first, part.count)

    def part_of(self, extents: Sequence[Extent] | None) -> Part | None:
        """Return the part whose users these are; None if they are no zygote's and its children's.

        Those of the host are the part of processes that no zygote has forked.
        """
        if extents is None:
            return _COMMON
        return None if self._uids is None else _part_of(self._uids, extents)

    def _is_free(self, slot: int, held: Container[int]) -> bool:
        return self._slots[slot] == 0 and slot not in held

    def take(self, part: Part | None = None) -> int | None:
        """Return a user that is nobody's, for a child of a zygote; None without a jail.

        Args:
            part: The zygote's; None for a process that no zygote forks.

        Raises:
            CapacityError: All are somebody's.
        """
        uids = self._uids
        if uids is None:
            return None
        with self._lock:
            of = part or _COMMON
            return self._take(uids, of.first, of.own)

    def _take(self, uids: UidRange, slot: int, slots: int) -> int:
        (first, count), _ = uids.in_slots(slot, slots)
        first, end = max(first, uids.forks_first), first + count
        last = self._last.get(slot, first - 1)
        # Round and round, so that a number that was given back rests.
        for uid in itertools.chain(range(last + 1, end), range(first, min(last + 1, end))):
            if self._users[uid] == 0:
                self._last[slot] = uid
                return self._count(uid, 1)
        raise _all_used(f"all {end - first} users")

    def take_of(self, extents: Sequence[Extent]) -> int:
        """Return a user of some that is nobody's.

        Raises:
            CapacityError: All are somebody's.
        """
        with self._lock:
            for first, count in extents:
                for uid in range(first, first + count):
                    if self._users[uid] == 0:
                        return self._count(uid, 1)
        raise _all_used("all users that the siblings of this sandbox may be")

    def free_of(self, extents: Sequence[Extent]) -> int:
        """Return how many users of some are nobody's."""
        with self._lock:
            used = sum(
                first <= uid < first + count for uid in self._users for first, count in extents
            )
        return sum(count for _, count in extents) - used

    def take_block(self, users: int, part: Part) -> Extent:
        """Return so many users at least, for the siblings of a tree that has no block yet.

        Args:
            users: How many.
            part: That of the zygote of which the tree was forked.

        Raises:
            CapacityError: There are not so many in blocks that are nobody's.
        """
        uids = self._uids
        if uids is None:
            raise _all_used("all blocks")
        least = -(-users // uids.block)
        first, count = part.first * SLOT_BLOCKS, part.own * SLOT_BLOCKS
        with self._lock:
            free = [each for each in range(first, first + count) if self._blocks[each] == 0]
            wanted = max(least, min(TREE_BLOCKS, len(free) // PART_OF_FREE))
            run = _run_after(self._last_block, free, wanted)
            if len(run) < least:
                raise _all_used(f"all {count} blocks of {uids.block} users for siblings")
            for each in run:
                self._note_block(each, 1)
            self._last_block = run[-1]
            return uids.siblings_first + run[0] * uids.block, len(run) * uids.block

    def give_block_back(self, block: Extent | None) -> None:
        """Undo one `take_block`; those of its users that are somebody's keep it from others."""
        if block is not None and self._uids is not None:
            first, count = block
            start = (first - self._uids.siblings_first) // self._uids.block
            with self._lock:
                for each in range(start, start + count // self._uids.block):
                    self._note_block(each, -1)

    @contextlib.contextmanager
    def cell(self) -> Iterator[JailConfig | None]:
        """Give a process a user of its own for the block; None without a jail.

        Raises:
            CapacityError: As `take`.
        """
        uid = self.take()
        try:
            yield self.config(uid)
        finally:
            self.give_back(uid)

    def hold(self, uid: int | None) -> int | None:
        """Return a user that somebody has, for somebody else besides."""
        if uid is not None:
            with self._lock:
                self._count(uid, 1)
        return uid

    def give_back(self, uid: int | None) -> None:
        """Undo one `take` or `hold`."""
        if uid is None:
            return
        with self._lock:
            self._count(uid, -1)

    def _count(self, uid: int, more: int) -> int:
        _note(self._users, uid, more)
        uids = self._uids
        if uids is not None and uid in uids:
            if uid < uids.siblings_first:
                _note(self._slots, uids.slot_of(uid), more)
            else:
                self._note_block((uid - uids.siblings_first) // uids.block, more)
        return uid

    def _note_block(self, block: int, more: int) -> None:
        _note(self._blocks, block, more)
        _note(self._slots, block // SLOT_BLOCKS, more)

    def owner(self, folder: Path) -> int | None:
        """Return the user that a folder was given to; None if it is ours, or gone.

        Sandboxes that were jailed stay so, whether there is a jail for new ones or not.
        """
        try:
            uid = ownership.owner(folder)
        except ForkdError:  # there is nothing that anybody could own
            return None
        return None if uid == users.user_id() else uid


@contextlib.asynccontextmanager
async def lent(folder: Path, uid: int | None) -> AsyncGenerator[None, None]:
    """Have a folder be a jailed process's for the block, and ours again if that ends well.

    Raises:
        HostError: The kernel refused, or the process has left something there that is no file.
    """
    await asyncio.to_thread(ownership.give, folder, uid)
    yield
    if uid is not None:
        await asyncio.to_thread(ownership.take_back, folder)


def _note(counts: Counter[int], which: int, more: int) -> None:
    counts[which] += more
    if counts[which] <= 0:
        del counts[which]


def _run_after(last: int, free: Sequence[int], longest: int) -> Sequence[int]:
    """Return free numbers that follow on each other, as many as wanted or else the most.

    Of those after `last` if there are so many: so one that was given back rests.
    """
    start = bisect.bisect_right(free, last)
    return max(_run(free[start:], longest), _run(free, longest), key=len)


def _run(free: Sequence[int], longest: int) -> Sequence[int]:
    """Return the first numbers that follow on each other, as many as wanted, or else the most."""
    best: Sequence[int] = ()
    start = 0
    for end in range(1, len(free) + 1):
        if end == len(free) or free[end] != free[end - 1] + 1 or end - start == longest:
            best = max(best, free[start:end], key=len)
            if len(best) == longest:
                return best
            start = end
    return best


def _all_used(what: str) -> CapacityError:
    return CapacityError(
        f"{what} of FORKD_UID_RANGE are used; give it more", retry_after_s=SHORT_RETRY_S
    )
