"""References to packs in registries: `REGISTRY/NAME[:TAG][@DIGEST]`, with or without `oci://`."""

from __future__ import annotations

from dataclasses import dataclass

from forkd.errors import InvalidRequest
from forkd.packs.limits import REGISTRY_REFERENCE_CHARS_MAX
from forkd.registry import names

SCHEME = "oci://"
"""May stand before a reference, to say that it is one."""


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
        return names.host_of(self.registry)

    @property
    def is_loopback(self) -> bool:
        """Whether the registry is on this very host."""
        return names.is_loopback(self.registry)


def is_reference(text: str) -> bool:
    """Whether `text` means a registry, and neither a URL nor a name in a folder of packs."""
    return text.startswith(SCHEME) or ("://" not in text and "/" in text)


def parse(text: str, *, field: str) -> Reference:
    """Return the pack of a registry that `text` names.

    Raises:
        InvalidRequest: It is no reference; `context["field"]` is `field`.
    """
    words = names.cut(text.removeprefix(SCHEME))
    registry, _, repository = words.name.partition("/")
    if (
        len(text) > REGISTRY_REFERENCE_CHARS_MAX
        or not names.is_host(registry)
        or not words.are_sound(registry, repository)
    ):
        raise InvalidRequest(
            f"not a reference to a pack in a registry: {text[:80]!r}; write it like "
            "registry.example.com/team/numpy:1.0, with the registry's host, in lower case",
            field=field,
        )
    return Reference(registry, repository, words.tag, words.digest)
