"""Pack snapshots, and take packs from elsewhere into the store.

What reads and writes a pack is a process of its own (`forkd.packs.__main__`).  Here are the two
decisions that need the store: which links of a pack are here already, and what the others are
called.  A pack's snapshots appear base first, each whole; if one cannot, those before it go again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from forkd.errors import CapacityError, Conflict, ForkdError, HostError, PackError, StoreError
from forkd.host import proc
from forkd.host.pipes import piped
from forkd.model.ids import parse_tag
from forkd.model.pack import Unpacked, UnpackedLink
from forkd.model.snapshot import SnapshotStatus
from forkd.packs import manifest as packs
from forkd.packs.__main__ import Job, Outcome
from forkd.packs.writer import measure
from forkd.service.tasks import to_end
from forkd.store import manifest as stored

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterable,
        AsyncIterator,
        Callable,
        Coroutine,
        Iterator,
        Mapping,
    )
    from pathlib import Path

    from forkd.host.pipes import Piped
    from forkd.model.ids import Tag
    from forkd.model.pack import UnpackRequest
    from forkd.model.snapshot import Snapshot
    from forkd.packs.manifest import Device, Link, PackedImage, PackManifest
    from forkd.service.registry import Registry
    from forkd.store.manifest import Manifest
    from forkd.store.snapshots import SnapshotStore

ROOM_BYTES_MIN = 256 * 1024 * 1024
"""Space that unpacking leaves free, so that the database and running machines go on."""

DEVICES: tuple[Device, ...] = ("serial", "vmgenid", "net", "vsock", "rng")
DISK_DEVICES: tuple[Device, ...] = (*DEVICES, "block")

_PROGRAM = (sys.executable, "-m", "forkd.packs")
_ERRORS = {each.code: each for each in (PackError, CapacityError, StoreError)}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What becomes of one link: its name here, and whether it is here already."""

    link: Link
    tag: Tag
    reused: bool


class PackOperations:
    """The part of `forkd.service.api.Service` that is about packs."""

    _packs: Packs

    def pack_snapshot(self, tag: Tag) -> AsyncGenerator[bytes, None]:
        """Yield an unsigned pack of a snapshot and all that it stands on."""
        return self._packs.pack(tag)

    async def unpack_snapshot(
        self, request: UnpackRequest, pieces: AsyncIterable[bytes]
    ) -> Unpacked:
        """Take a pack into the store; nothing is left of one that is refused."""
        return await self._packs.unpack(request, pieces)


