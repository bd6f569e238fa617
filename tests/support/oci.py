"""Make small OCI images out of nothing, honest ones and hostile ones.

Written by hand, member by member, because no tool would write what a hostile image holds.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

Member = tuple[tarfile.TarInfo, bytes]


def regular(name: str, data: bytes = b"", *, mode: int = 0o644, owner: int = 0) -> Member:
    """Return a file, to be put into a layer."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.uid, info.gid = len(data), mode, owner, owner
    return info, data


def folder(name: str, *, mode: int = 0o755, owner: int = 0) -> Member:
    """Return a folder, to be put into a layer."""
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.uid, info.gid = tarfile.DIRTYPE, mode, owner, owner
    return info, b""


def symlink(name: str, target: str) -> Member:
    """Return a symbolic link, to be put into a layer."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info, b""


def hardlink(name: str, target: str) -> Member:
    """Return a hard link, to be put into a layer."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.LNKTYPE, target
    return info, b""


def write_layout(
    path: Path, layers: Sequence[Sequence[Member]], config: Mapping[str, Any] | None = None
) -> Path:
    """Write an image of these layers as an OCI layout folder; return the folder."""
    archives = [_archive(members) for members in layers]
    document = {
        "architecture": "amd64",
        "os": "linux",
        "config": dict(config or {}),
        "rootfs": {"type": "layers", "diff_ids": [_digest(each) for each in archives]},
    }
    manifest = {
        "schemaVersion": 2,
        "config": _blob(path, "config.v1+json", json.dumps(document).encode()),
        "layers": [_blob(path, "layer.v1.tar", each) for each in archives],
    }
    index = {
        "schemaVersion": 2,
        "manifests": [_blob(path, "manifest.v1+json", json.dumps(manifest).encode())],
    }
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (path / "index.json").write_text(json.dumps(index))
    return path


def document(layout: Path, digest: str) -> dict[str, Any]:
    """Return a document of a layout."""
    return dict(json.loads(blob_at(layout, digest).read_bytes()))


def blob_at(layout: Path, digest: str) -> Path:
    """Return where a part of a layout is."""
    return layout / "blobs" / digest.replace(":", "/")


def put_blob(layout: Path, data: bytes) -> str:
    """Put a part into a layout; return its digest."""
    return str(_blob(layout, "", data)["digest"])


def manifest_of(layout: Path) -> dict[str, Any]:
    """Return the manifest of the only image of a layout."""
    index = json.loads((layout / "index.json").read_bytes())
    return document(layout, index["manifests"][0]["digest"])


def pack_layers(layout: Path, pack: Callable[[bytes], bytes]) -> None:
    """Put other layers into a layout, each made of one that was there; the configuration stays."""
    manifest = manifest_of(layout)
    manifest["layers"] = [
        _blob(layout, "layer.v1.tar", pack(blob_at(layout, each["digest"]).read_bytes()))
        for each in manifest["layers"]
    ]
    index = json.loads((layout / "index.json").read_bytes())
    index["manifests"] = [_blob(layout, "manifest.v1+json", json.dumps(manifest).encode())]
    (layout / "index.json").write_text(json.dumps(index))


def write_oci_archive(layout: Path, path: Path) -> None:
    """Write a layout as an archive."""
    with tarfile.open(path, "w") as archive:
        for each in sorted(layout.rglob("*")):
            archive.add(each, each.relative_to(layout), recursive=False)


def write_docker_archive(layout: Path, path: Path, *tags: str) -> None:
    """Write the image of a layout as `docker save` did until its version 24."""
    manifest = manifest_of(layout)
    config, layers = manifest["config"]["digest"], [each["digest"] for each in manifest["layers"]]
    names = [f"{digest[7:]}/layer.tar" for digest in layers]
    config_name = f"{config[7:]}.json"
    said = {"Config": config_name, "RepoTags": list(tags), "Layers": names}
    with tarfile.open(path, "w") as archive:
        archive.add(blob_at(layout, config), config_name)
        for name, digest in zip(names, layers, strict=True):
            archive.add(blob_at(layout, digest), name)
        info, data = regular("manifest.json", json.dumps([said]).encode())
        archive.addfile(info, io.BytesIO(data))


def _archive(members: Sequence[Member]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _blob(path: Path, kind: str, data: bytes) -> dict[str, Any]:
    digest = _digest(data)
    file = path / "blobs" / digest.replace(":", "/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    media_type = f"application/vnd.oci.image.{kind}"
    return {"mediaType": media_type, "digest": digest, "size": len(data)}
