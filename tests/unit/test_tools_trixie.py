"""How packages of Debian 13 are chosen, and how their programs are started."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from forkd.errors import HostError
from tools import qemu, trixie

ANY = trixie.Program("Bochs", ("bochs",), re.compile(r"(?:bochs|lib|zlib).*"))

TARGETS = """\
http://archive.test/security/|Debian-Security|main
http://archive.test/debian/|Debian|contrib
http://archive.test/debian/|Debian|main
http://other.test/debian/|Debian|main
"""


def test_packages_come_from_where_apt_has_debian_from() -> None:
    assert trixie.debian_archive(TARGETS) == "http://archive.test/debian/"


def test_a_host_without_debians_archive_is_told_so() -> None:
    with pytest.raises(HostError, match="no archive of Debian's"):
        trixie.debian_archive("http://archive.test/ubuntu/|Ubuntu|main\n")


def test_apt_keeps_all_it_has_in_its_own_folder() -> None:
    settings = trixie.apt_settings(Path("/partial/apt"))

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

    assert trixie.to_install(simulated, ANY.unpacked) == ["libc6", "zlib1g", "bochs"]


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    said: list[str] = []

    assert trixie.fetch(tmp_path, ANY, said.append) == tmp_path
    assert said == []


def test_a_program_runs_through_the_loader_that_came_with_it() -> None:
    loader, option, libraries, name = trixie.command(Path("/b"), "bochs-bin")

    assert (loader, option) == ("/b/usr/lib64/ld-linux-x86-64.so.2", "--library-path")
    assert libraries == "/b/usr/lib/x86_64-linux-gnu"
    assert name == "/b/usr/bin/bochs-bin"


def test_qemu_runs_with_the_firmware_that_came_with_it_and_passes_all_arguments_on() -> None:
    first, second = qemu.script(Path("/a b/qemu")).splitlines()
    words = shlex.split(second)

    assert first == "#!/bin/sh"
    assert words[0] == "QEMU_MODULE_DIR=/a b/qemu/usr/lib/x86_64-linux-gnu/qemu"
    assert words[1] == "exec"
    assert words.count("-L") == 2
    assert "/a b/qemu/usr/share/seabios" in words
    assert words[-1] == "$@"
