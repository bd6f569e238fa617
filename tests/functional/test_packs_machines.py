"""A snapshot that was packed here runs where it is unpacked, as if it had been baked there."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.errors import PackError
from forkd.model.ids import parse_tag
from forkd.model.pack import UnpackRequest
from forkd.model.sandbox import ForkOptions
from forkd.packs.container import read_head
from forkd.service.host_service import HostService
from tests.support.packs import PUBLIC, SECRET
from tests.support.real_host import (
    REAL,
    STATE_PARENT,
    TAG,
    RealHost,
    fresh_folders,
    settings_in,
    value,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from typing import BinaryIO

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

PACKED = ("state", "memory", "disk.layer")
SIGNED = UnpackRequest(parse_tag("arrived"), trusted=(PUBLIC,))


async def pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    file.seek(0)
    while piece := file.read(1 << 20):
        yield piece


async def pack_to(host: RealHost, file: BinaryIO) -> None:
    """Write a signed pack of the baked snapshot."""
    async with contextlib.aclosing(host.service.pack_snapshot(TAG)) as packed:
        async for piece in packed:
            file.write(piece)
    file.seek(0)
    head = read_head(file).signed(SECRET)
    file.seek(0)
    file.write(head.encode())


@contextlib.asynccontextmanager
async def elsewhere() -> AsyncIterator[RealHost]:
    """Another service with folders of its own; nothing is left of it."""
    folders = fresh_folders()
    settings = settings_in(*folders)
    service = HostService(settings)
    try:
        await service.start()
        yield RealHost(settings, service, None)  # type: ignore[arg-type] - nothing is baked there
    finally:
        await service.stop()
        for folder in folders:
            shutil.rmtree(folder)


@contextlib.contextmanager
def a_file() -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile(dir=STATE_PARENT) as file:
        yield file


def files_of(host: RealHost, tag: str) -> list[bytes]:
    folder = Path(host.settings.state_dir) / "snapshots" / tag
    return [(folder / name).read_bytes() for name in PACKED]


async def test_sandboxes_are_forked_from_a_snapshot_that_was_unpacked(
    real_host: RealHost,
) -> None:
    with a_file() as file:
        await pack_to(real_host, file)
        async with elsewhere() as there:
            with pytest.raises(PackError, match="not trusted"):
                await there.service.unpack_snapshot(
                    UnpackRequest(parse_tag("arrived")), pieces(file)
                )
            unpacked = await there.service.unpack_snapshot(SIGNED, pieces(file))

            assert unpacked.missing_features == ()
            assert files_of(there, "arrived") == files_of(real_host, TAG)
            forked = await there.service.fork(parse_tag("arrived"), 2, ForkOptions())
            try:
                assert forked.failures == ()
                for sandbox in forked.sandboxes:
                    assert await value(there, sandbox.id, "int(numpy.arange(10).sum())") == 45
            finally:
                for sandbox in forked.sandboxes:
                    await there.service.delete_sandbox(sandbox.id)
