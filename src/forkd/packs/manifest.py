"""A pack's manifest: what a restore needs to know, and a digest of everything that follows.

The strictest thing here: a member that we do not know, a name that is more than a name, a path
anywhere, a chain that does not lead from a base to its head are all refused.  What is parsed
can therefore be used without looking again, except that the files must match their digests.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal

from blake3 import blake3
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from forkd.errors import PackError
from forkd.packs import limits

if TYPE_CHECKING:
    from collections.abc import Iterator

PACK_VERSION = 1
BLOCK_BYTES = 4096
IMAGE_FILE = "rootfs.ext4"

STORED_HEADER_BYTES = 64
"""Before the body of each stored file: protocol/store/FORMAT.md."""

IMAGE_PIECE_BYTES = 1024 * 1024
"""What of an image has a digest of its own, below the digest of all of it."""

_ZERO_PIECE_DIGEST = blake3(bytes(IMAGE_PIECE_BYTES)).digest()

STORED_MAGIC = {"state": b"FKDSTATE", "memory": b"FKDMEMRY", "disk.layer": b"FKDLAYER"}

_HEADER = struct.Struct("<8sIIQ32s")
_HEADER_CHECKED_BYTES = _HEADER.size


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds what cannot be printed")
    return text


def _no_dots(text: str) -> str:
    if ".." in text:
        raise ValueError("holds '..'")
    return text


_SOME = limits.NAME_CHARS_MAX
Tag = Annotated[
    str, Field(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\z"), AfterValidator(_no_dots)
]
Name = Annotated[
    str,
    Field(pattern=rf"\A[A-Za-z0-9_][A-Za-z0-9._+:-]{{0,{_SOME - 1}}}\z"),
    AfterValidator(_no_dots),
]
MaybeName = Annotated[
    str,
    Field(pattern=rf"\A([A-Za-z0-9_][A-Za-z0-9._+:-]{{0,{_SOME - 1}}})?\z"),
    AfterValidator(_no_dots),
]
Kernel = Annotated[
    str,
    Field(pattern=rf"\A([A-Za-z0-9_][A-Za-z0-9._+:@-]{{0,{_SOME - 1}}})?\z"),
    AfterValidator(_no_dots),
]
"""A kernel's version, or that and its digest: `VERSION@sha256:DIGEST`."""

