"""Packs as OCI artifacts: the head is the configuration, and chunks are layers.

A layer ends where a file of the pack ends, or when it has as many chunks as a layer may have.  So
two packs over one base begin with the same layers, and a registry is sent only what it lacks.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forkd.errors import NotFound, PackError
from forkd.packs import cosign, limits
from forkd.packs.container import CHUNK_HEAD, END, exactly, read_head
from forkd.packs.registry import MANIFEST_TYPE, parsed
from forkd.registry.client import digest_of
from forkd.registry.limits import REGISTRY_MANIFEST_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cryptography.hazmat.primitives.asymmetric import ec

    from forkd.packs.container import Head, Readable
    from forkd.packs.references import Reference
    from forkd.packs.registry import Registry

ARTIFACT_TYPE = "application/vnd.forkd.pack.v1"
HEAD_TYPE = "application/vnd.forkd.pack.head.v1"
LAYER_TYPE = "application/vnd.forkd.pack.chunks.v1"

HEAD_BYTES_MAX = limits.PACK_MANIFEST_BYTES_MAX + 112
"""Longest head of a pack: its manifest, and what is around it."""

_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push did.

    Attributes:
        digest: The digest of the artifact's manifest.
        layers: How many layers it has.
        bytes: How long they and the head are.
        sent_layers: How many of them the registry did not have.
        sent_bytes: How long what was sent is.
    """

    digest: str
    layers: int
    bytes: int
    sent_layers: int
    sent_bytes: int


def push(registry: Registry, reference: Reference, pack: Readable) -> Iterator[int | Pushed]:
    """Store a pack under a tag: yields how many bytes of it are stored, and in the end what was.

    Raises:
        PackError: It is no pack.
    """
    head = read_head(pack)
    raw = head.encode()
    layers: list[dict[str, Any]] = []
    total = sent_bytes = sent_layers = 0
    for data in _layers(pack):
        if registry.put_blob(data):
            sent_layers, sent_bytes = sent_layers + 1, sent_bytes + len(data)
        layers.append(_descriptor(LAYER_TYPE, data))
        total += len(data)
        yield total
    if registry.put_blob(raw):
        sent_bytes += len(raw)
    manifest = _manifest(head, raw, layers)
    if len(manifest) > REGISTRY_MANIFEST_BYTES_MAX:
        raise PackError(f"the pack has too many layers: {len(layers)}", reason="limit")
    registry.put_manifest(reference.tag, manifest)
    yield Pushed(
        digest_of(manifest), len(layers), total + len(raw), sent_layers, sent_bytes + len(manifest)
    )


def fetch(
    registry: Registry, reference: Reference, key: ec.EllipticCurvePublicKey | None
) -> Iterator[bytes]:
    """Return the pieces of a pack; with a key, only if there is a cosign signature by it.

    Raises:
        NotFound: There is no such tag.
        PackError: It is no pack, or a part of it was changed or lost, or it has no signature by
            the key.
    """
    raw, digest = registry.manifest(reference.digest or reference.tag)
    if key is not None:
        _check_signed(registry, reference, digest, key)
    said = parsed(raw, str(reference))
    config, layers = said.get("config"), said.get("layers")
    found = config.get("mediaType") if isinstance(config, dict) else None
    if found != HEAD_TYPE or not isinstance(layers, list):
        raise PackError(f"{reference} is no pack, but something else", reason="not_ours")
    parts = [_part(config, HEAD_TYPE, HEAD_BYTES_MAX, reference)]
    parts += [_part(each, LAYER_TYPE, limits.LAYER_BYTES_MAX, reference) for each in layers]
    return _pieces(registry, parts)


