"""How Bochs is fetched, and what it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkd.errors import HostError
from tests.intel import bochs

HARDWARE = bochs.Hardware(
    memory_mib=6144,
    disk=Path("/m/disk.img"),
    results=Path("/m/results.img"),
    console=Path("/m/console.log"),
    output=Path("/m/output"),
    log=Path("/m/bochs.log"),
)

TARGETS = """\
http://archive.test/security/|Debian-Security|main
http://archive.test/debian/|Debian|contrib
http://archive.test/debian/|Debian|main
http://other.test/debian/|Debian|main
"""


def test_bochs_comes_from_where_apt_has_debian_from() -> None:
    assert bochs.debian_archive(TARGETS) == "http://archive.test/debian/"


def test_a_host_without_debians_archive_is_told_so() -> None:
    with pytest.raises(HostError, match="no archive of Debian's"):
        bochs.debian_archive("http://archive.test/ubuntu/|Ubuntu|main\n")


def test_apt_keeps_all_it_has_in_its_own_folder() -> None:
    settings = bochs.apt_settings(Path("/partial/apt"))

    for name in ("State::Lists", "State::status", "Cache", "Etc::sourcelist"):
        assert f'Dir::{name} "/partial/apt/' in settings
    assert 'Dir::Etc::sourceparts "-"' in settings


def test_programs_and_libraries_are_unpacked_and_nothing_else() -> None:
    simulated = (
        "NOTE: This is only a simulation!\n"
        "Inst libc6 (2.41-12 Debian:13.2/stable [amd64])\n"
        "Inst systemd (257 Debian:13.2/stable [amd64])\n"
        "Inst zlib1g (1:1.3 Debian:13.2/stable [amd64])\n"
        "Inst bochs (3.0 Debian:13.2/stable [amd64])\n"
        "Conf libc6 (2.41-12 Debian:13.2/stable [amd64])\n"
    )

    assert bochs.to_install(simulated) == ["libc6", "zlib1g", "bochs"]


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    said: list[str] = []

    assert bochs.fetch(tmp_path, said.append) == tmp_path
    assert said == []


def test_a_program_runs_through_the_loader_that_came_with_it() -> None:
    loader, option, libraries, name = bochs.program(Path("/b"), "bochs-bin")

    assert (loader, option) == ("/b/usr/lib64/ld-linux-x86-64.so.2", "--library-path")
    assert libraries == "/b/usr/lib/x86_64-linux-gnu"
    assert name == "/b/usr/bin/bochs-bin"


def test_the_machine_boots_a_disk_that_it_does_not_change_and_writes_to_another() -> None:
    lines = bochs.configuration(Path("/b"), HARDWARE).splitlines()

    assert 'ata0-master: type=disk, mode=volatile, path="/m/disk.img"' in lines
    assert 'ata0-slave: type=disk, mode=flat, path="/m/results.img"' in lines
    assert 'com1: enabled=1, mode=file, dev="/m/console.log"' in lines
    assert 'com2: enabled=1, mode=file, dev="/m/output"' in lines


def test_the_counter_runs_at_the_rate_that_the_kernel_is_told() -> None:
    assert f"ips={bochs.CLOCK_KHZ}000," in bochs.configuration(Path("/b"), HARDWARE)


def test_bochs_holds_no_more_memory_than_it_can() -> None:
    assert "memory: guest=6144, host=2048\n" in bochs.configuration(Path("/b"), HARDWARE)
