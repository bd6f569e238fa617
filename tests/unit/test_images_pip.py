"""The image's version of Python is found without running it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from forkd.errors import BuildError
from forkd.images.pip import image_python


def program(root: Path, name: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_debians_python_takes_packages_beside_its_own(tmp_path: Path) -> None:
    program(tmp_path, "usr/bin/python3.11")
    (tmp_path / "usr/bin/python3").symlink_to("python3.11")

    expected = PurePosixPath("/usr/local/lib/python3.11/dist-packages")
    assert image_python(tmp_path) == ("3.11", expected)


def test_a_python_of_its_own_comes_first_as_it_does_in_the_path(tmp_path: Path) -> None:
    program(tmp_path, "usr/bin/python3.11")
    (tmp_path / "usr/bin/python3").symlink_to("python3.11")
    program(tmp_path, "usr/local/bin/python3.13")
    (tmp_path / "usr/local/bin/python3").symlink_to("/usr/local/bin/python3.13")

    expected = PurePosixPath("/usr/local/lib/python3.13/site-packages")
    assert image_python(tmp_path) == ("3.13", expected)


@pytest.mark.parametrize("target", [None, "python3", "../../../../bin/sh"])
def test_without_a_python_there_is_one_clear_error(tmp_path: Path, target: str | None) -> None:
    if target is not None:
        (tmp_path / "usr/bin").mkdir(parents=True)
        (tmp_path / "usr/bin/python3").symlink_to(target)

    with pytest.raises(BuildError, match="need an image with python3"):
        image_python(tmp_path)