def sign(
    registry: Registry, reference: Reference, digest: str, key: ec.EllipticCurvePrivateKey
) -> None:
    """Add a cosign signature to those of an artifact; it replaces an earlier one by this key."""
    payload = cosign.payload_of(f"{reference.registry}/{reference.repository}", digest)
    kept = [
        each
        for each, signed in _signatures(registry, reference, digest)
        if not cosign.verifies(key.public_key(), _annotation(each), signed)
    ]
    layer = _descriptor(cosign.PAYLOAD_TYPE, payload)
    layer["annotations"] = {cosign.ANNOTATION: cosign.sign(key, payload)}
    layers = [*kept[: limits.SIGNATURES_MAX - 1], layer]
    config = json.dumps(
        {
            "architecture": "",
            "os": "",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [each["digest"] for each in layers]},
        }
    ).encode()
    registry.put_blob(payload)
    registry.put_blob(config)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": _descriptor(_CONFIG_TYPE, config),
        "layers": layers,
    }
    registry.put_manifest(cosign.tag_of(digest), json.dumps(manifest).encode())


def _check_signed(
    registry: Registry, reference: Reference, digest: str, key: ec.EllipticCurvePublicKey
) -> None:
    signatures = _signatures(registry, reference, digest)
    if not signatures:
        raise PackError(f"{reference} has no cosign signature", reason="unsigned")
    for each, payload in signatures:
        if cosign.is_about(payload, digest) and cosign.verifies(key, _annotation(each), payload):
            return
    raise PackError(f"{reference} has no cosign signature by that key", reason="signature")


def _signatures(
    registry: Registry, reference: Reference, digest: str
) -> list[tuple[dict[str, Any], bytes]]:
    """Return the descriptors of an artifact's cosign signatures, and their payloads."""
    try:
        raw, _ = registry.manifest(cosign.tag_of(digest))
    except NotFound:
        return []
    layers = parsed(raw, f"the signatures of {reference}").get("layers")
    found = []
    for each in layers[: limits.SIGNATURES_MAX] if isinstance(layers, list) else ():
        if isinstance(each, dict) and each.get("mediaType") == cosign.PAYLOAD_TYPE:
            part = _part(each, cosign.PAYLOAD_TYPE, limits.SIGNATURE_BYTES_MAX, reference)
            found.append((each, registry.blob(*part)))
    return found


def _annotation(descriptor: dict[str, Any]) -> object:
    annotations = descriptor.get("annotations")
    return annotations.get(cosign.ANNOTATION) if isinstance(annotations, dict) else None


def _layers(pack: Readable) -> Iterator[bytes]:
    """Yield the chunks of a pack in layers, without what ends it."""
    layer, chunks = bytearray(), 0
    while (head := exactly(pack, CHUNK_HEAD.size)) != END:
        stored, holds = CHUNK_HEAD.unpack(head)
        if not 0 < stored <= limits.CHUNK_STORED_BYTES_MAX:
            raise PackError(f"the pack is damaged: a chunk takes {stored} bytes", reason="damaged")
        layer += head + exactly(pack, stored)
        chunks += 1
        if holds < limits.CHUNK_BYTES_MAX or chunks == limits.LAYER_CHUNKS_MAX:
            yield bytes(layer)
            layer.clear()
            chunks = 0
    if layer:
        yield bytes(layer)


def _pieces(registry: Registry, parts: list[tuple[str, int]]) -> Iterator[bytes]:
    for digest, size in parts:
        yield registry.blob(digest, size)
    yield END


def _manifest(head: Head, raw: bytes, layers: list[dict[str, Any]]) -> bytes:
    link = head.manifest.head
    said = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": _descriptor(HEAD_TYPE, raw),
        "layers": layers,
        "annotations": {
            "org.opencontainers.image.title": link.tag,
            "org.opencontainers.image.created": link.created_at.isoformat(),
        },
    }
    return json.dumps(said, separators=(",", ":")).encode()


def _descriptor(kind: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest_of(data), "size": len(data)}


def _part(said: object, kind: str, limit: int, reference: Reference) -> tuple[str, int]:
    """Return digest and size of what a descriptor names."""
    if not isinstance(said, dict):
        said = {}
    digest, size = said.get("digest"), said.get("size")
    if (
        said.get("mediaType") != kind
        or not isinstance(digest, str)
        or _DIGEST.fullmatch(digest) is None
        or not isinstance(size, int)
        or not 0 < size <= limit
    ):
        raise PackError(
            f"the manifest of {reference} is refused: a part has no digest, or more than {limit} "
            f"bytes, or is not {kind}",
            reason="damaged",
        )
    return digest, size
