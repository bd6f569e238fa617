"""The initramfs holds the agent and the modules in an order in which they load."""

from __future__ import annotations

import gzip
import lzma
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.errors import BuildError
from forkd.host import process
from forkd.images import compressed, initramfs
from forkd.images.initramfs import archive_entries, load_order, parse_dependencies
from forkd.images.kernel import Kernel
from forkd.images.layout import Cache
from forkd.images.steps import Build

if TYPE_CHECKING:
    from collections.abc import Callable

DEPENDENCIES = parse_dependencies(
    "kernel/fs/ext4/ext4.ko: kernel/lib/crc16.ko kernel/fs/jbd2/jbd2.ko\n"
    "kernel/fs/jbd2/jbd2.ko: kernel/lib/crc16.ko\n"
    "kernel/lib/crc16.ko:\n"
    "kernel/drivers/char/hw_random/virtio-rng.ko: kernel/drivers/virtio/virtio.ko\n"
    "kernel/drivers/virtio/virtio.ko:\n"
)

STATIC_ELF = b"\x7fELF\x02".ljust(64, b"\0")


def dynamic_elf() -> bytes:
    header = bytearray(STATIC_ELF)
    header[32:40] = (64).to_bytes(8, "little")
    header[54:56], header[56:58] = (56).to_bytes(2, "little"), (1).to_bytes(2, "little")
    return bytes(header) + (3).to_bytes(4, "little") + bytes(52)


def test_each_module_comes_after_what_it_needs() -> None:
    order = load_order(["ext4"], DEPENDENCIES, frozenset())

    assert [Path(path).stem for path in order] == ["crc16", "jbd2", "ext4"]


def test_a_module_is_loaded_once_and_found_with_either_dash() -> None:
    order = load_order(["virtio", "virtio_rng", "virtio"], DEPENDENCIES, frozenset())

    assert [Path(path).stem for path in order] == ["virtio", "virtio-rng"]


def test_what_is_built_in_is_not_loaded() -> None:
    assert load_order(["overlay"], DEPENDENCIES, frozenset({"overlay"})) == []


def test_a_missing_module_is_named() -> None:
    with pytest.raises(BuildError, match="no module overlay"):
        load_order(["overlay"], DEPENDENCIES, frozenset())


@pytest.mark.parametrize("text", ["a.ko: b.ko\nb.ko: a.ko\n", "a.ko: b.ko\n"])
def test_a_damaged_table_of_dependencies_is_refused(text: str) -> None:
    with pytest.raises(BuildError, match=r"modules\.dep"):
        load_order(["a"], parse_dependencies(text), frozenset())


def test_the_list_of_modules_follows_the_order_of_loading() -> None:
    entries = archive_entries(b"agent", {"b.ko": b"2", "a.ko": b"1"})
    by_name = {entry.name: entry for entry in entries}

    assert by_name["etc/forkd/modules"].data == b"/lib/modules/b.ko\n/lib/modules/a.ko\n"
    assert by_name["lib/modules/a.ko"].data == b"1"
    assert (by_name["init"].data, by_name["init"].mode & 0o777) == (b"agent", 0o755)


def test_every_folder_comes_before_what_is_in_it() -> None:
    seen = {""}
    for entry in archive_entries(b"agent", {"a.ko": b""}):
        assert str(Path(entry.name).parent).removeprefix(".") in seen
        seen.add(entry.name)


def kernel_without_modules() -> Kernel:
    return Kernel("custom", Path("/nowhere"), None)


def test_another_agent_gives_another_initramfs_and_the_same_one_the_same(tmp_path: Path) -> None:
    cache, agent = Cache.open(tmp_path / "cache"), tmp_path / "agent"

    agent.write_bytes(STATIC_ELF)
    first = initramfs.build_initramfs(kernel_without_modules(), agent, cache, Build())
    again = initramfs.build_initramfs(kernel_without_modules(), agent, cache, Build())
    agent.write_bytes(STATIC_ELF + b"x")
    other = initramfs.build_initramfs(kernel_without_modules(), agent, cache, Build())

    assert first == again != other
    assert first.read_bytes() != other.read_bytes()


