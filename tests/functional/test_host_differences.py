"""What one folder has that another lacks is written as an archive, and nothing else."""

from __future__ import annotations

import os
import tarfile
from typing import TYPE_CHECKING

import pytest

from forkd.errors import HostError
from forkd.host.differences import write_differences, write_files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders that are alike."""
    made = tmp_path / "tree", tmp_path / "base"
    for each in made:
        (each / "etc").mkdir(parents=True)
        (each / "etc" / "same").write_text("same")
        (each / "etc" / "link").symlink_to("same")
    return made


def written(tree: Path, base: Path, output: Path) -> dict[str, tarfile.TarInfo]:
    write_differences(tree, base, output)
    with tarfile.open(output) as archive:
        return {each.name: each for each in archive}


def test_folders_that_are_alike_have_no_differences(
    trees: tuple[Path, Path], tmp_path: Path
) -> None:
    os.utime(trees[0] / "etc" / "same", (1, 1))
    (trees[1] / "gone").write_text("only there")
    assert written(*trees, tmp_path / "out") == {}


def test_what_is_new_or_changed_is_written_with_its_permissions(
    trees: tuple[Path, Path], tmp_path: Path
) -> None:
    tree, base = trees
    (tree / "new").mkdir(mode=0o750)
    (tree / "new" / "file").write_text("text")
    (tree / "new" / "file").chmod(0o4755)
    os.link(tree / "new" / "file", tree / "new" / "twin")
    (tree / "etc" / "same").write_text("diff")
    (tree / "etc" / "link").unlink()
    (tree / "etc" / "link").symlink_to("/elsewhere")
    os.mkfifo(tree / "pipe")
    (tree / "mode").write_text("1")
    (base / "mode").write_text("1")
    (base / "mode").chmod(0o600)

    found = written(tree, base, tmp_path / "out")
    assert list(found) == ["etc/link", "etc/same", "mode", "new", "new/file", "new/twin"]
    assert (found["new/file"].mode, found["new"].mode) == (0o4755, 0o750)
    assert found["etc/link"].linkname == "/elsewhere"
    assert found["new/twin"].isreg()
    with tarfile.open(tmp_path / "out") as archive:
        for name in ("new/file", "new/twin"):
            member = archive.extractfile(name)
            assert member is not None
            assert member.read() == b"text"


def test_what_changes_its_kind_is_said(trees: tuple[Path, Path], tmp_path: Path) -> None:
    tree, base = trees
    (tree / "etc" / "link").unlink()
    (tree / "etc" / "link").mkdir()
    (tree / "etc" / "link" / "inner").write_text("1")
    (base / "was").mkdir()
    (base / "was" / "inner").write_text("1")
    (tree / "was").write_text("a file now")
    assert write_differences(tree, base, tmp_path / "out") == ("etc/link", "was")


def test_names_are_bytes(trees: tuple[Path, Path], tmp_path: Path) -> None:
    tree, base = trees
    (tree / os.fsdecode(b"\xff\n")).write_text("1")
    assert list(written(tree, base, tmp_path / "out")) == [os.fsdecode(b"\xff\n")]


def test_files_alone_are_root_s_and_have_no_folders(tmp_path: Path) -> None:
    (tmp_path / "tree" / "srv").mkdir(parents=True)
    (tmp_path / "tree" / "srv" / "file").write_text("1")
    write_files(tmp_path / "tree", tmp_path / "out")
    with tarfile.open(tmp_path / "out") as archive:
        (member,) = archive
    assert (member.name, member.uid, member.gid) == ("srv/file", 0, 0)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="tree"):
        write_differences(tmp_path / "tree", tmp_path, tmp_path / "out")