Line = Annotated[str, Field(max_length=_SOME), AfterValidator(_one_line)]
Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
Bytes = Annotated[int, Field(ge=0, le=limits.PACK_BYTES_MAX)]
Device = Literal["serial", "vmgenid", "block", "net", "vsock", "rng"]
FileName = Literal["state", "memory", "disk.layer"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PackedFile(_Part):
    """One stored file: its length, and the BLAKE3 digest of its body behind the header."""

    name: FileName
    bytes: Annotated[int, Field(ge=STORED_HEADER_BYTES, le=limits.PACK_BYTES_MAX)]
    digest: Digest


class PackedImage(_Part):
    """The raw disk layer under the chain.

    Attributes:
        bytes: Its length, holes included.
        data_bytes: What of it is no hole.
        digest: As `ImageDigest` has it.
    """

    bytes: Bytes
    data_bytes: Bytes
    digest: Digest


class Cpu(_Part):
    """What its guest saw of a processor."""

    model: Line
    features: Annotated[tuple[Name, ...], Field(max_length=limits.FEATURES_MAX, strict=False)]


class Link(_Part):
    """One snapshot of the chain.

    Attributes:
        tag: Its name where it was packed.
        parent: The tag of the link before it; None for the base.
        created_at: When it was made, UTC.
        recipe: Name of its recipe, if it had one.
        image_key: What its image was called where it was packed.
        kernel: Release of the kernel that it booted.
        vcpus: Virtual CPUs.
        memory_bytes: Guest memory.
        disk_bytes: Size of the disk; 0 without one.
        runtime: The warm runtime, or `none`.
        cpu: What it ran on.
        devices: What the machine has.
        files: What is stored of it.
    """

    tag: Tag
    parent: Tag | None
    created_at: Annotated[datetime, Field(strict=False)]
    recipe: MaybeName
    image_key: MaybeName
    kernel: Kernel
    vcpus: Annotated[int, Field(ge=1, le=1024)]
    memory_bytes: Annotated[int, Field(ge=BLOCK_BYTES, le=limits.PACK_BYTES_MAX)]
    disk_bytes: Bytes
    runtime: Name
    cpu: Cpu
    devices: Annotated[tuple[Device, ...], Field(max_length=16, strict=False)]
    files: Annotated[tuple[PackedFile, ...], Field(max_length=3, strict=False)]


class PackManifest(_Part):
    """What a pack is.

    Attributes:
        version: Of this format.
        links: The chain, base first; the last is the head, after which the pack is named.
        image: The disk layer under it; None for machines without a disk.
    """

    version: Literal[1] = 1
    links: Annotated[
        tuple[Link, ...], Field(min_length=1, max_length=limits.PACK_LINKS_MAX, strict=False)
    ]
    image: PackedImage | None

    @property
    def head(self) -> Link:
        """The snapshot that the pack is for."""
        return self.links[-1]

    @property
    def total_bytes(self) -> int:
        """What its files come to, holes included."""
        return sum(entry.bytes for entry in self.entries())

    @property
    def data_bytes(self) -> int:
        """What its files take on a disk at most."""
        return sum(entry.data_bytes for entry in self.entries())

    def entries(self) -> Iterator[Entry]:
        """Yield what follows the head, in its order."""
        if (image := self.image) is not None:
            yield Entry(None, IMAGE_FILE, image.bytes, image.data_bytes, image.digest)
        for number, link in enumerate(self.links):
            for file in link.files:
                yield Entry(number, file.name, file.bytes, file.bytes, file.digest)


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a pack.

    Attributes:
        link: Whose it is, counted from the base; None for the image.
        name: What it is called there.
        bytes: Its length.
        data_bytes: What of it is no hole, at most.
        digest: BLAKE3 of it, without the header that stored files have.
    """

    link: int | None
    name: str
    bytes: int
    data_bytes: int
    digest: str

    @property
    def header_bytes(self) -> int:
        """What is before the part that the digest is about."""
        return 0 if self.link is None else STORED_HEADER_BYTES


class ImageDigest:
    """BLAKE3 of the BLAKE3 digests of an image's pieces, so that a hole costs nothing."""

    def __init__(self) -> None:
        self._whole = blake3()
        self._piece = blake3()
        self._filled = 0
        self._zeros = 0

    def update(self, data: bytes) -> None:
        """Go on with `data`."""
        view = memoryview(data)
        while view:
            part = view[: IMAGE_PIECE_BYTES - self._filled - self._zeros]
            if self._zeros:
                self._piece.update(bytes(self._zeros))
                self._filled, self._zeros = self._filled + self._zeros, 0
            self._piece.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            self._close_if_full()

    def zeros(self, count: int) -> None:
        """Go on with `count` zeros."""
        while count:
            part = min(count, IMAGE_PIECE_BYTES - self._filled - self._zeros)
            self._zeros += part
            count -= part
            self._close_if_full()

    def digest(self) -> bytes:
        """Return the digest; ends it."""
        if self._filled or self._zeros:
            self._close()
        return self._whole.digest()

    def _close_if_full(self) -> None:
        if self._filled + self._zeros == IMAGE_PIECE_BYTES:
            self._close()

    def _close(self) -> None:
        if self._zeros == IMAGE_PIECE_BYTES:
            self._whole.update(_ZERO_PIECE_DIGEST)
        else:
            self._piece.update(bytes(self._zeros))
            self._whole.update(self._piece.digest())
        self._piece, self._filled, self._zeros = blake3(), 0, 0


class FileCheck:
    """Tells whether a file is the one that an entry declares; fed with all of it."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._header = b""
        self._image = ImageDigest() if entry.link is None else None
        self._body = blake3()

    def zeros(self, count: int) -> None:
        """Go on with `count` zeros."""
        if self._image is not None:
            self._image.zeros(count)
            return
        for at in range(0, count, IMAGE_PIECE_BYTES):
            self.update(bytes(min(IMAGE_PIECE_BYTES, count - at)))

    def update(self, data: bytes) -> None:
        """Go on with `data`."""
        if self._image is not None:
            self._image.update(data)
            return
        missing = self._entry.header_bytes - len(self._header)
        self._header += data[:missing]
        self._body.update(data[missing:])

    def passed(self) -> bool:
        """Whether what came so far has the declared digest, and a header that says so too."""
        entry = self._entry
        if self._image is not None:
            return self._image.digest().hex() == entry.digest
        digest = self._body.digest()
        if digest.hex() != entry.digest:
            return False
        said = self._header[:_HEADER_CHECKED_BYTES]
        _, _, reserved, body_bytes, named = _HEADER.unpack(said)
        check = blake3(said).digest(length=STORED_HEADER_BYTES - _HEADER_CHECKED_BYTES)
        return (
            said + check == self._header
            and (reserved, named) == (0, digest)
            and body_bytes == entry.bytes - STORED_HEADER_BYTES
            and said.startswith(STORED_MAGIC[entry.name])
        )


def encode(manifest: PackManifest) -> bytes:
    """Return the manifest as it stands in a pack."""
    return manifest.model_dump_json().encode()


def parse(raw: bytes) -> PackManifest:
    """Read and check a manifest.

    Raises:
        PackError: It is too new, malformed, names what it must not, or its chain is none.
    """
    try:
        said = json.loads(raw)
        version = said.get("version") if isinstance(said, dict) else None
        if isinstance(version, int) and version > PACK_VERSION:
            raise too_new(version)
        manifest = PackManifest.model_validate_json(raw)
    except ValidationError as error:
        raise PackError(
            f"the pack's manifest is refused: {complaint(error)}", reason="manifest"
        ) from None
    except (ValueError, RecursionError):
        raise PackError("the pack's manifest is no JSON", reason="manifest") from None
    _check_chain(manifest)
    _check_files(manifest)
    return manifest


def too_new(version: int) -> PackError:
    """Return the refusal of a pack of a later version."""
    return PackError(
        f"this pack has version {version}, and this forkd reads {PACK_VERSION}: unpack it with a "
        "later forkd, or push the snapshot again with this one",
        reason="too_new",
        version=version,
    )


def complaint(error: ValidationError) -> str:
    """Return a validation's first complaint, and where; fit for a terminal, whoever wrote it."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))[:200] or "it"
    text = f"{where}: {first['msg']}"
    return "".join(each if each.isprintable() else "?" for each in text)


def _check_chain(manifest: PackManifest) -> None:
    tags: list[str | None] = [None]
    base = manifest.links[0]
    for link in manifest.links:
        if link.parent != tags[-1]:
            raise _wrong_chain(f"{link.tag} names {link.parent} as its parent, not {tags[-1]}")
        if link.tag in tags:
            raise _wrong_chain(f"{link.tag} is in it twice")
        for member in ("vcpus", "memory_bytes", "disk_bytes", "image_key"):
            if getattr(link, member) != getattr(base, member):
                raise _wrong_chain(f"{link.tag} and {base.tag} differ in {member}")
        tags.append(link.tag)


def _wrong_chain(why: str) -> PackError:
    return PackError(f"the pack's chain is none: {why}", reason="chain")


def _check_files(manifest: PackManifest) -> None:
    for link in manifest.links:
        wanted = ["state", "memory"] + (["disk.layer"] if link.disk_bytes else [])
        named = [file.name for file in link.files]
        if sorted(named) != sorted(wanted):
            raise _wrong_files(f"{link.tag} has the files {named}, not {wanted}")
    image, disk_bytes = manifest.image, manifest.head.disk_bytes
    if (image is not None) != bool(disk_bytes):
        raise _wrong_files("its disk and its image do not belong together")
    if image is not None and not image.data_bytes <= image.bytes <= disk_bytes:
        raise _wrong_files("its image is larger than its disk, or than itself")
    if manifest.total_bytes > limits.PACK_BYTES_MAX:
        raise PackError(
            f"the pack unpacks to {manifest.total_bytes} bytes, at most {limits.PACK_BYTES_MAX}",
            reason="limit",
        )


def _wrong_files(why: str) -> PackError:
    return PackError(f"the pack's manifest is refused: {why}", reason="manifest")
