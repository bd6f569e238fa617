"""A real machine is baked of an image, runs its lines, and is forked by its digest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict
from forkd.model.exec import ExecRequest, Exited, Stdout
from forkd.model.image import ImageSnapshotRequest
from forkd.model.recipe import RecipeChanges, UploadedRecipe
from forkd.model.sandbox import ForkOptions
from forkd.model.snapshot import Snapshot, SnapshotRequest
from forkd.sdk._images import LocalImage
from forkd.service.host import open_host
from tests.support.callers import CALLER
from tests.support.oci import folder, regular, symlink, write_layout
from tests.support.real_host import FORK_DEADLINE_S, REAL, TAG, settings_without_images

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.ids import Tag
    from forkd.service.host import Host

pytestmark = [REAL, pytest.mark.timeout(300)]

BUSYBOX = Path("/bin/busybox")
"""Static, so that it is a whole image."""

SHAPE = RecipeChanges(memory_mib=256, disk_mib=64)


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    members = [
        *(folder(each) for each in ("bin", "work")),
        regular("bin/busybox", BUSYBOX.read_bytes(), mode=0o755),
        *(symlink(f"bin/{each}", "busybox") for each in ("sh", "cat", "pwd")),
    ]
    config = {"Env": ["PATH=/bin", "GREETING=hello"], "WorkingDir": "/work"}
    return write_layout(tmp_path / "layout", [members], config)


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    with settings_without_images() as settings:
        async with open_host(settings) as opened:
            yield opened


async def upload(host: Host, layout: Path) -> UploadedRecipe:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in LocalImage(layout).archive().pieces():
            yield piece

    return (await host.recipes.upload(CALLER, pieces())).source


async def says(host: Host, tag: Tag, line: str) -> str:
    """Return what a line prints in a fork."""
    options = ForkOptions(deadline_s=FORK_DEADLINE_S)
    (fork,) = (await host.sandboxes.fork(CALLER, tag, 1, options)).sandboxes
    said = b""
    async with await host.guests.exec(CALLER, fork.id, ExecRequest(("sh", "-c", line))) as session:
        async for event in session:
            if isinstance(event, Stdout):
                said += event.data
            elif isinstance(event, Exited):
                assert event.exit_code == 0
    await host.sandboxes.delete(CALLER, fork.id)
    return said.decode()


@pytest.mark.soak(only=True)  # over the fake VMM: test_service_image_cache.py
async def test_an_image_is_baked_forked_and_found_again(host: Host, layout: Path) -> None:
    source = await upload(host, layout)
    changes = RecipeChanges(
        ("echo $GREETING > said", "test $(pwd) = /work"), "test -e said", 256, disk_mib=64
    )
    request = SnapshotRequest(TAG, source, changes)
    *_, named = [each async for each in host.snapshots.bake(CALLER, request)]
    assert isinstance(named, Snapshot)
    assert (named.runtime, named.memory_bytes >> 20, named.disk_bytes >> 20) == ("none", 256, 64)
    assert await says(host, TAG, "cat /work/said") == "hello\n"

    asked = ImageSnapshotRequest(source, SHAPE)
    *steps, cached = [each async for each in host.image_snapshots.for_image(CALLER, asked)]
    again = [each async for each in host.image_snapshots.for_image(CALLER, asked)]

    assert isinstance(cached, Snapshot)
    assert (again, bool(steps), cached.image_key) == ([cached], True, named.image_key)
    assert await says(host, cached.tag, "pwd") == "/work\n"
    with pytest.raises(Conflict, match="is needed by"):
        await host.image_cache.remove(CALLER, named.image_key)
