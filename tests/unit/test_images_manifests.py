"""Indexes, manifests and configurations lead to one image for this platform, or are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forkd.errors import BuildError
from forkd.images import manifests
from forkd.images.manifests import Descriptor, parse_diff_ids, resolve

LAYER = "application/vnd.oci.image.layer.v1.tar"
DIGEST = f"sha256:{'a' * 64}"


def described(media_type: str = manifests.MANIFEST, **more: object) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": DIGEST, "size": 1, **more}


def on(system: str, architecture: str, digit: str) -> dict[str, Any]:
    platform = {"os": system, "architecture": architecture}
    return described(platform=platform, digest=f"sha256:{digit * 64}")


def manifest(**more: object) -> dict[str, Any]:
    layers = [described("application/vnd.oci.image.layer.v1.tar+gzip")]
    return {"schemaVersion": 2, "config": described(manifests.CONFIG), "layers": layers, **more}


def resolved(*documents: object) -> list[str]:
    """Follow indexes to the last document; return the digests that were asked for."""
    rest = iter([json.dumps(each).encode() for each in documents])
    asked = []

    def fetch(descriptor: Descriptor) -> bytes:
        asked.append(descriptor.digest)
        return next(rest)

    raw, _ = resolve(next(rest), fetch)
    assert raw == json.dumps(documents[-1]).encode()
    return asked


def test_an_index_leads_to_the_manifest_for_this_platform() -> None:
    listed = [on("linux", "arm64", "1"), on("linux", "amd64", "2"), on("linux", "amd64", "3")]

    assert resolved({"manifests": listed}, manifest()) == [f"sha256:{'2' * 64}"]
    assert resolved({"manifests": [on("linux", "arm64", "1"), described()]}, manifest()) == [DIGEST]


def test_an_image_for_other_platforms_says_which() -> None:
    listed = [on("linux", "arm64", "1"), on("windows", "amd64", "2"), on("unknown", "unknown", "3")]

    said = "the image is for linux on arm64 and windows on amd64, not linux on amd64"
    with pytest.raises(BuildError, match=said):
        resolved({"manifests": listed}, manifest())
    with pytest.raises(BuildError, match="the image is for nothing"):
        resolved({"manifests": []}, manifest())


def test_indexes_may_lead_to_each_other_so_often() -> None:
    index = {"manifests": [described()]}
    most = manifests.INDEXES_MAX - 1

    assert len(resolved(*[index] * most, manifest())) == most
    with pytest.raises(BuildError, match="more than 4 indexes"):
        resolved(*[index] * (most + 1), manifest())


@pytest.mark.parametrize(
    "media_type",
    [
        "application/vnd.oci.image.layer.v1.tar",
        "application/vnd.oci.image.layer.v1.tar+gzip",
        "application/vnd.oci.image.layer.v1.tar+zstd",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
        "application/vnd.docker.image.rootfs.diff.tar.gzip",
        "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
    ],
)
def test_layers_are_of_these_types(media_type: str) -> None:
    assert resolved(manifest(layers=[described(media_type)])) == []


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "no JSON object"),
        ({"schemaVersion": 1}, "schema 1"),
        ({"manifests": {}}, "index is damaged"),
        ({"manifests": [{}]}, "index is damaged"),
        ({}, "no list of layers"),
        (manifest(config=None), "manifest is damaged"),
        (manifest(layers=[described("application/vnd.forkd.pack")]), "no image: .* type .*pack"),
        (manifest(layers=[described(f"{LAYER}+encrypted")]), "no image: .* type"),
        (manifest(config=described(digest="sha256:../x")), "'sha256:../x' is no digest of SHA-256"),
        (manifest(config=described(digest=f"sha512:{'a' * 128}")), "no digest of SHA-256"),
        (manifest(config=described(size=-1)), "makes no sense"),
        (manifest(config=described(size=True)), "makes no sense"),
        (manifest(config=described(size="1")), "makes no sense"),
        (manifest(config=described(size=manifests.CONFIG_BYTES_MAX + 1)), "longer than"),
    ],
)  # fmt: skip
def test_a_document_that_makes_no_sense_is_refused(document: object, said: str) -> None:
    with pytest.raises(BuildError, match=said):
        resolved(document)


def test_a_document_that_is_no_json_is_refused() -> None:
    for raw in (b"{", b"[" * 20_000, b"\xff"):
        with pytest.raises(BuildError, match="manifest is damaged"):
            resolve(raw, lambda _: b"")


def test_an_image_may_have_so_many_layers() -> None:
    layer = described("application/vnd.oci.image.layer.v1.tar")

    assert resolved(manifest(layers=[layer] * manifests.LAYERS_MAX)) == []
    with pytest.raises(BuildError, match=f"more than {manifests.LAYERS_MAX} layers"):
        resolved(manifest(layers=[layer] * (manifests.LAYERS_MAX + 1)))


@pytest.mark.parametrize(
    ("rootfs", "said"),
    [
        ({"diff_ids": [DIGEST]}, "2 layers, and its configuration 1"),
        ({"diff_ids": [DIGEST, "x"]}, "no digests of layers"),
        ({"diff_ids": [DIGEST, []]}, "no digests of layers"),
        ({}, "no digests of layers"),
        (None, "no digests of layers"),
    ],
)
def test_a_configuration_has_a_digest_for_each_layer(rootfs: object, said: str) -> None:
    assert parse_diff_ids(json.dumps({"rootfs": {"diff_ids": [DIGEST] * 2}}).encode(), 2)
    with pytest.raises(BuildError, match=said):
        parse_diff_ids(json.dumps({"rootfs": rootfs}).encode(), 2)
