"""Only what the VMM can load counts as a kernel, and the newest of Debian's is used."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from forkd.errors import BuildError, InvalidRequest
from forkd.images.kernel import (
    given_kernel,
    is_debian,
    newest_cached,
    newest_of,
    series_of,
    why_no_kernel,
)
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

    assert parse_parts(record, release) == tuple(
        f"linux-{part}-{release}" for part in ("base", "binary", "modules")
    )
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


def test_kernels_of_a_series_are_kept_apart_from_the_host_s_own(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path)
    for name in ("6.1.0-56-amd64_6.1.192-2", "6.12/6.12.118-amd64_6.12.118-1", "7/7.3-amd64_7.3-1"):
        (cache.kernels / name).mkdir(parents=True)
        (cache.kernels / name / "vmlinuz").touch()

    found = {series: newest_cached(cache, series) for series in (None, "6.12", "7", "6.1")}

    assert {series: kernel.version if kernel else None for series, kernel in found.items()} == {
        None: "6.1.0-56-amd64_6.1.192-2",
        "6.12": "6.12.118-amd64_6.12.118-1",
        "7": "7.3-amd64_7.3-1",
        "6.1": None,
    }


def record(release: str, version: str) -> str:
    return f"Package: linux-image-amd64\nDepends: linux-image-{release} (= {version})\n"


RECORDS = [
    record("7.3.4+deb13-amd64", "7.3.4-1~bpo13+1"),
    record("6.12.117+deb13-amd64", "6.12.117-1"),
    record("6.12.118+deb13-amd64", "6.12.118-1"),
    record("6.1.0-56-amd64", "6.1.192-2"),
    "Package: linux-image-amd64\n",
]


@pytest.mark.parametrize(
    ("series", "release"),
    [
        ("6.12", "6.12.118+deb13-amd64"),
        ("6.12.117", "6.12.117+deb13-amd64"),
        ("6.1", "6.1.0-56-amd64"),
        ("7", "7.3.4+deb13-amd64"),
        ("6", "6.12.118+deb13-amd64"),
        (None, "7.3.4+deb13-amd64"),
        ("6.11", None),
        ("6.12.11", None),
        ("61", None),
    ],
)
def test_the_newest_of_a_series_is_chosen_and_numbers_match_whole(
    series: str | None, release: str | None
) -> None:
    found = newest_of(series, RECORDS)

    assert (found[0] if found else None) == release


@pytest.mark.parametrize("named", ["debian", "6.12", "7", "6.1.192"])
def test_what_names_a_kernel_of_debian(named: str) -> None:
    assert is_debian(named)


@pytest.mark.parametrize(
    "named", ["./6.12", "vmlinuz", "6.12-rc1", "6.", "06", "", "6.1.1.1", "v7"]
)
def test_anything_else_is_a_path(named: str) -> None:
    assert not is_debian(named)


def test_the_variable_says_which_series_debian_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORKD_KERNEL", raising=False)
    assert series_of("debian") is None
    monkeypatch.setenv("FORKD_KERNEL", "6.12")
    assert (series_of("debian"), series_of("7")) == ("6.12", "7")
    monkeypatch.setenv("FORKD_KERNEL", "newest")
    with pytest.raises(InvalidRequest, match=r"FORKD_KERNEL is 'newest': .*such as 6\.12"):
        series_of("debian")
