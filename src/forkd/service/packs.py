"""Pack snapshots, and take packs from elsewhere into the store.

What reads and writes a pack is a process of its own (`forkd.packs.__main__`).  Here are the two
decisions that need the store: which links of a pack are here already, and what the others are
called.  A pack's snapshots appear base first, each whole; if one cannot, those before it go again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from forkd.errors import CapacityError, Conflict, ForkdError, HostError, PackError, StoreError
from forkd.host import cells, files, ownership
from forkd.host.pipes import piped
from forkd.host.rlimits import PACKER
from forkd.limits import LONG_RETRY_S, PACKS_MAX, ROOM_BYTES_MIN
from forkd.model.caller import Scope
from forkd.model.ids import parse_tag
from forkd.model.pack import Unpacked, UnpackedLink
from forkd.model.snapshot import SnapshotStatus
from forkd.packs import manifest as packs
from forkd.packs.__main__ import Job, Outcome
from forkd.packs.writer import Source, measured, paths_of
from forkd.service import processors
from forkd.service.pack_links import content_key, from_pack, shape, to_pack
from forkd.service.places import Places
from forkd.service.snapshots.catalog import may_use
from forkd.service.staging import staged_folder
from forkd.service.supervision import to_end
from forkd.service.use_case import streaming_use_case, use_case

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterable,
        AsyncIterator,
        Callable,
        Coroutine,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )
    from pathlib import Path

    from forkd.host.cells import Cell
    from forkd.host.pipes import Piped
    from forkd.model.caller import Caller
    from forkd.model.ids import Tag
    from forkd.model.pack import UnpackRequest
    from forkd.model.snapshot import Snapshot
    from forkd.packs.manifest import Link, PackedImage, PackManifest
    from forkd.service.cells import Cells
    from forkd.service.settings import PackPolicy
    from forkd.service.snapshots.catalog import Catalog
    from forkd.service.workers import Workers
    from forkd.store.snapshots import SnapshotStore
    from forkd.telemetry.telemetry import Telemetry

_PROGRAM = (sys.executable, "-m", "forkd.packs")
_ERRORS = {each.code: each for each in (PackError, CapacityError, StoreError)}

OUTCOME_BYTES_MAX = 64 << 20
"""Most that a reader may say of a pack: its manifest, which has a limit of its own, as JSON."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What becomes of one link: its name here, and whether it is here already."""

    link: Link
    tag: Tag
    reused: bool


