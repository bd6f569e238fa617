"""One zygote per snapshot in use.

A zygote is started by the first fork of its snapshot and kept, because starting it
means reading and hashing the snapshot.  It is stopped when nobody has forked from it
for a while, or when its snapshot is deleted.  Its children do not need it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forkd.engine.configs import ZygoteConfig
from forkd.engine.control import Control, Watch
from forkd.engine.process import ZYGOTE_SOCKET, end, start_zygote
from forkd.errors import Conflict, EngineExited, ForkdError
from forkd.host import files

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from forkd.engine.configs import DiskConfig
    from forkd.host.spawn import Process
    from forkd.model.ids import Tag
    from forkd.service.settings import HostSettings
    from forkd.service.tasks import TaskOwner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ZygoteFiles:
    """What a zygote holds: the state, the memory's chain (base first), the disk."""

    state: Path
    memory: tuple[Path, ...]
    disk: DiskConfig | None


@dataclass(frozen=True, slots=True)
class Zygote:
    """A zygote that listens."""

    process: Process
    directory: Path
    watch: Watch

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.directory / ZYGOTE_SOCKET

    async def end(self) -> None:
        """Stop it and remove its folder; it may have ended already."""
        self.watch.close()
        try:
            await end(self.process, self._ask)
        finally:
            self.process.close()
            await asyncio.to_thread(files.remove_tree, self.directory)

    async def _ask(self) -> None:
        async with await Control.connect(self.socket) as control:
            await control.request("stop")


@dataclass(slots=True)
class _Entry:
    """What is known of one snapshot's zygote; `lock` is held while it starts or ends."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    zygote: Zygote | None = None
    users: int = 0
    idle: asyncio.TimerHandle | None = None


class ZygotePool:
    """Starts zygotes when they are needed and stops them when they are not."""

    def __init__(self, settings: HostSettings, tasks: TaskOwner) -> None:
        self._settings = settings
        self._tasks = tasks
        self._entries: dict[Tag, _Entry] = {}

    def in_use(self, tag: Tag) -> bool:
        """Whether somebody forks from `tag` now."""
        entry = self._entries.get(tag)
        return entry is not None and entry.users > 0

    @contextlib.asynccontextmanager
    async def lease(
        self, tag: Tag, load: Callable[[], ZygoteFiles]
    ) -> AsyncGenerator[Control, None]:
        """Hold a connection to a snapshot's zygote, started if need be, for one fork.

        Args:
            tag: The snapshot.
            load: Called in a thread if the zygote must be started; checks the snapshot
                and says where its files are.

        Raises:
            ForkdError: As `load`, and as `forkd.engine.process.start_zygote`.
        """
        entry = self._entries.setdefault(tag, _Entry())
        if entry.idle is not None:
            entry.idle.cancel()
            entry.idle = None
        entry.users += 1
        try:
            async with await self._connect(tag, entry, load) as control:
                yield control
        finally:
            entry.users -= 1
            if entry.users == 0:
                idle_s = self._settings.zygote_idle_s
                loop = asyncio.get_running_loop()
                entry.idle = loop.call_later(idle_s, self._expire, tag, entry)

    async def stop(self, tag: Tag) -> None:
        """Stop a snapshot's zygote, if it has one."""
        entry = self._entries.pop(tag, None)
        if entry is not None:
            await self._end(entry)

    async def stop_all(self) -> None:
        """Stop every zygote."""
        while self._entries:
            tag, entry = self._entries.popitem()
            try:
                await self._end(entry)
            except ForkdError as error:
                log.warning("zygote not stopped", extra={"tag": tag, "error": str(error)})

    async def _connect(self, tag: Tag, entry: _Entry, load: Callable[[], ZygoteFiles]) -> Control:
        async with entry.lock:
            if entry.zygote is not None:
                try:
                    return await Control.connect(entry.zygote.socket)
                except EngineExited as error:
                    self._lost(
                        tag, entry, entry.zygote.directory, str(error)
                    )  # its watch has not told us yet
            wanted = await asyncio.to_thread(load)
            entry.zygote = await self._start(tag, entry, wanted)
            return await Control.connect(entry.zygote.socket)

    async def _start(self, tag: Tag, entry: _Entry, wanted: ZygoteFiles) -> Zygote:
        directory = self._settings.zygotes_dir / secrets.token_hex(8)
        directory.mkdir(mode=0o700)
        config = ZygoteConfig(directory, wanted.state, wanted.memory, wanted.disk)
        try:
            process = await start_zygote(self._settings.vmm, config)
        except BaseException:
            files.remove_tree(directory)
            raise
        try:
            watch = await Watch.open(
                directory / ZYGOTE_SOCKET, lambda reason: self._lost(tag, entry, directory, reason)
            )
        except BaseException:
            await end(process)
            process.close()
            files.remove_tree(directory)
            raise
        log.info("zygote started", extra={"tag": tag, "pid": process.pid})
        return Zygote(process, directory, watch)

    def _lost(self, tag: Tag, entry: _Entry, directory: Path, reason: str) -> None:
        """Forget the zygote in `directory`, which ended; the next fork starts another."""
        zygote = entry.zygote
        if zygote is None or zygote.directory != directory:
            return  # it was forgotten before
        entry.zygote = None
        log.warning("zygote ended", extra={"tag": tag, "reason": reason})
        with contextlib.suppress(Conflict):  # the next start removes what is left
            self._tasks.spawn(self._clean(tag, zygote), name=f"clean zygote {tag}")

    def _expire(self, tag: Tag, entry: _Entry) -> None:
        zygote, entry.zygote, entry.idle = entry.zygote, None, None
        if zygote is not None:
            self._tasks.spawn(self._clean(tag, zygote), name=f"stop idle zygote {tag}")

    async def _clean(self, tag: Tag, zygote: Zygote) -> None:
        try:
            await zygote.end()
        except ForkdError as error:
            log.warning("zygote not stopped", extra={"tag": tag, "error": str(error)})

    async def _end(self, entry: _Entry) -> None:
        if entry.idle is not None:
            entry.idle.cancel()
        async with entry.lock:
            zygote, entry.zygote = entry.zygote, None
            if zygote is not None:
                await zygote.end()
