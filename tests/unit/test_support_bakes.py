"""What tests on real machines start from, and may damage only as their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.bakes import Bake, unshare

if TYPE_CHECKING:
    from pathlib import Path

MEMORY = "snapshots/python-numpy/memory"


@pytest.fixture
def bake(tmp_path: Path) -> Bake:
    state = tmp_path / "baked"
    (state / MEMORY).parent.mkdir(parents=True)
    (state / MEMORY).write_bytes(b"as it was baked")
    (tmp_path / "rootfs.ext4").touch()
    (state / "images/key").mkdir(parents=True)
    (state / "images/key/rootfs.ext4").symlink_to(tmp_path / "rootfs.ext4")
    (state / "forkd.db").touch()
    return Bake(state)


def test_a_host_gets_what_is_stored_and_nothing_else(bake: Bake, tmp_path: Path) -> None:
    bake.copy_to(tmp_path / "host")

    assert sorted(path.name for path in (tmp_path / "host").iterdir()) == ["images", "snapshots"]
    assert (tmp_path / "host" / MEMORY).samefile(tmp_path / "baked" / MEMORY)
    image = tmp_path / "host/images/key/rootfs.ext4"
    assert image.readlink() == tmp_path / "rootfs.ext4"


def test_what_is_not_shared_may_be_damaged_and_removed(bake: Bake, tmp_path: Path) -> None:
    bake.copy_to(tmp_path / "host")
    unshare(tmp_path / "host" / MEMORY)
    (tmp_path / "host" / MEMORY).write_bytes(b"damaged")
    (tmp_path / "host/images/key/rootfs.ext4").unlink()

    bake.copy_to(tmp_path / "next")

    assert (tmp_path / "next" / MEMORY).read_bytes() == b"as it was baked"


def test_a_copy_of_what_was_changed_in_place_is_refused(bake: Bake, tmp_path: Path) -> None:
    bake.copy_to(tmp_path / "host")
    (tmp_path / "host" / MEMORY).write_bytes(b"not as it was baked")

    with pytest.raises(AssertionError, match=r"memory.* in place without `unshare`"):
        bake.copy_to(tmp_path / "next")