class Packs:
    """Packs of one host's snapshots; `forkd.service.api.Packs` documents what a caller may ask.

    Args:
        policy: What packs this host takes.
        store: Where snapshots are.
        catalog: Which there are.
        drop_images: Removes images that no snapshot needs.
        cells: Where packs are read and written; None for processes that are the daemon's user.
        workers: Look at chains, and publish them.

    Attributes:
        places: Those of packs that are written or read.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what it works with
        self,
        telemetry: Telemetry,
        policy: PackPolicy,
        store: SnapshotStore,
        catalog: Catalog,
        drop_images: Callable[[], Coroutine[object, object, None]],
        cells: Cells | None,
        workers: Workers,
    ) -> None:
        self.telemetry = telemetry
        self._policy = policy
        self._store = store
        self._catalog = catalog
        self._drop_images = drop_images
        self._cells = cells
        self._workers = workers
        self.places = Places("packs", PACKS_MAX, LONG_RETRY_S)

    @streaming_use_case("pack", Scope.SNAPSHOTS)
    async def pack(self, caller: Caller, tag: Tag) -> AsyncGenerator[bytes, None]:
        """Yield an unsigned pack of a snapshot and its ancestors."""
        await self._catalog.usable(caller, tag)
        job = await self._workers.run(caller, lambda: self._job(tag))
        with self.places.take(caller):
            async with aclosing(self._written(job)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _written(self, job: Job) -> AsyncGenerator[bytes, None]:
        async with contextlib.AsyncExitStack() as stack:
            cell = await stack.enter_async_context(self._cell())
            if cell is not None:
                opened = await to_end(asyncio.to_thread(_opened, job, stack))
                job = job.model_copy(update={"descriptors": opened})
            command = _command(cell, ["write"])
            given = job.descriptors or ()
            process = await stack.enter_async_context(
                piped(command, "PYTHONPATH", limits=PACKER, descriptors=given)
            )
            await process.feed(_only(job.model_dump_json().encode()))
            async with aclosing(process.output()) as pieces:
                async for piece in pieces:
                    yield piece
            await _check_ended(process)

    @contextlib.asynccontextmanager
    async def _cell(self) -> AsyncIterator[Cell | None]:
        """Give a cell for the block; None if there are none."""
        if self._cells is None:
            yield None
            return
        entering = self._cells.pack()
        cell = await asyncio.to_thread(entering.__enter__)
        try:
            yield cell
        finally:
            await to_end(asyncio.to_thread(entering.__exit__, None, None, None))

    def _job(self, tag: Tag) -> Job:
        chain = self._store.load_chain(tag)
        return Job(
            links=tuple(map(to_pack, chain)),
            folders=tuple(self._store.folder(parse_tag(manifest.tag)) for manifest in chain),
            rootfs=self._store.rootfs(chain[-1].image_key) if chain[-1].disk_bytes else None,
        )

    @use_case("unpack", Scope.SNAPSHOTS)
    async def unpack(
        self, caller: Caller, request: UnpackRequest, pieces: AsyncIterable[bytes]
    ) -> Unpacked:
        """Take a pack into the store; nothing is left of one that is refused."""
        terms = self._policy.restrict(request)
        with self.places.take(caller):
            async with staged_folder(self._store) as staged:
                outcome = await self._read(terms, pieces, staged)
                manifest = packs.parse(outcome.manifest.encode())
                unpacked = await self._take(caller, request.tag, manifest, staged)
        log.info("pack unpacked", extra={"tag": request.tag, "signed_by": outcome.key or ""})
        head = self._catalog.get(request.tag)
        key = None if outcome.key is None else bytes.fromhex(outcome.key)
        missing = await asyncio.to_thread(_missing, manifest.head.cpu.features)
        links = tuple(UnpackedLink(each.tag, each.reused) for each in unpacked)
        return Unpacked(head, links, key, missing)

    async def _read(
        self, request: UnpackRequest, pieces: AsyncIterable[bytes], staged: Path
    ) -> Outcome:
        room = await asyncio.to_thread(files.free_bytes, staged) - ROOM_BYTES_MIN
        terms = [word for key in request.trusted for word in ("--trusted", key.hex())]
        terms += ["--allow-unsigned"] if request.allow_unsigned else []
        words = ["read", str(staged), "--room-bytes", str(max(room, 0)), *terms]
        async with self._cell() as cell:
            if cell is not None:
                await asyncio.to_thread(ownership.give, staged, cell.uid)
            command = _command(cell, words, staged)
            async with piped(command, "PYTHONPATH", limits=PACKER) as process:
                await process.feed(pieces)
                said = await _all(process.output())
                await _check_ended(process)
        if cell is not None:  # nobody has it open any more
            await asyncio.to_thread(ownership.take_tree_back, staged)
        try:
            return Outcome.model_validate_json(said)
        except ValidationError as error:
            raise HostError(f"reading a pack said what makes no sense: {error}") from error

    async def _take(
        self, caller: Caller, tag: Tag, manifest: PackManifest, staged: Path
    ) -> list[_Planned]:
        """Give the links in `staged` their names; returns what became of each."""
        known = {each.tag: _is_usable(caller, each) for each in self._catalog.all()}
        planned = await self._workers.run(caller, lambda: self._plan(tag, manifest, known))
        fresh = [each.tag for each in planned if not each.reused]
        under = planned[-len(fresh) - 1].tag if 0 < len(fresh) < len(planned) else None
        sizes = {each.tag: each.link.files for each in planned}
        claimed: list[Tag] = []
        try:
            for each in fresh:
                size_bytes = sum(file.bytes for file in sizes[each])
                parent = None if claimed else under
                await self._catalog.claim(each, caller.owner, parent, expected_bytes=size_bytes)
                claimed.append(each)
            await self._workers.run(caller, lambda: self._publish(planned, manifest, staged))
            found = [await to_end(self._catalog.read(each)) for each in fresh]
            _check_ready(found)
        except BaseException:
            for each in reversed(claimed):
                await to_end(asyncio.to_thread(self._store.delete, each))
                self._catalog.settle(each)
            await to_end(self._drop_images())
            raise
        for snapshot in found:
            self._catalog.settle(snapshot.tag, snapshot)
        return planned

    def _plan(self, head: Tag, manifest: PackManifest, known: Mapping[Tag, bool]) -> list[_Planned]:
        """Decide which links are here already and what the others are called; blocks.

        Args:
            head: What the last link is to be called.
            manifest: The pack's.
            known: The tags that are taken, and whether each is a snapshot that a link may be.

        Raises:
            Conflict: Another snapshot has the name of the head.
        """
        planned: list[_Planned] = []
        for number, link in enumerate(manifest.links):
            names = _names(head, number, manifest)
            free = (each for each in names if each not in {one.tag for one in planned})
            choices = (
                _Planned(link, each, reused=each in known)
                for each in free
                if each not in known or (known[each] and self._is(each, planned, manifest))
            )
            chosen = next(choices, None)
            if chosen is None:
                raise Conflict(
                    f"there is another snapshot {head}; --as takes the pack under another name",
                    tag=head,
                )
            planned.append(chosen)
        return planned

    def _is(self, tag: Tag, planned: list[_Planned], manifest: PackManifest) -> bool:
        """Whether a snapshot here is the link that follows on those planned."""
        if not all(each.reused for each in planned):
            return False
        link, here = manifest.links[len(planned)], self._store.load(tag)
        if (
            {(file.name, file.bytes, file.digest) for file in here.files}
            != {(file.name, file.bytes, file.digest) for file in link.files}
            or here.parent != (planned[-1].tag if planned else None)
            or shape(here) != shape(link)
        ):
            return False
        sure = bool(planned) or manifest.image is None
        return sure or self._holds(here.image_key, manifest.image)

    def _holds(self, key: str, image: PackedImage | None) -> bool:
        """Whether the store has an image under `key`, and it is `image`."""
        path = self._store.rootfs(key)
        if image is None or files.size_bytes(path) != image.bytes:
            return False
        if key == content_key(image):
            return True
        with files.opened(path) as file:
            return measured(file).digest == image.digest

    def _publish(self, planned: list[_Planned], manifest: PackManifest, staged: Path) -> None:
        """Put the image and every new link in their places, base first; blocks."""
        key = self._keep_image(planned, manifest, staged)
        under = None
        for number, each in enumerate(planned):
            if each.reused:
                under = self._store.load(each.tag)
                continue
            made = from_pack(each.link, each.tag, under, key)
            self._store.publish(staged / str(number), made)
            under = made

    def _keep_image(self, planned: list[_Planned], manifest: PackManifest, staged: Path) -> str:
        """Return the key of the pack's image in the store, where it is after this."""
        image, wanted = manifest.image, manifest.head.image_key
        if image is None:
            return wanted
        if planned[0].reused:
            return self._store.load(planned[0].tag).image_key
        if wanted and self._holds(wanted, image):
            return wanted
        key = content_key(image)
        self._store.keep_rootfs(key, staged / packs.IMAGE_FILE)
        return key


