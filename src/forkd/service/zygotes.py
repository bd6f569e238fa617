"""One zygote per snapshot in use.

A zygote is started by the first fork of its snapshot and kept, because starting it
means reading and hashing the snapshot.  It is stopped when nobody has forked from it
for a while, when its snapshot is deleted, or when there are as many as may be and another
snapshot is forked: the one that was idle longest goes then.  Its children do not need it.

The zygote of a delta is derived from its parent's: a fork of it, with the delta written
over its memory.  While it lives its parent's stays, so that the pages of every link are
in memory once, however many snapshots depend on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from forkd.engine.configs import DeriveConfig, DeriveUsers, ZygoteConfig
from forkd.engine.control import Control
from forkd.engine.process import ZYGOTE_SOCKET, end, end_listener, listener, start_zygote
from forkd.engine.watch import Watch
from forkd.errors import ChainError, Conflict, EngineExited, ForkdError, HostError, StoreError
from forkd.host import files, ownership, userns
from forkd.limits import SHORT_RETRY_S
from forkd.model.tenant import Amounts
from forkd.service import folders
from forkd.service.chain_files import load_chain, open_all
from forkd.service.places import full
from forkd.service.supervision import TaskKind, to_end

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator
    from pathlib import Path
    from types import TracebackType

    from forkd.host.spawn import Process
    from forkd.model.caller import Tenant
    from forkd.model.ids import Tag
    from forkd.service.chain_files import Chain, LinkFiles
    from forkd.service.jail import Jail, Part
    from forkd.service.ledger import Ledger
    from forkd.service.settings import HostSettings
    from forkd.service.supervision import Supervisor
    from forkd.store.snapshots import SnapshotStore

REQUESTS_AT_ONCE_MAX = 32
"""Most requests that one zygote serves at once: half of the connections that it accepts."""

USERS_FILE = "users"
"""What the user namespace of a derived zygote is called in its folder, where there is no file."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Zygote:
    """A zygote that listens.

    Attributes:
        process: It.
        directory: Its folder, which is its user's.
        watch: Tells that it has ended.
        part: The users of it and of its children; None if they are the daemon's.
    """

    process: Process
    directory: Path
    watch: Watch
    tenant: Tenant
    part: Part | None

    @property
    def key(self) -> str:
        """Under what the ledger counts it."""
        return _key(self.directory)

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.directory / ZYGOTE_SOCKET

    async def end(self) -> None:
        """Stop it and remove its folder; it may have ended already."""
        self.watch.close()
        try:
            await end(self.process, self._stop)
        finally:
            self.process.close()
            await asyncio.to_thread(files.remove_from_under, self.directory)

    async def _stop(self) -> None:
        async with await Control.connect(self.socket) as control:
            await control.stop()


@dataclass(frozen=True, slots=True)
class Accounts:
    """For whom zygotes count: whose their snapshots are, whoever forks from them.

    Attributes:
        ledger: What tenants may have.
        tenant_of: Returns whose a snapshot is.
    """

    ledger: Ledger
    tenant_of: Callable[[Tag], Tenant]

    def charge(self, key: str, tag: Tag, memory_bytes: int) -> Tenant:
        """Count the memory of a snapshot's zygote; return for whom.

        Raises:
            QuotaExceeded: The tenant may not have so much.
        """
        tenant = self.tenant_of(tag)
        self.ledger.recount(key, tenant, Amounts(memory_mib=-(-memory_bytes >> 20)))
        return tenant


