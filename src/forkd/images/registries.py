"""Registries: which may be asked without TLS, and with which credentials.

Plain HTTP is for registries on this very host, and for those that the operator names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.model.reference import parse_reference

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Access:
    """How a registry is asked.

    Attributes:
        insecure: Whether without TLS, or with a certificate of anybody's, if need be.
        auth_file: Credentials; None for none.
    """

    insecure: bool
    auth_file: Path | None

    def options(self) -> tuple[str | Path, ...]:
        """Return it as our programs are told."""
        insecure = ("--insecure",) if self.insecure else ()
        return insecure if self.auth_file is None else (*insecure, "--auth-file", self.auth_file)


@dataclass(frozen=True, slots=True)
class Registries:
    """What an operator says of registries.

    Attributes:
        insecure: Hosts, with their port if they have one, that need no TLS.
        auth_file: Credentials, as `docker login` and `podman login` write them; None for none.
    """

    insecure: frozenset[str] = frozenset()
    auth_file: Path | None = None

    def is_insecure(self, reference: str) -> bool:
        """Whether the registry of an image may be asked without TLS."""
        image = parse_reference(reference.removeprefix("//"))
        return image.is_loopback or image.registry in self.insecure

    def access(self, reference: str) -> Access:
        """Return how the registry of an image is asked."""
        return Access(self.is_insecure(reference), self.auth_file)
