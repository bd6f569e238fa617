"""Folders that a user who may be hostile has had."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from forkd.errors import HostError
from forkd.host import ownership

NOBODY = 65_534

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_folder_is_taken_back_with_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "staged"
    folder.mkdir(mode=0o777)
    (folder / "memory").write_bytes(b"kept")
    (folder / "memory").chmod(0o4777)

    ownership.take_back(folder)

    assert folder.stat().st_mode & 0o7777 == 0o700
    found = (folder / "memory").stat()
    assert (found.st_mode & 0o7777, found.st_uid) == (0o600, os.geteuid())


@pytest.mark.parametrize(
    "plant",
    [
        lambda path, other: path.symlink_to(other),
        lambda path, other: path.hardlink_to(other),
        lambda path, _: os.mkfifo(path),
        lambda path, _: path.mkdir(),
    ],
    ids=["link", "name of another's", "fifo", "folder"],
)
def test_what_is_no_file_of_its_own_is_not_taken_back(
    plant: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    folder, other = tmp_path / "staged", tmp_path / "other"
    folder.mkdir()
    other.write_bytes(b"")
    other.chmod(0o644)
    plant(folder / "memory", other)

    with pytest.raises(HostError, match="is no file of its own"):
        ownership.take_back(folder)

    assert other.stat().st_mode & 0o777 == 0o644


def test_a_folder_in_the_place_of_which_a_link_was_put_is_not_taken_back(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o755)
    (tmp_path / "staged").symlink_to(tmp_path / "other")

    with pytest.raises(HostError):
        ownership.take_back(tmp_path / "staged")

    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o755


@pytest.mark.needs("root")
def test_what_is_no_file_of_its_own_is_not_taken_back_from_folders_either(tmp_path: Path) -> None:
    folder = tmp_path / "given"
    (folder / "0").mkdir(parents=True)
    for name in ("image", "0/state"):
        (folder / name).write_bytes(b"x")
        ownership.give(folder / name, NOBODY)
    ownership.give(folder / "0", NOBODY)
    ownership.give(folder, NOBODY)

    ownership.take_tree_back(folder)

    assert {each.stat().st_uid for each in (folder, *folder.rglob("*"))} == {0}
    for bad in ("0/link", "link"):
        (folder / bad).symlink_to("/etc/passwd")
        with pytest.raises(HostError, match="no file of its own"):
            ownership.take_tree_back(folder)
        (folder / bad).unlink()
    (folder / "0" / "deeper").mkdir()
    with pytest.raises(HostError, match="no file of its own"):
        ownership.take_tree_back(folder)