@dataclass(slots=True)
class _Entry:
    """What is known of one snapshot's zygote; `lock` is held while it starts or ends.

    Attributes:
        lock: A parent's may be awaited while a child's is held, never the other way round.
        zygote: It; None while there is none.
        parent: What it was derived from, which it keeps.
        users: How many forks or derivations use it now.
        derived: How many zygotes derived from it live.
        idle: Stops it, unless somebody comes.
        requests: Bounds how many connections it has at once; more of them wait.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    zygote: Zygote | None = None
    parent: tuple[Tag, _Entry] | None = None
    users: int = 0
    derived: int = 0
    idle: asyncio.TimerHandle | None = None
    requests: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(REQUESTS_AT_ONCE_MAX)
    )


class ZygotePool:
    """Starts zygotes when they are needed and stops them when they are not.

    On leaving its `async with` block all of them have ended; their children live on.
    """

    def __init__(
        self,
        settings: HostSettings,
        store: SnapshotStore,
        tasks: Supervisor,
        jail: Jail,
        accounts: Accounts,
    ) -> None:
        self._settings = settings
        self._jail = jail
        self._store = store
        self._tasks = tasks
        self._accounts = accounts
        accounts.ledger.make_room["memory_mib"] = self._retire
        self._entries: dict[Tag, _Entry] = {}
        self._stray: list[tuple[Tag, Zygote]] = []  # lost while the service was stopping
        self._held = 0  # that start, live or end
        self._ending = 0
        self._freed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await to_end(self._stop_all())

    def in_use(self, tag: Tag) -> bool:
        """Whether somebody forks from `tag` now."""
        entry = self._entries.get(tag)
        return entry is not None and entry.users > 0

    def part(self, tag: Tag) -> Part | None:
        """Return the users of a snapshot's zygote; None for the daemon's, or without one."""
        entry = self._entries.get(tag)
        return None if entry is None or entry.zygote is None else entry.zygote.part

    def pids(self) -> tuple[int, ...]:
        """Return the processes of the zygotes that live."""
        entries = self._entries.values()
        return tuple(each.zygote.process.pid for each in entries if each.zygote is not None)

    @contextlib.asynccontextmanager
    async def lease(self, tag: Tag) -> AsyncGenerator[Control, None]:
        """Give a connection to a snapshot's zygote, started if need be, for one fork.

        Waits while the zygote serves `REQUESTS_AT_ONCE_MAX` others.

        Raises:
            ChainError: A link does not load; `context["link"]` is its tag.
            CapacityError: It would be one zygote too many, and all others are used.
            QuotaExceeded: Whose the snapshot is may not have as much memory as its zygote holds.
            ForkdError: As `forkd.service.chain_files.load_chain`, and as
                `forkd.engine.process.start_zygote`.
        """
        entry = self._entry(tag)

        def load() -> Chain:
            return load_chain(self._store, tag)

        async with (
            self._used(tag, entry),
            entry.requests,
            await self._connect(tag, entry, load) as control,
        ):
            yield control

    async def stop(self, tag: Tag) -> None:
        """Stop a snapshot's zygote, if it has one."""
        entry = self._entries.pop(tag, None)
        if entry is not None:
            await self._end(tag, entry)

    async def stop_or_log(self, tag: Tag) -> None:
        """Stop a snapshot's zygote; one that does not end is logged, and forked from no more."""
        try:
            await self.stop(tag)
        except ForkdError as error:  # the next daemon ends it
            log.warning("zygote not stopped", extra={"tag": tag, "error": str(error)})

    async def _stop_all(self) -> None:
        while self._entries or self._stray:
            try:
                if self._entries:
                    tag, entry = self._entries.popitem()
                    await self._end(tag, entry)
                else:
                    tag, zygote = self._stray.pop()
                    await self._finish(zygote)
            except ForkdError as error:
                log.warning("zygote not stopped", extra={"tag": tag, "error": str(error)})

    def _entry(self, tag: Tag) -> _Entry:
        return self._entries.setdefault(tag, _Entry())

    @contextlib.asynccontextmanager
    async def _used(self, tag: Tag, entry: _Entry) -> AsyncGenerator[None, None]:
        _keep(entry)
        entry.users += 1
        try:
            yield
        finally:
            entry.users -= 1
            self._let_idle(tag, entry)

    def _let_idle(self, tag: Tag, entry: _Entry) -> None:
        """Have a zygote that nobody uses any more stopped after a while."""
        if entry.users or entry.derived or entry.zygote is None:
            return
        _keep(entry)
        loop = asyncio.get_running_loop()
        entry.idle = loop.call_later(self._settings.zygote_idle_s, self._expire, tag, entry)

    async def _connect(self, tag: Tag, entry: _Entry, load: Callable[[], Chain]) -> Control:
        async with entry.lock:
            connected = await self._connect_to_live(tag, entry)
            if connected is not None:
                return connected
            chain = await asyncio.to_thread(load)
            return await self._start(chain, entry)

    async def _connect_to_live(self, tag: Tag, entry: _Entry) -> Control | None:
        if entry.zygote is None:
            return None
        try:
            return await Control.connect(entry.zygote.socket)
        except EngineExited as error:
            # Its watch has not told us yet.
            self._lost(tag, entry, entry.zygote.directory, str(error))
            return None

    async def _start(self, chain: Chain, entry: _Entry) -> Control:
        """Start the zygote of a chain's head, whose lock is held, and connect to it."""
        head = chain[-1]
        await self._make_room()
        try:
            zygote = await self._started(chain, entry)
        except BaseException:
            self._free()
            raise
        entry.zygote = zygote
        log.info("zygote started", extra={"tag": head.tag, "pid": zygote.process.pid})
        return await Control.connect(zygote.socket)

    async def _make_room(self) -> None:
        """Have a place for one more zygote, if need be that of the one that was idle longest.

        Raises:
            CapacityError: All are used, or others depend on them.
        """
        limit = self._settings.zygotes_max
        while self._held >= limit:
            if self._held - self._ending >= limit and not self._retire():
                raise full("zygotes", limit, self._held, SHORT_RETRY_S)
            self._freed.clear()
            await self._freed.wait()
        self._held += 1

    def _retire(self, tenant: Tenant | None = None) -> bool:
        """Have the zygote end that was idle longest, of a tenant; return whether there was one."""
        idle = (
            (entry.idle.when(), tag)
            for tag, entry in self._entries.items()
            if entry.idle is not None and (tenant is None or _is_of(entry, tenant))
        )
        _, tag = min(idle, default=(0.0, None))
        if tag is None:
            return False
        entry = self._entries[tag]
        _keep(entry)
        self._expire(tag, entry)
        return True

    def _free(self) -> None:
        """Have a place free again."""
        self._held -= 1
        self._freed.set()

    async def _started(self, chain: Chain, entry: _Entry) -> Zygote:
        head = chain[-1]
        directory = self._settings.zygotes_dir / secrets.token_hex(8)
        memory_bytes = await asyncio.to_thread(files.size_bytes, head.memory) or 0
        tenant = self._accounts.charge(_key(directory), head.tag, memory_bytes)
        part = None
        try:
            await folders.make(directory)
            if len(chain) == 1:
                part = self._jail.take_part()
                process = await _loaded(self._settings, self._jail, directory, part, head)
            else:
                process, part = await self._derive(directory, chain, entry)
            watch = await self._watch(head.tag, entry, directory, process)
        except BaseException:
            self._jail.give_part_back(part)
            self._accounts.ledger.release(_key(directory))
            await to_end(asyncio.to_thread(files.remove_from_under, directory))
            raise
        return Zygote(process, directory, watch, tenant, part)

    async def _derive(
        self, directory: Path, chain: Chain, entry: _Entry
    ) -> tuple[Process, Part | None]:
        """Derive the head's zygote from its parent's, started if need be."""
        *above, head = chain
        tag = above[-1].tag
        parent = self._entry(tag)
        async with self._used(tag, parent):
            with contextlib.ExitStack() as opened, contextlib.ExitStack() as undo:
                async with await self._connect(tag, parent, lambda: tuple(above)) as control:
                    part, users = await _below(
                        self._settings.vmm, self._jail, parent.zygote, opened, undo
                    )
                    await asyncio.to_thread(_give, directory, part)
                    with _naming(head.tag):
                        process = await derived(control, directory, head, users)
                undo.pop_all()
            parent.derived += 1
            entry.parent = (tag, parent)
        return process, part

    async def _watch(self, tag: Tag, entry: _Entry, directory: Path, process: Process) -> Watch:
        try:
            return await Watch.open(
                directory / ZYGOTE_SOCKET, lambda reason: self._lost(tag, entry, directory, reason)
            )
        except BaseException:
            self._forget_parent(entry)
            with process:
                await end(process)
            raise

    def _forget_parent(self, entry: _Entry) -> None:
        """Let go of the zygote that an entry's was derived from."""
        if entry.parent is not None:
            (tag, parent), entry.parent = entry.parent, None
            parent.derived -= 1
            self._let_idle(tag, parent)

    def _lost(self, tag: Tag, entry: _Entry, directory: Path, reason: str) -> None:
        """Forget the zygote in `directory`, which ended; the next fork starts another."""
        zygote = entry.zygote
        if zygote is None or zygote.directory != directory:
            return  # it was forgotten before
        self._take_out(entry)
        log.warning("zygote ended", extra={"tag": tag, "reason": reason})
        self._stop_in_background(tag, zygote)

    def _expire(self, tag: Tag, entry: _Entry) -> None:
        entry.idle = None
        zygote = self._take_out(entry)
        if zygote is not None:
            self._stop_in_background(tag, zygote)

    def _take_out(self, entry: _Entry) -> Zygote | None:
        """Return the zygote of an entry, which is to end and counts for nobody any more."""
        zygote, entry.zygote = entry.zygote, None
        if zygote is not None:
            self._accounts.ledger.release(zygote.key)
        self._forget_parent(entry)
        return zygote

    def _stop_in_background(self, tag: Tag, zygote: Zygote) -> None:
        self._ending += 1
        try:
            self._tasks.run(TaskKind.STOP_ZYGOTE, self._finish(zygote), f"of {tag}")
        except Conflict:  # the service is stopping, and then ends what is left
            self._stray.append((tag, zygote))

    async def _finish(self, zygote: Zygote) -> None:
        """End a zygote that counts as ending."""
        try:
            await zygote.end()
        finally:
            self._jail.give_part_back(zygote.part)
            self._ending -= 1
            self._free()

    async def _end(self, tag: Tag, entry: _Entry) -> None:
        async with entry.lock:
            _keep(entry)
            zygote = self._take_out(entry)
            if zygote is not None:
                self._ending += 1
                await self._finish(zygote)
                log.info("zygote stopped", extra={"tag": tag})


