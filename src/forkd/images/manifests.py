"""What images say of themselves: indexes, manifests and configurations, of OCI and of Docker."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forkd.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CONFIG_BYTES_MAX = 4 * 1024 * 1024
"""Longest configuration of an image: as much as registries take of a manifest."""

LAYERS_MAX = 1_024
"""Most layers of an image; Docker makes no more than 127."""

INDEXES_MAX = 4
"""How many indexes may lead to each other before there is a manifest."""

STORED_SLACK_BYTES = 64 * 1024 * 1024
"""By how much what is stored of an image may be longer than twice what it may unpack to."""

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"

ACCEPTED = (MANIFEST, INDEX, DOCKER_MANIFEST, DOCKER_LIST)
"""Types of documents that we understand."""

CONFIG = "application/vnd.oci.image.config.v1+json"

_PLATFORM = ("linux", "amd64")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LAYER = re.compile(
    r"application/vnd\.(oci\.image\.layer\.(nondistributable\.)?v1\.tar(\+gzip|\+zstd)?"
    r"|docker\.image\.rootfs\.(foreign\.)?diff\.tar(\.gzip|\.zstd)?)"
)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a document says of another one, or of a layer.

    Attributes:
        media_type: What it is.
        digest: Its digest, of SHA-256.
        size: How long it is.
        platform: System and architecture that it is for; None if that is not said.
        name: What it is called, in an index; None if it has no name.
    """

    media_type: str
    digest: str
    size: int
    platform: tuple[str, str] | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an image consists of."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class OciConfig:
    """What an OCI image says of the processes that run in it."""

    env: dict[str, str]
    cwd: str
    user: str
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None


def stored_bytes_max(bytes_max: int) -> int:
    """Return how long the layers may be as they are stored that unpack to so much.

    They have headers and padding, and what cannot be packed grows a little.
    """
    return 2 * bytes_max + STORED_SLACK_BYTES


def resolve(raw: bytes, fetch: Callable[[Descriptor], bytes]) -> tuple[bytes, Manifest]:
    """Return the manifest for Linux on amd64 that a document leads to, as it is written and parsed.

    Args:
        raw: A manifest, or an index.
        fetch: Returns what a descriptor describes, which was checked against it.

    Raises:
        BuildError: There is none, or it makes no sense.
    """
    for _ in range(INDEXES_MAX):
        document = _parsed(raw, "manifest")
        if "manifests" not in document:
            return raw, parse_manifest(document)
        raw = fetch(chosen(parse_index(document)))
    raise BuildError(f"the image has more than {INDEXES_MAX} indexes that lead to each other")


def parse_index(document: dict[str, Any]) -> tuple[Descriptor, ...]:
    """Return what an index lists.

    Raises:
        BuildError: It makes no sense.
    """
    return tuple(_descriptor(each, "index") for each in _list(document, "manifests", "index"))


def chosen(listed: Iterable[Descriptor]) -> Descriptor:
    """Return the first that is for Linux on amd64, or that says nothing of that.

    Raises:
        BuildError: There is none.
    """
    every = tuple(listed)
    for wanted in (_PLATFORM, None):
        for each in every:
            if each.platform == wanted:
                return each
    platforms = dict.fromkeys(each.platform for each in every if each.platform is not None)
    known = [" on ".join(each) for each in platforms if each != ("unknown", "unknown")]
    for_ = " and ".join(known[:8]) or "nothing"
    raise BuildError(f"the image is for {for_}, not linux on amd64")


