"""A disk that is really full: one clear error, nothing half-made, and what runs goes on."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd import Client
from forkd.errors import CapacityError, ForkdError
from forkd.host.process import run
from forkd.service.settings import DiskPolicy
from tests.support import census
from tests.support.real_daemon import running_daemon
from tests.support.real_host import REAL, RECIPE, STATE_PARENT, TAG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forkd.sdk import Sandbox
    from tests.support.bakes import Bakes
    from tests.support.real_daemon import Daemon

pytestmark = [REAL, pytest.mark.soak(only=True), pytest.mark.timeout(600)]

MIB = 1 << 20
DISK_MIB = 768
ROOM_MIB = 24
"""What is left on the disk, for a snapshot of `BALLAST_MIB`."""

BALLAST_MIB = 64

LEARN = f"""
import os
thought = os.urandom({BALLAST_MIB} << 20)
"""


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A small file system of its own."""
    STATE_PARENT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="disk-", dir=STATE_PARENT) as name:
        image, folder = Path(name) / "image", Path(name) / "mounted"
        folder.mkdir()
        image.touch()
        os.truncate(image, DISK_MIB * MIB)
        run(["mkfs.ext4", "-q", "-F", "-m", "0", image], timeout_s=60)
        run(["mount", "-o", "loop", image, folder], timeout_s=60)
        try:
            yield folder
        finally:
            run(["umount", folder], timeout_s=60)


@pytest.fixture(scope="module")
def daemon(disk: Path, bakes: Bakes) -> Iterator[Daemon]:
    """A daemon with its state on that disk, and a base; it forks until the last byte is gone."""
    with running_daemon(bakes.of(RECIPE), disk, DiskPolicy(reserve_mib=0)) as made:
        yield made


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    """A client; whatever a test has made is gone afterwards."""
    with Client(daemon.url) as made:
        yield made
        for sandbox in made.sandboxes.list():
            sandbox.kill()
        for snapshot in made.snapshots.list():
            if snapshot.tag != TAG:
                made.snapshots.delete(snapshot.tag)
    assert daemon.left() == []


@pytest.fixture
def source(client: Client) -> Sandbox:
    """A sandbox with more to be written than there is room."""
    (made,) = client.fork(TAG)
    made.eval(LEARN).check()
    return made


@contextlib.contextmanager
def filled(disk: Path, *, room_bytes: int) -> Iterator[None]:
    """Let a disk have room for so much and no more, within the block."""
    filler = disk / "filler"
    try:
        with filler.open("wb") as file:
            while (left := free_bytes(disk) - room_bytes) > 0:
                try:
                    os.posix_fallocate(file.fileno(), filler.stat().st_size, left)
                except OSError:  # the file system wants some of it for itself
                    break
        yield
    finally:
        filler.unlink()


def free_bytes(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


def assert_nothing_is_left(daemon: Daemon, client: Client) -> None:
    """Check that there is only what was there before, and that the daemon knows it."""
    known = [each.info for each in client.sandboxes.list()]
    assert [each.tag for each in client.snapshots.list()] == [TAG]
    assert census.untrue(daemon, known) == []
    assert list((daemon.state / "writing").iterdir()) == []


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda source: source.snapshot("a"), id="snapshot"),
        pytest.param(lambda source: source.try_branch(1, tag="a"), id="branch"),
    ],
)
def test_a_snapshot_for_which_there_is_no_room_is_refused_whole_and_its_source_goes_on(
    write: Callable[[Sandbox], object], daemon: Daemon, client: Client, disk: Path, source: Sandbox
) -> None:
    before = source.eval("hash(thought)").check().value
    with source.exec_stream(["cat"], stdin=True) as stream:
        stream.write(b"before ")
        with filled(disk, room_bytes=ROOM_MIB * MIB):
            free = free_bytes(disk)
            with pytest.raises(CapacityError, match=r"no room for snapshot a.*snapshot gc"):
                write(source)

            assert_nothing_is_left(daemon, client)
            assert [each.id for each in client.sandboxes.list()] == [source.id]
            assert abs(free_bytes(disk) - free) < MIB
        stream.write(b"after")
        stream.close_stdin()
        assert b"".join(each.data for each in stream) == b"before after"
    assert source.eval("hash(thought)").check().value == before

    write(source)
    (child,) = client.fork("a")
    assert child.eval("hash(thought)").check().value == before


def test_a_snapshot_that_nobody_waits_for_says_afterwards_that_there_was_no_room(
    daemon: Daemon, client: Client, disk: Path, source: Sandbox
) -> None:
    with filled(disk, room_bytes=ROOM_MIB * MIB):
        source.snapshot("a", wait=False)
        with pytest.raises(ForkdError, match="no room for snapshot a"):
            client.fork("a")  # which waits for it

        assert client.snapshots.info("a").status == "failed"
        log = (daemon.run_dir / "log").read_text()
        assert 'snapshot failed tag=a error="the disk has no room for snapshot a' in log
        client.snapshots.delete("a")
        assert_nothing_is_left(daemon, client)


def test_on_a_disk_without_a_byte_left_what_runs_answers_and_can_be_removed(
    daemon: Daemon, client: Client, disk: Path, source: Sandbox
) -> None:
    source.snapshot("a")
    with filled(disk, room_bytes=0):
        with pytest.raises(CapacityError, match="no room"):
            source.snapshot("b")
        assert source.eval("len(thought)").check().value == BALLAST_MIB * MIB
        source.kill()
        client.snapshots.delete("a")  # the way out
        assert_nothing_is_left(daemon, client)

        (sandbox,) = client.fork(TAG)
        assert sandbox.eval("6 * 7").check().value == 42