def test_a_new_agent_takes_the_place_of_those_that_are_not_used_any_more(tmp_path: Path) -> None:
    cache, agent = Cache.open(tmp_path / "cache"), tmp_path / "agent"

    def build(version: bytes) -> Path:
        agent.write_bytes(STATIC_ELF + version)
        return initramfs.build_initramfs(kernel_without_modules(), agent, cache, Build())

    idle, used = build(b"1"), build(b"2")
    os.utime(idle, (1, 1))
    new = build(b"3")
    assert sorted(cache.initramfs.iterdir()) == sorted([used, new])

    os.utime(new, (1, 1))
    assert initramfs.unused(cache, agent) == ()
    assert build(b"3") == new
    assert new.stat().st_mtime > 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"#!/bin/sh\n", "not a 64-bit ELF program"),
        (dynamic_elf(), "linked dynamically"),
        (bytes(initramfs.AGENT_BYTES_MAX + 1), "larger than"),
    ],
)
def test_an_agent_that_could_not_run_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    agent = tmp_path / "agent"
    agent.write_bytes(data)

    with pytest.raises(BuildError, match=words):
        initramfs.build_initramfs(
            kernel_without_modules(), agent, Cache.open(tmp_path / "cache"), Build()
        )


def test_a_missing_agent_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no agent at"):
        initramfs.build_initramfs(
            kernel_without_modules(), tmp_path / "none", Cache.open(tmp_path), Build()
        )


def put_modules(folder: Path, suffix: str, *, without: str = "") -> None:
    """Put what a guest needs into a folder of modules, packed as the suffix says."""
    packers: dict[str, Callable[[bytes], bytes]]
    packers = {".xz": lzma.compress, ".gz": gzip.compress, "": bytes}
    names = [name for name in initramfs.MODULES if name != without]
    for name in names:
        (folder / f"{name}.ko{suffix}").write_bytes(packers[suffix](name.encode()))
    (folder / "modules.dep").write_text("".join(f"{name}.ko{suffix}:\n" for name in names))


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz"])
def test_modules_may_be_compressed(tmp_path: Path, suffix: str) -> None:
    put_modules(tmp_path, suffix)

    modules = initramfs.read_modules(tmp_path)

    assert modules["ext4.ko"] == b"ext4"
    assert [name.removesuffix(".ko") for name in modules] == list(initramfs.MODULES)


@pytest.mark.parametrize("suffix", [".xz", ".gz"])
def test_a_damaged_module_is_named(tmp_path: Path, suffix: str) -> None:
    put_modules(tmp_path, suffix)
    (tmp_path / f"ext4.ko{suffix}").write_bytes(b"damaged")

    with pytest.raises(BuildError, match=rf"/ext4\.ko{suffix} is damaged: "):
        initramfs.read_modules(tmp_path)


def test_a_module_larger_than_any_is_refused_unpacked(tmp_path: Path) -> None:
    put_modules(tmp_path, ".xz")
    large = lzma.compress(bytes(compressed.MODULE_BYTES_MAX + 1), preset=0)
    (tmp_path / "ext4.ko.xz").write_bytes(large)

    with pytest.raises(BuildError, match=r"ext4\.ko\.xz is larger than 67108864 bytes"):
        initramfs.read_modules(tmp_path)


def test_a_module_that_is_listed_and_missing_is_named(tmp_path: Path) -> None:
    put_modules(tmp_path, "")
    (tmp_path / "ext4.ko").unlink()

    with pytest.raises(BuildError, match=r"module .*/ext4\.ko is missing"):
        initramfs.read_modules(tmp_path)


def test_a_host_without_zstd_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "installed", lambda _: False)
    path = tmp_path / "ext4.ko.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd")

    with pytest.raises(BuildError, match=r"ext4\.ko\.zst is packed with zstd: install"):
        compressed.read_module(path)


def test_what_newer_kernels_lack_is_left_out(tmp_path: Path) -> None:
    put_modules(tmp_path, "", without="crc32c_generic")

    assert "crc32c_generic.ko" not in initramfs.read_modules(tmp_path)


def test_a_kernel_without_the_machines_devices_is_refused_with_the_reason(tmp_path: Path) -> None:
    put_modules(tmp_path, "", without="virtio_mmio")

    with pytest.raises(BuildError, match=r"no module virtio_mmio.*cannot boot.*RHEL"):
        initramfs.read_modules(tmp_path)


def test_the_machines_devices_may_be_built_in(tmp_path: Path) -> None:
    put_modules(tmp_path, "", without="virtio_mmio")
    (tmp_path / "modules.builtin").write_text("kernel/drivers/virtio/virtio_mmio.ko\n")

    assert "virtio_mmio.ko" not in initramfs.read_modules(tmp_path)
