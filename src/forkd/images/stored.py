"""Images in files: a folder with an OCI layout, an archive of one, or what `docker save` wrote.

Nothing is copied: a part of an image is a file, or a part of an archive.  What has a digest is
compared with it when it is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from forkd.errors import BuildError, HostError, InvalidRequest
from forkd.host import files, folders
from forkd.images import manifests
from forkd.images.members import Kind, members
from forkd.images.streams import MAGIC_BYTES, Checked, Damaged, Part, Stream, is_packed, unpacked
from forkd.model.reference import parse_reference
from forkd.registry.limits import REGISTRY_MANIFEST_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from forkd.images.manifests import Descriptor
    from forkd.images.streams import Forward

ARCHIVE_ENTRIES_MAX = 100_000
"""Most entries of an archive of an image."""

LAYOUT, OCI_ARCHIVE, DOCKER_ARCHIVE = "oci", "oci-archive", "docker-archive"
"""Kinds of places for images in files."""

_INDEX, _LIST = "index.json", "manifest.json"
_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Source:
    """Where an image is.

    Attributes:
        kind: `LAYOUT`, `OCI_ARCHIVE` or `DOCKER_ARCHIVE`.
        path: The file or folder.
        tag: Which image in it; empty for the only one.
    """

    kind: str
    path: Path
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Blob:
    """A part of an image.

    Attributes:
        path: The file that has it.
        offset: Where in it.
        size: How long it is.
        digest: What it must have; None if that is not known.
    """

    path: Path
    offset: int
    size: int
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """An image in files.

    Attributes:
        config: Its configuration.
        layers: Its layers, the lowest first.
    """

    config: bytes
    layers: tuple[Blob, ...]


class _Files(Protocol):
    """Files by their names."""

    def find(self, name: str) -> Blob:
        """Return where a file is."""


class _Folder:
    """Files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, name: str) -> Blob:
        path = self._folder / name
        size = files.size_bytes(path)
        if size is None:
            raise BuildError(f"the image is not complete: it has no {name}")
        return Blob(path, 0, size)


class _Archive:
    """Files in a tar archive."""

    def __init__(self, path: Path) -> None:
        self._found: dict[str, Blob] = {}
        self._links: dict[str, str] = {}
        with files.opened(path) as file:
            size = file.seek(0, 2)
            archive = Part(file, 0, size)
            for name, member in _listed(archive):
                if member.kind is Kind.SYMLINK:
                    self._links.setdefault(
                        name, posixpath.join(posixpath.dirname(name), member.link)
                    )
                elif member.kind is Kind.FILE and member.extents is None:
                    blob = Blob(path, archive.position, member.size)
                    if blob.offset + blob.size > size:
                        raise Damaged("it is cut short")
                    self._found.setdefault(name, blob)

    def find(self, name: str) -> Blob:
        blob = self._found.get(name)
        if blob is None and (target := self._links.get(name)) is not None:  # a layer that is twice
            blob = self._found.get(posixpath.normpath(target))
        if blob is None:
            raise BuildError(f"the image is not complete: it has no {name[:200]}")
        return blob


def archive_kind(path: Path) -> str:
    """Tell what `docker save` wrote from an OCI archive; newer ones are both.

    Raises:
        BuildError: It is neither.
    """
    found = set()
    try:
        with files.opened(path) as file:
            for name, _ in _listed(_archive(file)):
                if name == _LIST:
                    return DOCKER_ARCHIVE
                found.add(name)
    except (Damaged, HostError) as error:
        raise BuildError(f"{path} is no image archive: {error}", path=str(path)) from error
    if _INDEX in found:
        return OCI_ARCHIVE
    raise BuildError(f"{path} is no image archive: it has no {_INDEX} or {_LIST}", path=str(path))


def open_stored(source: Source, scratch: Path, *, bytes_max: int) -> Stored:
    """Return the image in a file or folder.

    Args:
        source: Where it is.
        scratch: A file that may be made, for an archive that is packed.
        bytes_max: How much its layers may unpack to.

    Raises:
        BuildError: There is none, or it is damaged, or not for Linux on amd64.
        HostError: It cannot be read.
    """
    kind, path, tag = source.kind, source.path, source.tag
    if kind == LAYOUT:
        return _layout(_Folder(path), tag)
    try:
        with files.opened(path) as file:
            packed = is_packed(file.read(MAGIC_BYTES))
            if packed:
                most = manifests.stored_bytes_max(bytes_max)
                folders.write_pieces(scratch, _at_most(unpacked(Checked(_all(file))), most))
        archive = _Archive(scratch if packed else path)
    except Damaged as error:
        raise BuildError(f"the archive cannot be read: {error}") from error
    return _layout(archive, tag) if kind == OCI_ARCHIVE else _saved(archive, tag)


def _all(file: BinaryIO) -> Part:
    return Part(file, 0, file.seek(0, 2))