class Packs:
    """Packs of one host's snapshots.

    Args:
        store: Where snapshots are.
        registry: Which there are.
        drop_images: Removes the images that no snapshot stands on.
    """

    def __init__(
        self,
        store: SnapshotStore,
        registry: Registry,
        drop_images: Callable[[], Coroutine[object, object, None]],
    ) -> None:
        self._store = store
        self._registry = registry
        self._drop_images = drop_images

    async def pack(self, tag: Tag) -> AsyncGenerator[bytes, None]:
        """Yield an unsigned pack of a snapshot and all that it stands on.

        Raises:
            NotFound: There is none of that tag.
            Conflict: It is being written.
            StoreError: Something of it is missing or damaged.
        """
        self._registry.get_ready(tag)
        job = await asyncio.to_thread(self._job, tag)
        async with piped([*_PROGRAM, "write"], "PYTHONPATH") as process:
            await process.feed(_only(job.model_dump_json().encode()))
            async with aclosing(process.output()) as pieces:
                async for piece in pieces:
                    yield piece
            await _check_ended(process)

    def _job(self, tag: Tag) -> Job:
        chain = self._store.load_chain(tag)
        return Job(
            links=tuple(map(_to_pack, chain)),
            folders=tuple(self._store.folder(parse_tag(manifest.tag)) for manifest in chain),
            rootfs=self._store.rootfs(chain[-1].image_key) if chain[-1].disk_bytes else None,
        )

    async def unpack(self, request: UnpackRequest, pieces: AsyncIterable[bytes]) -> Unpacked:
        """Take a pack into the store; nothing is left of one that is refused.

        Raises:
            PackError: It is damaged, hostile, unsigned or not trusted.
            Conflict: Another snapshot has the name.
            CapacityError: There is no room for it.
            StoreError: It could not be written.
        """
        staged = await asyncio.to_thread(self._store.stage)
        try:
            outcome = await self._read(request, pieces, staged)
            manifest = packs.parse(outcome.manifest.encode())
            unpacked = await self._take(request.tag, manifest, staged)
        except OSError as error:
            raise StoreError(f"cannot write snapshot {request.tag}: {error}") from error
        finally:
            await to_end(asyncio.to_thread(self._store.discard, staged))
        log.info("pack unpacked", extra={"tag": request.tag, "signed_by": outcome.key or ""})
        head = self._registry.get(request.tag)
        key = None if outcome.key is None else bytes.fromhex(outcome.key)
        seen = manifest.head.cpu.features
        missing = tuple(sorted(set(seen) - set(proc.cpu().features)))
        links = tuple(UnpackedLink(each.tag, each.reused) for each in unpacked)
        return Unpacked(head, links, key, missing)

    async def _read(
        self, request: UnpackRequest, pieces: AsyncIterable[bytes], staged: Path
    ) -> Outcome:
        room = shutil.disk_usage(staged).free - ROOM_BYTES_MIN
        terms = [word for key in request.trusted for word in ("--trusted", key.hex())]
        terms += ["--allow-unsigned"] if request.allow_unsigned else []
        command = [*_PROGRAM, "read", str(staged), "--room-bytes", str(max(room, 0)), *terms]
        async with piped(command, "PYTHONPATH") as process:
            await process.feed(pieces)
            said = b"".join([piece async for piece in process.output()])
            await _check_ended(process)
        return Outcome.model_validate_json(said)

    async def _take(self, tag: Tag, manifest: PackManifest, staged: Path) -> list[_Planned]:
        """Give the links in `staged` their names; returns what became of each."""
        known = {each.tag: each.status for each in self._registry.list_all()}
        planned = await asyncio.to_thread(self._plan, tag, manifest, known)
        fresh = [each.tag for each in planned if not each.reused]
        under = planned[-len(fresh) - 1].tag if 0 < len(fresh) < len(planned) else None
        claimed: list[Tag] = []
        try:
            for each in fresh:
                self._registry.claim(each, None if claimed else under)
                claimed.append(each)
            await to_end(asyncio.to_thread(self._publish, planned, manifest, staged))
            found = await to_end(asyncio.to_thread(lambda: [*map(self._registry.read, fresh)]))
            _check_ready(found)
        except BaseException:
            for each in reversed(claimed):
                await to_end(asyncio.to_thread(self._store.delete, each))
                self._registry.settle(each)
            await to_end(self._drop_images())
            raise
        for snapshot in found:
            self._registry.settle(snapshot.tag, snapshot)
        return planned

    def _plan(
        self, head: Tag, manifest: PackManifest, known: Mapping[Tag, SnapshotStatus]
    ) -> list[_Planned]:
        """Decide which links are here already and what the others are called; blocks.

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
                if each not in known
                or (known[each] is SnapshotStatus.READY and self._is(each, planned, manifest))
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
            or _shape(here) != _shape(link)
        ):
            return False
        sure = bool(planned) or manifest.image is None
        return sure or self._holds(here.image_key, manifest.image)

    def _holds(self, key: str, image: PackedImage | None) -> bool:
        """Whether the store has an image under `key`, and it is `image`."""
        path = self._store.rootfs(key)
        if image is None or not path.is_file() or path.stat().st_size != image.bytes:
            return False
        return key == _content_key(image) or measure(path).digest == image.digest

    def _publish(self, planned: list[_Planned], manifest: PackManifest, staged: Path) -> None:
        """Put the image and every new link in their places, base first; blocks."""
        key = self._keep_image(planned, manifest, staged)
        under = None
        for number, each in enumerate(planned):
            if each.reused:
                under = self._store.load(each.tag)
                continue
            made = _from_pack(each, under, key)
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
        key = _content_key(image)
        self._store.keep_rootfs(key, staged / packs.IMAGE_FILE)
        return key


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


def _content_key(image: PackedImage) -> str:
    """Return a key that no recipe has: a pack must not put an image under one of those."""
    return f"pack-{image.digest[:32]}"


def _shape(link: Manifest | Link) -> tuple[int, int, int]:
    return link.vcpus, link.memory_bytes, link.disk_bytes


def _to_pack(manifest: Manifest) -> packs.Link:
    """Return a link as a pack has it.

    Raises:
        StoreError: Something in the manifest is more than a pack may say.
    """
    try:
        return _link_of(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise StoreError(
            f"{manifest.tag} cannot be packed: {where}: {first['msg']}", tag=manifest.tag
        ) from None


def _link_of(manifest: Manifest) -> packs.Link:
    return packs.Link(
        tag=manifest.tag,
        parent=manifest.parent,
        created_at=manifest.created_at,
        recipe=manifest.recipe,
        image_key=manifest.image_key,
        kernel=manifest.kernel,
        vcpus=manifest.vcpus,
        memory_bytes=manifest.memory_bytes,
        disk_bytes=manifest.disk_bytes,
        runtime=manifest.runtime,
        cpu=packs.Cpu(model=manifest.cpu.model, features=manifest.cpu.features),
        devices=DISK_DEVICES if manifest.disk_bytes else DEVICES,
        files=tuple(
            packs.PackedFile(name=file.name, bytes=file.bytes, digest=file.digest)
            for file in manifest.files
        ),
    )


def _from_pack(planned: _Planned, parent: Manifest | None, image_key: str) -> Manifest:
    link = planned.link
    return stored.Manifest(
        tag=planned.tag,
        created_at=link.created_at,
        recipe=link.recipe,
        image_key=image_key,
        kernel=link.kernel,
        vcpus=link.vcpus,
        memory_bytes=link.memory_bytes,
        disk_bytes=link.disk_bytes,
        runtime=link.runtime,
        cpu=stored.Cpu(model=link.cpu.model, features=link.cpu.features),
        parent=None if parent is None else parent.tag,
        files=tuple(
            stored.StoredFile(name=file.name, bytes=file.bytes, digest=file.digest)
            for file in link.files
        ),
        link=None if parent is None else stored.Link(parent_digest=parent.digest),
    )


async def _only(data: bytes) -> AsyncIterator[bytes]:
    yield data


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
        log.error("packing ended with status %s: %s", status, said.decode(errors="replace"))  # noqa: TRY400 - not our exception
        raise HostError("packing ended in a way that it did not foresee") from None
    raise raised
