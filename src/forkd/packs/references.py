"""References to packs in registries: `REGISTRY/NAME[:TAG][@DIGEST]`, with or without `oci://`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from forkd.errors import InvalidRequest
from forkd.packs.limits import REGISTRY_NAME_CHARS_MAX, REGISTRY_REFERENCE_CHARS_MAX

SCHEME = "oci://"
"""May stand before a reference, to say that it is one."""

DEFAULT_TAG = "latest"

_DOCKER_HUB = "docker.io"
_DOCKER_HUB_HOST = "registry-1.docker.io"
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?)(:[0-9]{1,5})?")
_PART = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Reference:
    """A pack in a registry.

    Attributes:
        registry: Host, perhaps with a port.
        repository: Its name there.
        tag: Which pack of that name.
        digest: Of its manifest; None if the tag says which.
    """

    registry: str
    repository: str
    tag: str
    digest: str | None = None

    def __str__(self) -> str:
        """Return it as it is written."""
        which = f":{self.tag}" if self.digest is None else f"@{self.digest}"
        return f"{self.registry}/{self.repository}{which}"

    @property
    def host(self) -> str:
        """Where the registry answers."""
        return _DOCKER_HUB_HOST if self.registry == _DOCKER_HUB else self.registry

    @property
    def is_loopback(self) -> bool:
        """Whether the registry is on this very host."""
        return is_loopback(self.registry)


def is_reference(text: str) -> bool:
    """Whether `text` means a registry, and neither a URL nor a name in a folder of packs."""
    return text.startswith(SCHEME) or ("://" not in text and "/" in text)


def is_loopback(netloc: str) -> bool:
    """Whether a host, perhaps with a port, is this very host."""
    host = netloc if netloc.endswith("]") else re.sub(r":[0-9]*$", "", netloc)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse(text: str, *, field: str) -> Reference:
    """Return the pack of a registry that `text` names.

    Raises:
        InvalidRequest: It is no reference; `context["field"]` is `field`.
    """
    name, at, digest = text.removeprefix(SCHEME).partition("@")
    rest, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        rest, tag = name, DEFAULT_TAG
    registry, _, repository = rest.partition("/")
    if (
        len(text) > REGISTRY_REFERENCE_CHARS_MAX
        or len(rest) > REGISTRY_NAME_CHARS_MAX
        or not _names_a_host(registry)
        or not all(_PART.fullmatch(part) for part in repository.split("/"))
        or not _TAG.fullmatch(tag)
        or (at and not _DIGEST.fullmatch(digest))
    ):
        raise InvalidRequest(
            f"not a reference to a pack in a registry: {text[:80]!r}; write it like "
            "registry.example.com/team/numpy:1.0, with the registry's host, in lower case",
            field=field,
        )
    return Reference(registry, repository, tag, digest or None)


def _names_a_host(registry: str) -> bool:
    looks = "." in registry or ":" in registry or registry == "localhost"
    return looks and _HOST.fullmatch(registry) is not None
