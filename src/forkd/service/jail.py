"""Who the processes of machines are, and what they see of the host.

Each sandbox's process is a user of its own, from a range that is nobody's on this host.  A user of
the range is written down nowhere: the owner of a sandbox's folder is it, so that the next daemon
finds it there.

The upper half of the range is for siblings of branches.  The kernel lets their seeds have whichever
users there are in their namespace (`forkd.service.siblings`), so that half is cut into blocks, of
which no two trees of sandboxes have one in common.

The first number of the range is the group of all jailed processes: it may pass through our folders
to those that are a process's own; no other user may.

A daemon that is not root has no users to give.  Its machines stay its user, in the jail that such a
user can have: see `forkd.service.rootless`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.engine.configs import JailConfig
from forkd.errors import CapacityError, ForkdError, InvalidRequest
from forkd.host import ownership, users
from forkd.limits import SHORT_RETRY_S, UIDS_MIN

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence
    from pathlib import Path

    from forkd.host.userns import Extent

UID_MAX = (1 << 32) - 2
"""The greatest user; one more stands for none."""

THROUGH = 0o710
"""Mode of folders that jailed processes pass through, and do not list."""

BLOCKS_AIM, BLOCK_USERS_MIN, BLOCK_USERS_MAX = 256, 8, 1_024
"""How many blocks are made of half of a range, at least, and how many users are in one."""

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
            raise ValueError("must be FIRST:COUNT, such as 1879048192:4194304")
        first, count = map(int, found.groups())
        if first == 0 or count < UIDS_MIN or first + count - 1 > UID_MAX:
            raise ValueError(f"must be at least {UIDS_MIN} users above 0 and below {UID_MAX + 2}")
        return cls(first, count)

    def __contains__(self, uid: object) -> bool:
        return isinstance(uid, int) and self.first <= uid < self.first + self.count

    @property
    def block(self) -> int:
        """How many users are in a block for siblings."""
        return max(BLOCK_USERS_MIN, min(BLOCK_USERS_MAX, self.count // 2 // BLOCKS_AIM))

    @property
    def blocks(self) -> int:
        """How many blocks there are, at the upper end; none in a range that is too small."""
        return 0 if self.count < UIDS_MIN else self.count // 2 // self.block

    @property
    def siblings_first(self) -> int:
        """The first user of the first block."""
        return self.first + self.count - self.blocks * self.block

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


class Jail:
    """The jail of one host.  Without a range there is none, and everything is as the daemon is.

    Args:
        uids: Whose numbers its inmates have.
        folders: What they see of the host's files, each of which jailed processes pass through.
        read_only: What they see besides, for reading only, and pass through likewise.
        tops: That of them in which they make files.
        rootless: Whether there is one without a range, whose inmates are the daemon's user.
    """

    def __init__(
        self,
        uids: UidRange | None,
        folders: tuple[Path, ...],
        read_only: tuple[Path, ...],
        tops: Path,
        *,
        rootless: bool = False,
    ) -> None:
        self._uids = uids
        self._rootless = rootless and uids is None
        self._folders = folders
        self._read_only = read_only
        self._tops = tops
        self._users: Counter[int] = Counter()
        self._blocks: Counter[int] = Counter()
        self._last = 0 if uids is None else uids.first
        self._last_block = -1
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
        for folder in (*self._folders, *self._read_only):
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
            return JailConfig(None, self._folders, self._read_only, rootless=True)
        if self._uids is None:
            return None
        return JailConfig(self._uids.first, self._folders, self._read_only, uid)

    def take(self) -> int | None:
        """Return a user that is nobody's; None without a jail.

        Raises:
            CapacityError: All are somebody's.
        """
        uids = self._uids
        if uids is None:
            return None
        with self._lock:
            count = uids.siblings_first - uids.first - 1
            for _ in range(count):
                # Round and round, so that a number that was given back rests.
                self._last += 1
                if self._last >= uids.siblings_first:
                    self._last = uids.first + 1
                if self._users[self._last] == 0:
                    return self._count(self._last, 1)
        raise _all_used(f"all {count} users")

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

    def take_block(self, users: int) -> Extent:
        """Return so many users at least, for the siblings of a tree that has no block yet.

        Raises:
            CapacityError: There are not so many in blocks that are nobody's.
        """
        uids = self._uids
        if uids is None or uids.blocks == 0:
            raise _all_used("all blocks")
        wanted = -(-users // uids.block)
        with self._lock:
            for _ in range(uids.blocks):
                self._last_block += 1
                if self._last_block + wanted > uids.blocks:
                    self._last_block = 0
                run = range(self._last_block, self._last_block + wanted)
                if wanted <= uids.blocks and not any(self._blocks[each] for each in run):
                    self._blocks.update(run)
                    self._last_block = run[-1]
                    return uids.siblings_first + run[0] * uids.block, wanted * uids.block
        raise _all_used(f"all {uids.blocks} blocks of {uids.block} users for siblings")

    def give_block_back(self, block: Extent | None) -> None:
        """Undo one `take_block`; those of its users that are somebody's keep it from others."""
        if block is not None and self._uids is not None:
            first, count = block
            with self._lock:
                for uid in range(first, first + count, self._uids.block):
                    self._note_block(uid, -1)

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
        self._users[uid] += more
        if self._users[uid] <= 0:
            del self._users[uid]
        self._note_block(uid, more)
        return uid

    def _note_block(self, uid: int, more: int) -> None:
        uids = self._uids
        if uids is None or uid not in uids or uid < uids.siblings_first:
            return
        block = (uid - uids.siblings_first) // uids.block
        self._blocks[block] += more
        if self._blocks[block] <= 0:
            del self._blocks[block]

    def owner(self, folder: Path) -> int | None:
        """Return the user that a folder was given to; None if it is ours, or gone.

        Sandboxes that were jailed stay so, whether there is a jail for new ones or not.
        """
        try:
            uid = ownership.owner(folder)
        except ForkdError:  # there is nothing that anybody could own
            return None
        return None if uid == users.user_id() else uid


def _all_used(what: str) -> CapacityError:
    return CapacityError(
        f"{what} of FORKD_UID_RANGE are used; give it more", retry_after_s=SHORT_RETRY_S
    )
