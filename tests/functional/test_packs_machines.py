"""A snapshot that was packed here runs where it is unpacked, as if it had been baked there."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.errors import PackError
from forkd.model.ids import parse_tag
from forkd.model.pack import UnpackRequest
from forkd.model.sandbox import ForkOptions
from forkd.packs.container import read_head
from forkd.service.host import open_host
from forkd.service.snapshots.stored import placeholder
from forkd.store.snapshots import SnapshotStore
from tests.support.callers import CALLER
from tests.support.host_settings import settings_in
from tests.support.packs import PUBLIC, SECRET
from tests.support.real_host import (
    REAL,
    STATE_PARENT,
    TAG,
    RealHost,
    fresh_folders,
    names_of,
    value,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from typing import BinaryIO

    from forkd.model.ids import Tag

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

PACKED = ("state", "memory", "disk.layer")
THOUGHT, ARRIVED = parse_tag("thought"), parse_tag("arrived")
SIGNED = UnpackRequest(ARRIVED, trusted=(PUBLIC,))


async def pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    file.seek(0)
    while piece := file.read(1 << 20):
        yield piece


async def pack_to(host: RealHost, tag: Tag, file: BinaryIO) -> None:
    """Write a signed pack of a snapshot."""
    async with contextlib.aclosing(host.service.packs.pack(CALLER, tag)) as packed:
        async for piece in packed:
            file.write(piece)
    file.seek(0)
    head = read_head(file).signed(SECRET)
    file.seek(0)
    file.write(head.encode())


async def written_down(host: RealHost, tag: Tag) -> None:
    """Take a snapshot of a sandbox that has something on its mind and on its disk."""
    (source,) = (await host.service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
    await value(host, source.id, "mark = 5; open('/root/note', 'w').write('five')")
    await host.service.branches.snapshot(CALLER, source.id, tag, wait=True)
    await host.service.sandboxes.delete(CALLER, source.id)


@contextlib.asynccontextmanager
async def elsewhere() -> AsyncIterator[RealHost]:
    """Another service with folders of its own; nothing is left of it."""
    folders = fresh_folders()
    settings = settings_in(*folders)
    try:
        async with contextlib.AsyncExitStack() as opened:
            names = names_of(settings)
            service = await opened.enter_async_context(open_host(settings))
            nothing = placeholder(TAG, SnapshotStore(settings.state_dir))
            yield RealHost(settings, service, nothing, opened, names)
    finally:
        for folder in folders:
            shutil.rmtree(folder)


@contextlib.contextmanager
def a_file() -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile(dir=STATE_PARENT) as file:
        yield file


def files_of(host: RealHost, tag: Tag) -> list[bytes]:
    folder = Path(host.settings.state_dir) / "snapshots" / tag
    return [(folder / name).read_bytes() for name in PACKED]


@pytest.mark.soak(only=True)  # over the fake VMM: test_packs_hosts.py
async def test_sandboxes_are_forked_from_a_chain_that_was_unpacked(real_host: RealHost) -> None:
    await written_down(real_host, THOUGHT)
    with a_file() as file:
        await pack_to(real_host, THOUGHT, file)
        async with elsewhere() as there:
            stranger = replace(SIGNED, trusted=())
            with pytest.raises(PackError, match="not trusted"):
                await there.service.packs.unpack(CALLER, stranger, pieces(file))
            unpacked = await there.service.packs.unpack(CALLER, SIGNED, pieces(file))

            assert unpacked.missing_features == ()
            assert [each.tag for each in unpacked.links] == [TAG, ARRIVED]
            assert files_of(there, TAG) == files_of(real_host, TAG)
            assert files_of(there, ARRIVED) == files_of(real_host, THOUGHT)
            await check_forks(there)


async def check_forks(host: RealHost) -> None:
    """Check that two forks have what base and link had, in memory and on disk."""
    forked = await host.service.sandboxes.fork(CALLER, ARRIVED, 2, ForkOptions())
    try:
        assert forked.failures == ()
        for sandbox in forked.sandboxes:
            said = await value(
                host, sandbox.id, "[int(numpy.arange(10).sum()), mark, open('/root/note').read()]"
            )
            assert said == [45, 5, "five"]
    finally:
        for sandbox in forked.sandboxes:
            await host.service.sandboxes.delete(CALLER, sandbox.id)