def _key(directory: Path) -> str:
    """Return under what the ledger counts the zygote in a folder."""
    return f"zygote:{directory.name}"


def _is_of(entry: _Entry, tenant: Tenant) -> bool:
    """Whether a tenant has the zygote of an entry."""
    return entry.zygote is not None and entry.zygote.tenant == tenant


def _keep(entry: _Entry) -> None:
    """Do not stop a zygote for being idle."""
    if entry.idle is not None:
        entry.idle.cancel()
        entry.idle = None


@contextlib.contextmanager
def _naming(link: Tag) -> Generator[None, None, None]:
    """Say of which snapshot a file is that does not load."""
    try:
        yield
    except StoreError as error:
        message = f"snapshot {link} does not load: {error}"
        raise ChainError(message, **{**error.context, "link": link}) from error


async def _loaded(
    settings: HostSettings, jail: Jail, directory: Path, part: Part | None, base: LinkFiles
) -> Process:
    """Start the zygote of a base, which listens in `directory`."""
    await asyncio.to_thread(_give, directory, part)
    told = jail.zygote_config(part)
    config = ZygoteConfig(directory, base.state, (base.memory,), base.disk, told)
    with _naming(base.tag):
        return await start_zygote(
            settings.vmm, config, filtered=settings.filtered, own_cores=settings.own_cores
        )


