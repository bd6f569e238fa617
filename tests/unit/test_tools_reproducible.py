"""What `make reproducible` finds between two folders of programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tools import reproducible

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    both = tmp_path / "one", tmp_path / "two"
    for folder in both:
        folder.mkdir()
        (folder / "forkd-vmm").write_bytes(b"the same bytes")
    return both


def test_equal_programs_have_no_differences(folders: tuple[Path, Path]) -> None:
    assert reproducible.differences(*folders) == []


def test_a_changed_byte_is_found_and_where_it_is(folders: tuple[Path, Path]) -> None:
    (folders[1] / "forkd-vmm").write_bytes(b"the same_bytes")

    assert reproducible.differences(*folders) == [
        "forkd-vmm differs from byte 8 on (14 and 14 bytes)"
    ]


def test_a_program_that_only_one_build_made_is_found(folders: tuple[Path, Path]) -> None:
    (folders[0] / "forkd-agent").write_bytes(b"")

    assert reproducible.differences(*folders) == [f"forkd-agent is not in {folders[1]}"]


def test_a_build_that_fails_is_said_with_what_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_folder: Path, _environment: dict[str, str], *, umask: int) -> None:
        raise reproducible.CannotBuild(f"no linker ({umask})")

    monkeypatch.setattr(reproducible, "WORK", tmp_path / "work")
    monkeypatch.setattr(reproducible, "_cargo_home", lambda: tmp_path)
    monkeypatch.setattr(reproducible, "build", fail)

    assert reproducible.main() == 1
    assert capsys.readouterr().err == "reproducible: a build failed:\nno linker (18)\n"
