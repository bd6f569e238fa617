"""A link as a pack has it, and as the store has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from forkd.errors import StoreError
from forkd.packs import manifest as packs
from forkd.store import manifest as stored

if TYPE_CHECKING:
    from forkd.model.ids import Tag
    from forkd.packs.manifest import Device, Link, PackedImage
    from forkd.store.manifest import Manifest

DEVICES: tuple[Device, ...] = ("serial", "vmgenid", "net", "vsock", "rng")
DISK_DEVICES: tuple[Device, ...] = (*DEVICES, "block")


def content_key(image: PackedImage) -> str:
    """Return a key that no recipe has: a pack must not put an image under one of those."""
    return f"pack-{image.digest[:32]}"


def shape(link: Manifest | Link) -> tuple[int, int, int]:
    """Return what all links of a chain have in common."""
    return link.vcpus, link.memory_bytes, link.disk_bytes


def to_pack(manifest: Manifest) -> packs.Link:
    """Return a link as a pack has it.

    Raises:
        StoreError: Something in the manifest is more than a pack may say.
    """
    try:
        return _link_of(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise StoreError(
            f"{manifest.tag} cannot be packed: {where}: {first['msg']}", tag=manifest.tag
        ) from None


def _link_of(manifest: Manifest) -> packs.Link:
    return packs.Link(
        tag=manifest.tag,
        parent=manifest.parent,
        created_at=manifest.created_at,
        recipe=manifest.recipe,
        image_key=manifest.image_key,
        kernel=manifest.kernel,
        vcpus=manifest.vcpus,
        memory_bytes=manifest.memory_bytes,
        disk_bytes=manifest.disk_bytes,
        runtime=manifest.runtime,
        cpu=packs.Cpu(model=manifest.cpu.model, features=manifest.cpu.features),
        devices=DISK_DEVICES if manifest.disk_bytes else DEVICES,
        files=tuple(
            packs.PackedFile(name=file.name, bytes=file.bytes, digest=file.digest)
            for file in manifest.files
        ),
    )


def from_pack(link: Link, tag: Tag, parent: Manifest | None, image_key: str) -> Manifest:
    """Return the manifest of a link that was unpacked under `tag`, over `parent`."""
    return stored.Manifest(
        tag=tag,
        created_at=link.created_at,
        recipe=link.recipe,
        image_key=image_key,
        kernel=link.kernel,
        vcpus=link.vcpus,
        memory_bytes=link.memory_bytes,
        disk_bytes=link.disk_bytes,
        runtime=link.runtime,
        cpu=stored.Cpu(model=link.cpu.model, features=link.cpu.features),
        parent=None if parent is None else parent.tag,
        files=tuple(
            stored.StoredFile(name=file.name, bytes=file.bytes, digest=file.digest)
            for file in link.files
        ),
        link=None if parent is None else stored.Link(parent_digest=parent.digest),
    )
