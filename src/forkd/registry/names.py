"""What references to registries are made of: `[HOST[:PORT]/]NAME[:TAG][@DIGEST]`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Protocol

from forkd.limits import REGISTRY_NAME_CHARS_MAX

DOCKER_HUB = "docker.io"
"""What references call the registry of Docker."""

_DOCKER_HUB_HOST = "registry-1.docker.io"

DEFAULT_TAG = "latest"

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?)(:[0-9]{1,5})?")
_PART = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class InRegistry(Protocol):
    """What a registry has under a name: an image, a pack."""

    @property
    def registry(self) -> str:
        """Host, perhaps with a port."""

    @property
    def repository(self) -> str:
        """Its name there."""

    @property
    def host(self) -> str:
        """Where the registry answers."""

    @property
    def is_loopback(self) -> bool:
        """Whether the registry is on this very host."""


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a reference, which may be anything.

    Attributes:
        name: Registry and repository, as they are written.
        tag: The tag; the default one if there is none.
        digest: The digest; None if there is none.
    """

    name: str
    tag: str
    digest: str | None

    def are_sound(self, registry: str, repository: str) -> bool:
        """Whether they are a reference, with the registry and the repository that its name means.

        By the distribution specification of OCI, and no longer than registries take.
        """
        return (
            len(self.name) <= REGISTRY_NAME_CHARS_MAX
            and _HOST.fullmatch(registry) is not None
            and all(_PART.fullmatch(part) for part in repository.split("/"))
            and _TAG.fullmatch(self.tag) is not None
            and (self.digest is None or _DIGEST.fullmatch(self.digest) is not None)
        )


def cut(text: str) -> Words:
    """Return the words of a reference."""
    rest, at, digest = text.partition("@")
    name, colon, tag = rest.rpartition(":")
    if not colon or "/" in tag:
        name, tag = rest, DEFAULT_TAG
    return Words(name, tag, digest if at else None)


def is_host(word: str) -> bool:
    """Whether the first word of a name means a registry, and not a part of a repository."""
    return "." in word or ":" in word or word == "localhost"


def host_of(registry: str) -> str:
    """Return where a registry answers, by what references call it."""
    return _DOCKER_HUB_HOST if registry == DOCKER_HUB else registry


def is_loopback(netloc: str) -> bool:
    """Whether a host, perhaps with a port, is this very host."""
    host = netloc if netloc.endswith("]") else re.sub(r":[0-9]*$", "", netloc)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
