"""References to images in registries: `[registry/]repository[:tag][@digest]`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from forkd.errors import InvalidRequest
from forkd.limits import IMAGE_REFERENCE_CHARS_MAX, RECIPE_NAME_PATTERN
from forkd.registry import names

SCHEME = "docker://"
"""May stand before a reference, to say that it is one."""

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
    def host(self) -> str:
        """Where its registry answers."""
        return names.host_of(self.registry)

    @property
    def is_loopback(self) -> bool:
        """Whether its registry is on this very host."""
        return names.is_loopback(self.registry)

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
    words = names.cut(text.removeprefix(SCHEME))
    registry, repository = _split(words.name)
    if len(text) > IMAGE_REFERENCE_CHARS_MAX or not words.are_sound(registry, repository):
        raise InvalidRequest(
            f"{field} is no image reference: {text[:80]!r}; write it like python:3.12-slim, "
            "registry.example.com/team/app:1.0 or name@sha256:DIGEST, in lower case",
            field=field,
        )
    tag = words.tag if words.digest is None else None
    return ImageReference(registry, repository, tag, words.digest)


def _split(name: str) -> tuple[str, str]:
    """Return registry and repository: the first part is a registry if it looks like a host."""
    first, slash, rest = name.partition("/")
    if slash and names.is_host(first):
        return first, rest
    repository = name if slash else f"library/{name}"
    return names.DOCKER_HUB, repository
