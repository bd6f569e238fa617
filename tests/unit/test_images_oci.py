"""An OCI reference leads to one place, and an image's settings are read or refused."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING

import pytest

from forkd.errors import BuildError
from forkd.images.manifests import OciConfig, parse_config
from forkd.images.oci import parse_reference

if TYPE_CHECKING:
    from pathlib import Path


def tar(path: Path, *names: str) -> None:
    with tarfile.open(path, "w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python:3.12-slim", "docker://python:3.12-slim"),
        ("docker://python:3.12", "docker://python:3.12"),
        ("layout", "oci:{folder}/layout"),
        ("layout:v1", "oci:{folder}/layout:v1"),
        ("plain:v1", "docker://plain:v1"),
        ("oci:layout:v1", "oci:{folder}/layout:v1"),
        ("saved.tar", "docker-archive:{folder}/saved.tar"),
        ("both.tar", "docker-archive:{folder}/both.tar"),
        ("oci.tar", "oci-archive:{folder}/oci.tar"),
        ("docker-archive:oci.tar", "docker-archive:{folder}/oci.tar"),
    ],
)
def test_each_way_to_name_an_image_is_understood(tmp_path: Path, text: str, expected: str) -> None:
    for name in ("layout", "plain"):
        (tmp_path / name).mkdir()
    (tmp_path / "layout" / "oci-layout").touch()
    tar(tmp_path / "saved.tar", "manifest.json")
    tar(tmp_path / "oci.tar", "./oci-layout", "./index.json")
    tar(tmp_path / "both.tar", "oci-layout", "index.json", "manifest.json")

    reference = parse_reference(text, tmp_path)

    assert str(reference) == expected.format(folder=tmp_path)
    assert (reference.path is None) == (reference.transport == "docker")


@pytest.mark.parametrize("text", ["./none", "none.tar", "oci:none:tag", "/none"])
def test_a_missing_file_is_not_taken_for_a_registry_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(BuildError, match="no OCI image at"):
        parse_reference(text, tmp_path)


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    tar(tmp_path / "other.tar", "etc/passwd")
    (tmp_path / "text.tar").write_text("no archive at all")

    for name in ("other.tar", "text.tar"):
        with pytest.raises(BuildError, match="is no image archive"):
            parse_reference(name, tmp_path)


def config(**more: object) -> bytes:
    return json.dumps({"os": "linux", "architecture": "amd64", **more}).encode()


def test_environment_directory_and_user_are_read() -> None:
    settings = {"Env": ["A=b=c", "EMPTY="], "WorkingDir": "/srv", "User": "1000:1000"}

    assert parse_config(config(config=settings)) == OciConfig(
        {"A": "b=c", "EMPTY": ""}, "/srv", "1000:1000"
    )


@pytest.mark.parametrize("settings", [{}, None, {"Env": None, "WorkingDir": "", "User": ""}])
def test_an_image_that_says_nothing_runs_as_root_at_the_root(
    settings: dict[str, object] | None,
) -> None:
    assert parse_config(config(config=settings)) == OciConfig({}, "/", "root")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "damaged"),
        (b"[]", "damaged"),
        (b"{}", "damaged"),
        (b"[" * 20_000, "damaged"),
        (config(config={"Env": ["novalue"]}), "damaged"),
        (config(architecture="arm64"), "linux on arm64, not linux on amd64"),
        (config(os="windows"), "windows on amd64"),
    ],
)
def test_a_configuration_we_cannot_use_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(BuildError, match=words):
        parse_config(data)
