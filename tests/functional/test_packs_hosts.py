"""A chain moves from one host's service to another's, with all that its links added."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.model.pack import UnpackRequest
from forkd.model.snapshot import SnapshotStatus
from tests.support.callers import CALLER
from tests.support.chains import A, B, C, chain, forked, read, value
from tests.support.service_host import TAG, FakeHost, make_host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from forkd.model.ids import Tag
    from forkd.service.host import Host


def new(folder: Path) -> Path:
    (made := folder / "there").mkdir()
    return made


@contextlib.contextmanager
def made_host(folder: Path) -> Iterator[FakeHost]:
    """Make a host that has nothing."""
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as run_dir:
        yield make_host(folder, Path(run_dir))


@contextlib.asynccontextmanager
async def elsewhere(folder: Path) -> AsyncIterator[tuple[FakeHost, Host]]:
    """Run a service on a host that has nothing."""
    with made_host(folder) as host:
        async with host.service() as service:
            yield host, service


async def move(tag: Tag, here: Host, there: Host, name: Tag) -> list[Tag]:
    """Move a snapshot without holding it; return what its chain is called there."""
    async with contextlib.aclosing(here.packs.pack(CALLER, tag)) as pieces:
        request = UnpackRequest(name, allow_unsigned=True)
        unpacked = await there.packs.unpack(CALLER, request, pieces)
    return [each.tag for each in unpacked.links]


async def test_what_every_link_added_is_there_where_the_chain_was_unpacked(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    async with fake_host.service() as here, elsewhere(new(tmp_path)) as (host, there):
        await chain(fake_host, here)

        assert await move(C, here, there, C) == [TAG, A, B, C]

        async with forked(there, C) as sandbox:
            assert await value(there, sandbox.id, "(answer, a, b, c)") == [42, 1, 1, 1]
            assert [await read(there, sandbox.id, f"/{tag}") for tag in (A, B, C)] == [A, B, C]
        assert host.left_over() == []


async def test_a_chain_that_was_unpacked_is_shared_and_removed_as_any_other(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    async with fake_host.service() as here, elsewhere(new(tmp_path)) as (_, there):
        await chain(fake_host, here)
        await move(B, here, there, B)

        assert await move(C, here, there, C) == [TAG, A, B, C]
        assert (await there.snapshots.get(CALLER, C)).depth == 3

        await there.snapshots.delete(CALLER, TAG, cascade=True)
        assert await there.snapshots.list(CALLER) == ()
        assert list((tmp_path / "there/state/images").iterdir()) == []


async def test_what_was_unpacked_is_there_after_a_restart(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        host = stack.enter_context(made_host(new(tmp_path)))
        async with fake_host.service() as here, host.service() as there:
            await chain(fake_host, here)
            await move(C, here, there, C)
            before = await there.snapshots.list(CALLER)

        async with host.service() as again:
            assert await again.snapshots.list(CALLER) == before
            assert {each.status for each in before} == {SnapshotStatus.READY}
