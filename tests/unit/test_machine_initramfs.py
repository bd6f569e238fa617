"""The archive that the helper machine starts from."""

from __future__ import annotations

import lzma
from typing import TYPE_CHECKING

import pytest

from forkd.errors import HostError
from forkd.machine import initramfs
from forkd.machine.initramfs import BOOT_MODULES, Archive, load_order

if TYPE_CHECKING:
    from pathlib import Path

MODULES_DEP = """\
kernel/fs/9p/9p.ko: kernel/net/9p/9pnet.ko kernel/fs/netfs/netfs.ko
kernel/net/9p/9pnet.ko:
kernel/fs/netfs/netfs.ko:
kernel/drivers/char/virtio-rng.ko: kernel/drivers/virtio.ko
kernel/drivers/virtio.ko:
"""


def test_dependencies_load_before_what_needs_them_and_once() -> None:
    assert load_order(MODULES_DEP, ["9p", "9pnet", "virtio_rng"]) == [
        "kernel/net/9p/9pnet.ko",
        "kernel/fs/netfs/netfs.ko",
        "kernel/fs/9p/9p.ko",
        "kernel/drivers/virtio.ko",
        "kernel/drivers/char/virtio-rng.ko",
    ]


def test_a_module_that_the_kernel_lacks_is_named() -> None:
    with pytest.raises(HostError, match="no module vfio"):
        load_order(MODULES_DEP, ["9p", "vfio"])


def test_a_module_that_newer_kernels_lack_is_left_out() -> None:
    assert load_order(MODULES_DEP, ["9pnet", "crc32c_generic"]) == ["kernel/net/9p/9pnet.ko"]
    assert load_order("a/crc32c-generic.ko:\n", ["crc32c_generic"]) == ["a/crc32c-generic.ko"]


def test_compressed_modules_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BOOT_MODULES:
        (tmp_path / f"{name}.ko.xz").write_bytes(lzma.compress(b"content of " + name.encode()))
    (tmp_path / "modules.dep").write_text("".join(f"{name}.ko.xz:\n" for name in BOOT_MODULES))
    (tmp_path / "busybox").write_bytes(b"busybox")
    monkeypatch.setattr(initramfs, "BUSYBOX_PATHS", (str(tmp_path / "busybox"),))

    data = initramfs.build_initramfs(tmp_path, {})

    assert b"content of ext4" in data
    assert b"modules/ext4.ko\0" in data
    assert b".xz" not in data


def test_what_is_built_in_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in BOOT_MODULES if name != "virtio_pci"]
    for name in names:
        (tmp_path / f"{name}.ko").write_bytes(b"x")
    (tmp_path / "modules.dep").write_text("".join(f"{name}.ko:\n" for name in names))
    (tmp_path / "busybox").write_bytes(b"busybox")
    monkeypatch.setattr(initramfs, "BUSYBOX_PATHS", (str(tmp_path / "busybox"),))
    with pytest.raises(HostError, match="no module virtio_pci"):
        initramfs.build_initramfs(tmp_path, {})

    (tmp_path / "modules.builtin").write_text("kernel/drivers/virtio/virtio_pci.ko\n")

    assert b"virtio_pci" not in initramfs.build_initramfs(tmp_path, {})


def test_members_of_the_archive_are_aligned_and_the_trailer_ends_it() -> None:
    archive = Archive()
    archive.folder("bin")
    archive.file("bin/a", b"12345", mode=0o755)
    archive.link("bin/b", "a")
    data = archive.finish()

    assert data.startswith(b"070701")
    assert data.find(b"12345") % 4 == 0
    assert data.rstrip(b"\0").endswith(b"TRAILER!!!")
    assert all(data.find(name) % 4 == 2 for name in (b"bin\0", b"bin/a\0", b"bin/b\0"))