def _archive(file: BinaryIO) -> Forward:
    packed = is_packed(file.read(MAGIC_BYTES))
    return Stream(unpacked(Checked(_all(file)))) if packed else _all(file)


def _at_most(pieces: Iterator[bytes], most: int) -> Iterator[bytes]:
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > most:
            raise Damaged(f"it unpacks to more than {most} bytes")
        yield piece


def _listed(archive: Forward) -> Iterator[tuple[str, Any]]:
    for count, member in enumerate(members(archive)):
        if count >= ARCHIVE_ENTRIES_MAX:
            raise Damaged(f"it has more than {ARCHIVE_ENTRIES_MAX} entries")
        yield posixpath.normpath(member.name), member


def _layout(layout: _Files, tag: str) -> Stored:
    index = _document(layout.find(_INDEX), REGISTRY_MANIFEST_BYTES_MAX)

    def fetch(descriptor: Descriptor) -> bytes:
        return _document(_blob(layout, descriptor), REGISTRY_MANIFEST_BYTES_MAX)

    first = _named(manifests.parse_index(manifests.parse_object(index, "index")), tag)
    _, manifest = manifests.resolve(fetch(first), fetch)
    config = _document(_blob(layout, manifest.config), manifests.CONFIG_BYTES_MAX)
    return Stored(config, tuple(_blob(layout, layer) for layer in manifest.layers))


def _named(listed: tuple[Descriptor, ...], tag: str) -> Descriptor:
    """Return what an index calls so; without a name, the only one, or that for this platform."""
    names = [each.name for each in listed if each.name is not None]
    known = ", ".join(names[:_NAMES_SHOWN]) or "none with a name"
    if tag:
        for each in listed:
            if each.name == tag:
                return each
        raise BuildError(f"there is no image called {tag[:80]!r}; there are: {known}")
    if not listed:
        raise BuildError("there is no image in it")
    if len(set(names)) > 1:
        raise BuildError(f"there are several images in it, so write NAME:TAG; there are: {known}")
    return manifests.chosen(listed)


def _blob(layout: _Files, descriptor: Descriptor) -> Blob:
    found = layout.find(f"blobs/{descriptor.digest.replace(':', '/')}")
    if found.size != descriptor.size:
        raise BuildError(f"a part of the image was changed: {descriptor.digest} has another size")
    return Blob(found.path, found.offset, found.size, descriptor.digest)


def _document(blob: Blob, bytes_max: int) -> bytes:
    if blob.size > bytes_max:
        raise BuildError(f"a manifest or configuration is longer than {bytes_max} bytes")
    with files.opened(blob.path) as file:
        raw = Part(file, blob.offset, blob.size).exactly(blob.size)
    if blob.digest is not None and f"sha256:{hashlib.sha256(raw).hexdigest()}" != blob.digest:
        raise BuildError(f"a part of the image was changed: {blob.digest} has another digest")
    return raw


def _saved(archive: _Archive, tag: str) -> Stored:
    """Return an image of what `docker save` wrote; its layers have digests unpacked only."""
    raw = _document(archive.find(_LIST), REGISTRY_MANIFEST_BYTES_MAX)
    try:
        listed = [each for each in json.loads(raw) if isinstance(each, dict)]
    except (ValueError, TypeError, RecursionError) as error:
        raise BuildError(f"its {_LIST} is damaged: {error}") from error
    match _tagged(listed, tag):
        case {"Config": str(config), "Layers": list(layers)} if all(
            isinstance(each, str) for each in layers
        ):
            if len(layers) > manifests.LAYERS_MAX:
                raise BuildError(f"the image has more than {manifests.LAYERS_MAX} layers")
            document = _document(_file(archive, config), manifests.CONFIG_BYTES_MAX)
            return Stored(document, tuple(_file(archive, each) for each in layers))
    raise BuildError(f"its {_LIST} is damaged: it describes no image")


def _file(archive: _Archive, name: str) -> Blob:
    return archive.find(posixpath.normpath(name))


def _tagged(listed: list[dict[str, Any]], tag: str) -> dict[str, Any]:
    tags = [_tags(each) for each in listed]
    known = ", ".join([each for some in tags for each in some][:_NAMES_SHOWN]) or "none with a name"
    if tag:
        for each, names in zip(listed, tags, strict=True):
            if any(_is_same(name, tag) for name in names):
                return each
        raise BuildError(f"there is no image called {tag[:80]!r}; there are: {known}")
    if len(listed) != 1:
        raise BuildError(f"there are {len(listed)} images in it, so say which; there are: {known}")
    return listed[0]


def _tags(image: dict[str, Any]) -> list[str]:
    found = image.get("RepoTags")
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _is_same(one: str, other: str) -> bool:
    with contextlib.suppress(InvalidRequest):
        return parse_reference(one) == parse_reference(other)
    return one == other
