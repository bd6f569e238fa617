"""Which wheel is built, and what goes into it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import hatch_build as build


def program(*, machine: int = 62, kinds: tuple[int, ...] = (1, 2)) -> bytes:
    """Return the headers of a program, with program headers of these kinds."""
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    sizes = (64, 56, len(kinds), 0, 0, 0)
    head = struct.pack("<16sHHIQQQIHHHHHH", ident, 3, machine, 1, 0, 64, 0, 0, *sizes)
    return head + b"".join(struct.pack("<IIQQQQQQ", kind, *[0] * 7) for kind in kinds)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with both programs, a recipe and a unit file."""
    for name in ("build/bin/forkd-vmm", "build/bin/forkd-agent"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(program())
    for name in ("recipes/a/recipe.toml", "recipes/a/__pycache__/x.pyc", "packaging/a.service"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


def test_a_built_checkout_makes_the_wheel_of_its_platform(root: Path) -> None:
    assert build.chosen("", root) == "platform"
    assert build.chosen("pure", root) == "pure"
    (root / "build/bin/forkd-agent").unlink()
    assert build.chosen("", root) == "pure"


def test_files_go_below_one_folder_and_leftovers_do_not(root: Path) -> None:
    found = {
        Path(name).relative_to(root).as_posix(): to for name, to in build.bundled(root).items()
    }
    assert found == {
        "build/bin/forkd-vmm": "forkd/bundled/bin/forkd-vmm",
        "build/bin/forkd-agent": "forkd/bundled/bin/forkd-agent",
        "recipes/a/recipe.toml": "forkd/bundled/recipes/a/recipe.toml",
        "packaging/a.service": "forkd/bundled/packaging/a.service",
    }


def test_an_unknown_kind_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match=r"^FORKD_WHEEL is platform or pure, not 'both'$"):
        build.chosen("both", root)


def test_a_missing_program_is_named(root: Path) -> None:
    (root / "build/bin/forkd-vmm").unlink()
    with pytest.raises(ValueError, match=r"^there is no .*/build/bin/forkd-vmm: run `make build`"):
        build.chosen("platform", root)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (program(kinds=(1, 3)), "is not static: run `make build`"),
        (program(machine=183), "is not for x86_64"),
        (b"#!/bin/sh\n", "is no program of 64 bits"),
        (program()[:20], "is no program of 64 bits"),
    ],
)
def test_a_program_that_does_not_run_everywhere_is_refused(
    data: bytes, why: str, root: Path
) -> None:
    (root / "build/bin/forkd-vmm").write_bytes(data)
    with pytest.raises(ValueError, match=rf"/build/bin/forkd-vmm {why}$"):
        build.chosen("", root)