def parse_manifest(document: dict[str, Any]) -> Manifest:
    """Return what a manifest says.

    Raises:
        BuildError: It makes no sense, or is that of something else than an image.
    """
    if document.get("schemaVersion") == 1:
        raise BuildError(
            "the image has a manifest of Docker's schema 1, which registries no longer take; "
            "push it again with a newer client"
        )
    listed = _list(document, "layers", "manifest")
    if len(listed) > LAYERS_MAX:
        raise BuildError(f"the image has more than {LAYERS_MAX} layers")
    layers = tuple(_descriptor(each, "manifest") for each in listed)
    for layer in layers:
        if _LAYER.fullmatch(layer.media_type) is None:
            raise BuildError(f"it is no image: it has a part of type {layer.media_type[:100]!r}")
    config = _descriptor(document.get("config"), "manifest")
    if config.size > CONFIG_BYTES_MAX:
        raise BuildError(f"the image's configuration is longer than {CONFIG_BYTES_MAX} bytes")
    return Manifest(config, layers)


def parse_diff_ids(config: bytes, layers: int) -> tuple[str, ...]:
    """Return the digest of each layer unpacked, which a configuration has.

    Raises:
        BuildError: It has other than so many.
    """
    document = _parsed(config, "configuration")
    rootfs = document.get("rootfs")
    found = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(found, list) or not all(map(is_digest, found)):
        raise BuildError("the image's configuration is damaged: it has no digests of layers")
    if len(found) != layers:
        raise BuildError(f"the image has {layers} layers, and its configuration {len(found)}")
    return tuple(found)


def parse_config(data: bytes) -> OciConfig:
    """Return what an image's configuration says.

    Raises:
        BuildError: It is no such configuration, or one for another machine.
    """
    try:
        document = json.loads(data)
        system, architecture = document["os"], document["architecture"]
        settings: dict[str, Any] = document.get("config") or {}
        env = dict(line.split("=", 1) for line in settings.get("Env") or [])
        program = [_program(settings.get(name)) for name in ("Entrypoint", "Cmd")]
        cwd, user = settings.get("WorkingDir") or "/", settings.get("User") or "root"
        config = OciConfig(env, cwd, user, *program)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BuildError(f"the image's configuration is damaged: {error}") from error
    if (system, architecture) != ("linux", "amd64"):
        raise BuildError(f"the image is for {system} on {architecture}, not linux on amd64")
    return config


def _program(words: object) -> tuple[str, ...] | None:
    """Return a program and its arguments; None for none.

    Raises:
        TypeError: It is something else.
    """
    if not words:
        return None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise TypeError("a program is a list of strings")
    return tuple(words)


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """Return a document that is a JSON object.

    Raises:
        BuildError: It is none.
    """
    return _parsed(raw, what)


def is_digest(value: object) -> bool:
    """Whether something is a digest that we understand."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _parsed(raw: bytes, what: str) -> dict[str, Any]:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BuildError(f"the image's {what} is damaged: {error}") from error
    if not isinstance(document, dict):
        raise BuildError(f"the image's {what} is damaged: it is no JSON object")
    return document


def _list(document: dict[str, Any], name: str, what: str) -> list[Any]:
    found = document.get(name)
    if not isinstance(found, list):
        raise BuildError(f"the image's {what} is damaged: it has no list of {name}")
    return found


def _descriptor(said: object, what: str) -> Descriptor:
    match said:
        case {"mediaType": str(media_type), "digest": str(digest), "size": int(size), **rest} if (
            is_digest(digest) and size >= 0 and not isinstance(size, bool)
        ):
            return Descriptor(media_type, digest, size, _platform(rest), _name(rest))
        case {"digest": str(digest)} if not is_digest(digest):
            raise BuildError(
                f"the image's {what} is damaged: {digest[:100]!r} is no digest of SHA-256"
            )
    raise BuildError(f"the image's {what} is damaged: it describes something that makes no sense")


def _platform(said: dict[object, object]) -> tuple[str, str] | None:
    match said.get("platform"):
        case {"os": str(system), "architecture": str(architecture)}:
            return system, architecture
    return None


def _name(said: dict[object, object]) -> str | None:
    match said.get("annotations"):
        case {"org.opencontainers.image.ref.name": str(name)}:
            return name
    return None