def _command(
    cell: Cell | None, words: list[str], folder: Path | None = None
) -> Sequence[str | Path]:
    """Return what starts the process that reads or writes a pack."""
    if cell is None:
        return [*_PROGRAM, *words]
    program = [*_PROGRAM[:1], "-P", *_PROGRAM[1:], *words]
    write = () if folder is None else (folder,)
    return cell.command(program, read=cells.python_paths(), write=write)


def _opened(job: Job, stack: contextlib.AsyncExitStack) -> tuple[int, ...]:
    """Open the files of a job, which `stack` closes, whether anybody waits for them or not.

    Raises:
        StoreError: One is missing.
    """
    opened = []
    for path in paths_of(Source(job.links, job.folders, job.rootfs)):
        try:
            opened.append(files.open_to_read(path))
        except HostError as error:
            raise StoreError(f"cannot pack {path.parent.name}/{path.name}: {error}") from error
        stack.callback(files.close, opened[-1])
    return tuple(opened)


async def _all(pieces: AsyncGenerator[bytes, None]) -> bytes:
    """Return what a program said.

    Raises:
        HostError: It was more than there can be to say.
    """
    said = bytearray()
    async with aclosing(pieces):
        async for piece in pieces:
            said += piece
            if len(said) > OUTCOME_BYTES_MAX:
                raise HostError("reading a pack said more than there is to say")
    return bytes(said)


def _is_usable(caller: Caller, snapshot: Snapshot) -> bool:
    """Whether a link of a caller's pack may be a snapshot that is here already.

    Never another tenant's private snapshot: a caller with a copy of its files would learn that it
    is here, take it into its own chains for nothing, and keep its owner from removing it.
    """
    return snapshot.status is SnapshotStatus.READY and may_use(caller, snapshot)


def _check_ready(found: list[Snapshot]) -> None:
    for each in found:
        if each.status is not SnapshotStatus.READY:
            raise StoreError(f"snapshot {each.tag} cannot be used: {each.error}", tag=each.tag)


def _names(head: Tag, number: int, manifest: PackManifest) -> Iterator[Tag]:
    """Yield what a link may be called here, the best name first."""
    if number == len(manifest.links) - 1:
        yield head
        return
    own = parse_tag(manifest.links[number].tag)
    if own != head:
        yield own
    yield parse_tag(f"{head}.{number}")


async def _only(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _missing(seen: Iterable[str]) -> tuple[str, ...]:
    """Return what a guest saw of a processor that this host cannot show; none if KVM is closed."""
    try:
        here = processors.offered().features
    except ForkdError:
        return ()
    return tuple(sorted(set(seen).difference(here)))


async def _check_ended(process: Piped) -> None:
    """Return if a program ended well.

    Raises:
        ForkdError: What it said was wrong.
    """
    status, said = await process.ended()
    if status == 0:
        return
    try:
        error = json.loads(said.splitlines()[-1])
        kind: type[ForkdError] = _ERRORS[error["code"]]
        raised = kind(error["message"], **error["context"])
    except (ValueError, LookupError, TypeError):
        log.warning("packing ended with status %s: %s", status, said.decode(errors="replace"))
        raise HostError("packing ended in a way that it did not foresee") from None
    raise raised
