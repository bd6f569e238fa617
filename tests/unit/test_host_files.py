"""Files appear whole or not at all, and locks exclude each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Event
from typing import TYPE_CHECKING

import pytest

from forkd.errors import HostError
from forkd.host import files

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_is_replaced_with_its_mode_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    files.write_atomic(path, b"new", mode=0o600)

    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.mkdir()
    (path / "inside").touch()

    with pytest.raises(HostError, match="directory"):
        files.write_atomic(path, b"new")

    assert list(tmp_path.iterdir()) == [path]


def test_a_published_folder_has_its_name(tmp_path: Path) -> None:
    aside = tmp_path / "aside"
    aside.mkdir()
    (aside / "file").write_bytes(b"x")

    files.publish(aside, tmp_path / "final")

    assert (tmp_path / "final" / "file").read_bytes() == b"x"
    assert not aside.exists()


def test_a_copy_has_the_contents_and_the_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.write(b"first")
        file.seek(64 << 20)
        file.write(b"last")
        file.truncate(128 << 20)

    files.copy_sparse(source, target)

    assert target.stat().st_size == 128 << 20
    assert target.stat().st_blocks * 512 < 1 << 20
    assert target.read_bytes() == source.read_bytes()


def test_an_empty_file_and_one_that_is_all_hole_are_copied(tmp_path: Path) -> None:
    for size_bytes in (0, 1 << 20):
        source = tmp_path / f"source-{size_bytes}"
        source.touch()
        with source.open("r+b") as file:
            file.truncate(size_bytes)

        files.copy_sparse(source, tmp_path / f"target-{size_bytes}")

        assert (tmp_path / f"target-{size_bytes}").read_bytes() == bytes(size_bytes)


def test_a_copy_does_not_replace(tmp_path: Path) -> None:
    for name in ("source", "target"):
        (tmp_path / name).touch()

    with pytest.raises(HostError, match="File exists"):
        files.copy_sparse(tmp_path / "source", tmp_path / "target")


def test_a_lock_excludes_until_it_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    with files.lock(path), files.try_lock(path) as mine:
        assert not mine
    with files.try_lock(path) as mine, files.try_lock(path) as other:
        assert (mine, other) == (True, False)


def test_a_lock_is_not_taken_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(HostError, match="symbolic links"), files.lock(tmp_path / "lock"):
        pass


def test_a_tree_goes_and_what_its_links_lead_to_stays(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "link").symlink_to(kept)

    files.remove_tree(tree)
    files.remove_tree(tree)

    assert list(tmp_path.iterdir()) == [kept]


def test_a_link_to_a_tree_is_removed_itself(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "link").symlink_to(kept)

    files.remove_tree(tmp_path / "link")

    assert list(tmp_path.iterdir()) == [kept]


def test_a_folder_goes_although_somebody_still_makes_files_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "staged"
    folder.mkdir()
    begun = Event()

    def write() -> int:
        for number in count():
            try:
                (folder / str(number)).touch()
            except FileNotFoundError:
                return number
            begun.set()
        raise AssertionError

    with ThreadPoolExecutor() as pool:
        made = pool.submit(write)
        assert begun.wait(10)
        files.remove_from_under(folder)
        assert made.result(10) > 0

    assert list(tmp_path.iterdir()) == []
    files.remove_from_under(folder)
