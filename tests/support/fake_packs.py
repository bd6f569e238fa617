"""Packs of a service in memory: real ones, of chains that a test made up."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import Conflict
from forkd.model.ids import parse_tag
from forkd.model.pack import Unpacked, UnpackedLink
from forkd.packs.container import Pieces
from forkd.packs.reader import Terms, read
from forkd.packs.writer import Source, write
from tests.support.packs import a_link, block

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable

    from forkd.model.ids import Tag
    from forkd.model.pack import UnpackRequest
    from forkd.model.snapshot import Snapshot


async def packed(tag: Tag) -> AsyncGenerator[bytes, None]:
    """Yield a pack of `tag` over a base called `base`; breaks off if it ends in `-breaks`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        links = (a_link(folder / "base", "base", None), a_link(folder / "head", tag, "base"))
        (rootfs := folder / "rootfs.ext4").write_bytes(block("root"))
        for number, piece in enumerate(
            write(Source(links, (folder / "base", folder / "head"), rootfs))
        ):
            if number and tag.endswith("-breaks"):
                raise Conflict("the store broke")
            yield piece


async def unpacked(
    request: UnpackRequest,
    pieces: AsyncIterable[bytes],
    snapshots: dict[Tag, Snapshot],
    made: Snapshot,
) -> Unpacked:
    """Read a pack; its head becomes `made` in `snapshots`."""
    data = [piece async for piece in pieces]
    with tempfile.TemporaryDirectory() as name:
        terms = Terms(request.trusted, request.allow_unsigned, 1 << 30)
        head = read(Pieces(data), Path(name), terms)
    snapshots[made.tag] = made
    names = [parse_tag(link.tag) for link in head.manifest.links[:-1]]
    links = [UnpackedLink(each, reused=True) for each in names]
    links.append(UnpackedLink(made.tag, reused=False))
    return Unpacked(made, tuple(links), head.key, ("avx512f",))