def _give(directory: Path, part: Part | None) -> None:
    """Have a folder be a zygote's; blocks."""
    ownership.give(directory, None if part is None else part.uid)


@dataclass(frozen=True, slots=True)
class DerivedUsers:
    """The users of a zygote that is derived from another.

    Attributes:
        namespace: A descriptor of their user namespace.
        uid: The user that it becomes there.
    """

    namespace: int
    uid: int


async def _below(
    vmm: Path,
    jail: Jail,
    parent: Zygote | None,
    opened: contextlib.ExitStack,
    undo: contextlib.ExitStack,
) -> tuple[Part | None, DerivedUsers | None]:
    """Return the users of a zygote that is to be derived, and their namespace if it has one.

    Raises:
        CapacityError: There are none left.
        HostError: The kernel makes no user namespace for them.
    """
    if parent is None or parent.part is None:
        return None, None
    pid, above = parent.process.pid, parent.part
    part = jail.derive_part(above)
    undo.callback(jail.give_part_back, part)
    if part.uid == above.uid:
        return part, None
    made = await asyncio.to_thread(userns.make, vmm, pid, above.uid, jail.users_of(part))
    if made is None:
        raise HostError("there are too many user namespaces around the daemon for one more")
    opened.callback(files.close, made)
    return part, DerivedUsers(made, part.uid)


async def derived(
    control: Control, directory: Path, delta: LinkFiles, users: DerivedUsers | None = None
) -> Process:
    """Have a zygote derive another, which listens in `directory`; returns its process.

    Args:
        control: The zygote.
        directory: Which is the new one's.
        delta: What it holds over the memory of the zygote.
        users: Its own; None for those of the zygote.

    Raises:
        StoreError: A file of the delta is damaged, too new, or for another machine.
        EngineError: The zygote ended, or did not answer in time.
    """
    name = directory / USERS_FILE
    told = None if users is None else DeriveUsers(name, users.uid)
    config = DeriveConfig(directory, delta.state, delta.memory, delta.disk, told)
    try:
        with contextlib.ExitStack() as opened:
            handed = {} if users is None else {str(name): users.namespace}
            handed |= await asyncio.to_thread(open_all, delta.paths, opened)
            await control.hand(handed)
        # The zygote derives whether we wait or not, so we wait.
        await to_end(control.derive(config))
        return await listener(directory / ZYGOTE_SOCKET)
    except BaseException:
        await to_end(end_listener(directory / ZYGOTE_SOCKET))
        raise
