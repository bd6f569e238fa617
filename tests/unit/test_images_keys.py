"""An image's key changes with everything that goes into it, and with nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from forkd.errors import BuildError
from forkd.images import keys
from forkd.images.recipe import parse_recipe

if TYPE_CHECKING:
    from pathlib import Path

BASE: dict[str, Any] = {
    "name": "x",
    "image": {"debian": {"packages": ["bash", "python3"]}},
    "files": [{"source": "data", "target": "/srv/data"}],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one").write_text("1")
    return tmp_path


def key(folder: Path, **more: object) -> str:
    return keys.image_key(parse_recipe({**BASE, **more}, folder=folder))


@pytest.mark.parametrize(
    "more",
    [
        {"name": "y"},
        {"description": "words"},
        {"machine": {"vcpus": 2, "memory_mib": 1024, "cmdline": "quiet"}},
        {"warmup": {"runtime": "python", "code": "import json", "timeout_s": 3}},
        {"image": {"debian": {"packages": ["python3", "bash", "bash"]}}},
    ],
)
def test_what_does_not_reach_the_root_file_system_keeps_the_key(
    folder: Path, more: dict[str, object]
) -> None:
    assert key(folder, **more) == key(folder)


@pytest.mark.parametrize(
    "more",
    [
        {"image": {"debian": {"packages": ["bash"]}}},
        {"image": {"debian": {"packages": ["bash", "python3"], "suite": "trixie"}}},
        {"image": {"debian": {"packages": ["bash", "python3"], "variant": "standard"}}},
        {"image": {"oci": "docker://python:3.12"}},
        {"files": [{"source": "data", "target": "/srv/other"}]},
        {"files": [{"source": "data", "target": "/srv/data", "mode": 0o600}]},
        {"files": []},
        {"pip": {"requirements": ["six"]}},
        {"env": {"A": "1"}},
        {"cwd": "/srv"},
        {"user": "nobody"},
        {"warmup": {"post_fork_command": ["true"]}},
        {"machine": {"disk_mib": 4096}},
    ],
)
def test_what_reaches_the_root_file_system_changes_the_key(
    folder: Path, more: dict[str, object]
) -> None:
    assert key(folder, **more) != key(folder)


def test_a_changed_added_or_executable_file_changes_the_key(folder: Path) -> None:
    seen = {key(folder)}

    (folder / "data" / "one").write_text("2")
    seen.add(key(folder))
    (folder / "data" / "two").write_text("")
    seen.add(key(folder))
    (folder / "data" / "two").chmod(0o755)
    seen.add(key(folder))

    assert len(seen) == 4


def test_a_new_builder_builds_everything_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(folder)

    monkeypatch.setattr(keys, "BUILDER_VERSION", keys.BUILDER_VERSION + 1)

    assert key(folder) != before


def test_another_way_to_install_requirements_is_another_image_where_there_are_any(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(folder), key(folder, pip={"requirements": ["six"]})

    monkeypatch.setattr(keys, "PIP_VERSION", keys.PIP_VERSION + 1)

    after = key(folder), key(folder, pip={"requirements": ["six"]})
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


def test_a_local_image_counts_by_its_contents(folder: Path) -> None:
    rootfs, layout = folder / "r.ext4", folder / "layout"
    rootfs.write_bytes(b"a")
    layout.mkdir()
    (layout / "index.json").write_text("{}")
    recipes = ({"rootfs": "r.ext4"}, {"oci": "layout"}, {"oci": "oci:layout:tag"})
    before = [key(folder, image=image, files=[]) for image in recipes]

    rootfs.write_bytes(b"b")
    (layout / "index.json").write_text("{ }")

    after = [key(folder, image=image, files=[]) for image in recipes]
    assert len({*before, *after}) == 6


@pytest.mark.parametrize("image", [{"rootfs": "missing"}, {"oci": "./missing"}])
def test_a_missing_image_is_named(folder: Path, image: dict[str, str]) -> None:
    with pytest.raises(BuildError, match="missing"):
        key(folder, image=image, files=[])


def test_a_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(BuildError, match=r"no file at .*/nothing"):
        key(folder, files=[{"source": "nothing", "target": "/x"}])
