"""Images are found in layouts and archives, by their tags, and what was changed is refused."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from forkd.errors import BuildError
from forkd.images import stored
from forkd.images.manifests import INDEX, STORED_SLACK_BYTES
from forkd.images.stored import DOCKER_ARCHIVE, LAYOUT, OCI_ARCHIVE, Source, open_stored
from tests.support import oci
from tests.support.oci import regular, symlink, write_layout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forkd.images.stored import Stored

NAME = "org.opencontainers.image.ref.name"


def layout(folder: Path, text: bytes = b"hi") -> Path:
    return write_layout(folder, [[regular("a", text)], [regular("b", text)]], {"User": "me"})


def opened(folder: Path, source: Source, bytes_max: int = 1 << 20) -> Stored:
    return open_stored(source, folder / "scratch", bytes_max=bytes_max)


def layers(found: Stored) -> list[list[str]]:
    names = []
    for blob in found.layers:
        with blob.path.open("rb") as file:
            file.seek(blob.offset)
            with tarfile.open(fileobj=io.BytesIO(file.read(blob.size))) as archive:
                names.append(archive.getnames())
    return names


def index(folder: Path, *described: dict[str, Any]) -> None:
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": described}))


def named(folder: Path, *names: str | None) -> list[dict[str, Any]]:
    """Return what describes images with names, made in one layout."""
    found = []
    for name in names:
        layout(folder, str(name).encode())
        (described,) = json.loads((folder / "index.json").read_text())["manifests"]
        found.append(described | ({"annotations": {NAME: name}} if name else {}))
    return found


def packed(folder: Path, write: Callable[[bytes], bytes]) -> None:
    archive = folder / "image.tar"
    archive.write_bytes(write(archive.read_bytes()))


@pytest.mark.parametrize("kind", [OCI_ARCHIVE, DOCKER_ARCHIVE])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.ZstdCompressor().compress])
def test_archives_have_what_was_put_into_them(
    tmp_path: Path, kind: str, pack: Callable[[bytes], bytes]
) -> None:
    write = oci.write_oci_archive if kind == OCI_ARCHIVE else oci.write_docker_archive
    write(layout(tmp_path / "layout"), tmp_path / "image.tar")
    packed(tmp_path, pack)

    found = opened(tmp_path, Source(kind, tmp_path / "image.tar"))

    assert stored.archive_kind(tmp_path / "image.tar") == kind
    assert layers(found) == layers(opened(tmp_path, Source(LAYOUT, tmp_path / "layout")))
    assert layers(found) == [["a"], ["b"]]
    assert json.loads(found.config)["config"] == {"User": "me"}
    assert all(blob.digest is None for blob in found.layers) == (kind == DOCKER_ARCHIVE)


def test_a_packed_archive_may_be_so_long(tmp_path: Path) -> None:
    oci.write_oci_archive(layout(tmp_path / "layout"), tmp_path / "image.tar")
    packed(tmp_path, lambda data: gzip.compress(data.ljust(STORED_SLACK_BYTES + 3, b"\0")))

    with pytest.raises(BuildError, match=f"unpacks to more than {STORED_SLACK_BYTES + 2} bytes"):
        opened(tmp_path, Source(OCI_ARCHIVE, tmp_path / "image.tar"), 1)


def test_an_archive_may_have_so_many_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oci.write_docker_archive(layout(tmp_path / "layout"), tmp_path / "image.tar")
    source = Source(DOCKER_ARCHIVE, tmp_path / "image.tar")

    monkeypatch.setattr(stored, "ARCHIVE_ENTRIES_MAX", 4)
    assert opened(tmp_path, source)
    monkeypatch.setattr(stored, "ARCHIVE_ENTRIES_MAX", 3)
    with pytest.raises(BuildError, match="it has more than 3 entries"):
        opened(tmp_path, source)
    with pytest.raises(BuildError, match="it has more than 3 entries"):
        stored.archive_kind(source.path)


def test_an_image_of_a_layout_is_found_by_its_tag(tmp_path: Path) -> None:
    index(tmp_path, *named(tmp_path, "one", "two"))

    found = opened(tmp_path, Source(LAYOUT, tmp_path, "two"))

    with found.layers[0].path.open("rb") as file:
        assert b"two" in file.read()
    with pytest.raises(BuildError, match="no image called 'three'; there are: one, two"):
        opened(tmp_path, Source(LAYOUT, tmp_path, "three"))
    with pytest.raises(BuildError, match=r"several images in it, so write NAME:TAG; .* one, two"):
        opened(tmp_path, Source(LAYOUT, tmp_path))


def test_an_index_in_a_layout_is_followed(tmp_path: Path) -> None:
    (described,) = named(tmp_path, None)
    raw = json.dumps({"schemaVersion": 2, "manifests": [described]}).encode()
    digest = oci.put_blob(tmp_path, raw)
    index(tmp_path, {"mediaType": INDEX, "digest": digest, "size": len(raw)})

    assert layers(opened(tmp_path, Source(LAYOUT, tmp_path))) == [["a"], ["b"]]


def test_a_layout_without_an_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"not complete: it has no index\.json"):
        opened(tmp_path, Source(LAYOUT, tmp_path))
    index(tmp_path)
    with pytest.raises(BuildError, match="there is no image in it"):
        opened(tmp_path, Source(LAYOUT, tmp_path))


@pytest.mark.parametrize("which", ["manifest", "config"])
def test_a_document_that_was_changed_is_refused(tmp_path: Path, which: str) -> None:
    layout(tmp_path)
    (described,) = json.loads((tmp_path / "index.json").read_text())["manifests"]
    digest = (
        described["digest"] if which == "manifest" else oci.manifest_of(tmp_path)[which]["digest"]
    )
    blob = oci.blob_at(tmp_path, digest)

    raw = blob.read_bytes()
    blob.write_bytes(raw.replace(b'"', b"'", 1))
    with pytest.raises(BuildError, match=f"was changed: {digest} has another digest"):
        opened(tmp_path, Source(LAYOUT, tmp_path))
    blob.write_bytes(raw + b" ")
    with pytest.raises(BuildError, match=f"was changed: {digest} has another size"):
        opened(tmp_path, Source(LAYOUT, tmp_path))
    blob.unlink()
    with pytest.raises(
        BuildError, match=f"not complete: it has no blobs/{digest.replace(':', '/')}"
    ):
        opened(tmp_path, Source(LAYOUT, tmp_path))


def write_archive(path: Path, *members: oci.Member) -> None:
    with tarfile.open(path, "w") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))


def saved(*images: object) -> oci.Member:
    return regular("manifest.json", json.dumps(images).encode())


def test_a_layer_that_is_twice_may_be_a_link_to_the_first(tmp_path: Path) -> None:
    said = {"Config": "c.json", "Layers": ["x/layer.tar", "y/layer.tar"]}
    members = (saved(said), regular("c.json", b"{}"), regular("x/layer.tar", b"layer"))
    write_archive(tmp_path / "image.tar", *members, symlink("y/layer.tar", "../x/layer.tar"))

    first, second = opened(tmp_path, Source(DOCKER_ARCHIVE, tmp_path / "image.tar")).layers

    assert first == second


def test_an_image_of_docker_save_is_found_by_its_tag(tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    images = [
        {"Config": "one.json", "Layers": [], "RepoTags": ["team/app:1"]},
        {"Config": "two.json", "Layers": [], "RepoTags": ["docker.io/library/app:latest"]},
        {"Config": "no.json", "Layers": [], "RepoTags": None},
    ]
    configs = [regular(name, name.encode()) for name in ("one.json", "two.json", "no.json")]
    write_archive(path, saved(*images), *configs)

    def config(tag: str) -> bytes:
        return opened(tmp_path, Source(DOCKER_ARCHIVE, path, tag)).config

    assert config("team/app:1") == config("docker.io/team/app:1") == b"one.json"
    assert config("app") == config("app:latest") == b"two.json"
    with pytest.raises(BuildError, match="no image called 'app:2'; there are: team/app:1, docker"):
        config("app:2")
    with pytest.raises(BuildError, match="there are 3 images in it, so say which; there are"):
        config("")


@pytest.mark.parametrize(
    ("member", "said"),
    [
        (regular("manifest.json", b"{"), "manifest.json is damaged"),
        (regular("manifest.json", b"1"), "manifest.json is damaged"),
        (saved(), "there are 0 images in it"),
        (saved({"Config": 1, "Layers": []}), "describes no image"),
        (saved({"Config": "c", "Layers": [1]}), "describes no image"),
        (saved({"Config": "c", "Layers": []}), "not complete: it has no c"),
        (saved({"Config": "manifest.json", "Layers": ["../etc/passwd"]}), "it has no ../etc/"),
        (saved({"Config": "c", "Layers": ["l"] * 1025}), "more than 1024 layers"),
    ],
)  # fmt: skip
def test_what_docker_save_never_wrote_is_refused(
    tmp_path: Path, member: oci.Member, said: str
) -> None:
    write_archive(tmp_path / "image.tar", member)

    with pytest.raises(BuildError, match=said):
        opened(tmp_path, Source(DOCKER_ARCHIVE, tmp_path / "image.tar"))


def test_an_archive_that_is_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    oci.write_oci_archive(layout(tmp_path / "layout"), path)
    raw = path.read_bytes()
    end = len(raw.rstrip(b"\0"))
    for length in (end - 1, end // 2, 600, 100):
        path.write_bytes(raw[:length])
        with pytest.raises(BuildError, match=r"the archive cannot be read|is not complete"):
            opened(tmp_path, Source(OCI_ARCHIVE, path))
