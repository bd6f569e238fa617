"""References to images in registries: `[registry/]repository[:tag][@digest]`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace

from forkd.errors import InvalidRequest
from forkd.limits import IMAGE_REFERENCE_CHARS_MAX, RECIPE_NAME_PATTERN

SCHEME = "docker://"
"""May stand before a reference, to say that it is one."""

DEFAULT_REGISTRY = "docker.io"
"""Where an image is whose reference names no registry."""

DEFAULT_TAG = "latest"

NAME_CHARS_MAX = 255
"""Longest registry and repository together, by the registries' own specification."""

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?)(:[0-9]{1,5})?")
_PART = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_RECIPE_NAME = re.compile(RECIPE_NAME_PATTERN.removesuffix("$"))


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image of a registry.

    Attributes:
        registry: Host, perhaps with a port.
        repository: Its name there.
        tag: Which image of that name; None for one that is named by its digest.
        digest: Of its manifest; None as long as it is not known.
    """

    registry: str
    repository: str
    tag: str | None
    digest: str | None = None

    def __str__(self) -> str:
        """Return it as tools take it, which refuse a tag beside a digest."""
        which = f":{self.tag}" if self.digest is None else f"@{self.digest}"
        return f"{self.registry}/{self.repository}{which}"

    def pinned(self, digest: str) -> ImageReference:
        """Return the image that has this digest, whatever its tag names later."""
        return replace(self, tag=None, digest=digest)

    @property
    def is_loopback(self) -> bool:
        """Whether its registry is on this very host."""
        host = self.registry.rsplit(":", 1)[0] if self.registry[-1] != "]" else self.registry
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def recipe_name(self) -> str:
        """What a recipe of this image is called."""
        last = self.repository.rpartition("/")[2]
        return last[:64] if _RECIPE_NAME.fullmatch(last[:64]) else "image"


def parse_reference(text: str, *, field: str = "image") -> ImageReference:
    """Return the image of a registry that `text` names.

    Raises:
        InvalidRequest: It is no reference; `context["field"]` is `field`.
    """
    given = text.removeprefix(SCHEME)
    name, at, digest = given.partition("@")
    rest, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        rest, colon, tag = name, "", DEFAULT_TAG
    registry, repository = _split(rest)
    parts = repository.split("/")
    if (
        len(text) > IMAGE_REFERENCE_CHARS_MAX
        or len(rest) > NAME_CHARS_MAX
        or not _HOST.fullmatch(registry)
        or not all(_PART.fullmatch(part) for part in parts)
        or not _TAG.fullmatch(tag)
        or (at and not _DIGEST.fullmatch(digest))
    ):
        raise InvalidRequest(
            f"{field} is no image reference: {text[:80]!r}; write it like python:3.12-slim, "
            "registry.example.com/team/app:1.0 or name@sha256:DIGEST, in lower case",
            field=field,
        )
    return ImageReference(registry, repository, None if at else tag, digest or None)


def _split(name: str) -> tuple[str, str]:
    """Return registry and repository: the first part is a registry if it looks like a host."""
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return first, rest
    repository = name if slash else f"library/{name}"
    return DEFAULT_REGISTRY, repository
