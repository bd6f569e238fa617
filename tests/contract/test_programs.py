"""The programs that are shipped have nothing in them of whoever built them."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from tests.support.docs import ROOT

PROGRAMS = ("forkd-vmm", "forkd-agent", "forkd-floor", "forkd-witness", "forkd-captive")

INTERPRETER = 3
"""The type of the segment that names a program's dynamic linker."""

pytestmark = pytest.mark.needs("binaries")


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_path_of_the_builder_is_in_a_program(name: str) -> None:
    data = (ROOT / "build/bin" / name).read_bytes()
    cargo_home = os.environ.get("CARGO_HOME") or Path.home() / ".cargo"

    for path in (ROOT / "crates", cargo_home, Path.home() / ".rustup"):
        assert os.fsencode(path) + b"/" not in data


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_build_id_is_in_a_program(name: str) -> None:
    assert b".note.gnu.build-id\0" not in (ROOT / "build/bin" / name).read_bytes()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_needs_no_library_and_no_interpreter(name: str) -> None:
    """So that it runs on any Linux, with whichever C library."""
    assert INTERPRETER not in segments((ROOT / "build/bin" / name).read_bytes())


def segments(data: bytes) -> list[int]:
    """Return the types of a 64-bit ELF file's segments."""
    (start,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    return [struct.unpack_from("<I", data, start + size * number)[0] for number in range(count)]
