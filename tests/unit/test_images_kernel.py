"""Only what the VMM can load counts as a kernel, and the newest of Debian's is used."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from forkd.errors import BuildError
from forkd.images.kernel import given_kernel, newest_cached, why_no_kernel
from forkd.images.kernel_packages import parse_dependency, parse_parts
from forkd.images.layout import Cache

if TYPE_CHECKING:
    from pathlib import Path


def bzimage(protocol: int = 0x020F) -> bytes:
    return bytes(0x202) + b"HdrS" + struct.pack("<H", protocol) + bytes(64)


def elf(bits: int = 2, machine: int = 62) -> bytes:
    return b"\x7fELF" + bytes([bits]) + bytes(11) + struct.pack("<HH", 2, machine) + bytes(44)


@pytest.mark.parametrize("head", [bzimage(), bzimage(0x020C), elf()])
def test_a_bzimage_and_a_64_bit_vmlinux_are_kernels(head: bytes) -> None:
    assert why_no_kernel(head) is None


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"", "neither a bzImage nor an ELF"),
        (b"#!/bin/sh\n" * 100, "neither a bzImage nor an ELF"),
        (bzimage()[:0x205], "neither a bzImage nor an ELF"),
        (bzimage(0x020B), "older than 2.12"),
        (elf(bits=1), "not for 64-bit x86"),
        (elf(machine=183), "not for 64-bit x86"),
        (b"\x7fELF", "cut short"),
    ],
)
def test_anything_else_is_no_kernel_and_the_reason_says_why(head: bytes, words: str) -> None:
    assert words in (why_no_kernel(head) or "")


def test_a_kernel_that_is_no_kernel_ends_in_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "vmlinuz"
    path.write_bytes(b"not a kernel")

    with pytest.raises(BuildError, match=r"vmlinuz is no kernel: it is neither"):
        given_kernel(path, None)


def test_a_missing_kernel_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no kernel at .*/vmlinuz"):
        given_kernel(tmp_path / "vmlinuz", None)


def test_modules_without_a_table_of_dependencies_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "vmlinuz"
    path.write_bytes(bzimage())

    with pytest.raises(BuildError, match="run depmod"):
        given_kernel(path, tmp_path)


def test_the_release_is_read_from_what_the_meta_package_depends_on() -> None:
    record = (
        "Package: linux-image-amd64\nVersion: 6.1.176-1\n"
        "Depends: linux-image-6.1.0-56-amd64 (= 6.1.192-2)\nDescription: x\n"
    )

    assert parse_dependency(record) == ("6.1.0-56-amd64", "6.1.192-2")
    assert parse_dependency("Package: linux-image-amd64\n") is None


def test_the_parts_of_a_kernel_in_several_packages_are_read_from_its_record() -> None:
    release, version = "7.3.4+deb13-amd64", "7.3.4-1~bpo13+1"
    record = (
        f"Package: linux-image-{release}\nVersion: {version}\n"
        f"Depends: kmod | x, linux-base-{release} (= {version}), "
        f"linux-binary-{release} (= {version}), linux-modules-{release} (= {version})\n"
    )

    assert parse_parts(record, release) == (f"linux-binary-{release}", f"linux-modules-{release}")
    assert parse_parts("Package: x\nDepends: kmod, linux-base (>= 4.3)\n", release) == ()
    assert parse_parts("Package: x\n", release) == ()


def test_the_newest_cached_kernel_is_used_and_unfinished_ones_are_not(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path)
    assert newest_cached(cache) is None
    for name in ("6.1.0-9-amd64_6.1.27-1", "6.1.0-56-amd64_6.1.192-2", ".partial-7.0-amd64_7.0-1"):
        (cache.kernels / name).mkdir()
        (cache.kernels / name / "vmlinuz").touch()

    newest = newest_cached(cache)

    assert newest is not None
    assert newest.version == "6.1.0-56-amd64_6.1.192-2"
