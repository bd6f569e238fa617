"""Registries: which may be asked without TLS, with which credentials, and what a tag means now.

skopeo does the asking.  Plain HTTP is for registries on this very host, and for those that the
operator names, here or in the `registries.conf` of containers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import BuildError, NotFound
from forkd.model.reference import parse_reference

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

UNKNOWN = ("manifest unknown", "name unknown", "repository name not known", "was deleted")
"""What registries say of an image that they have not."""

REFUSED = ("unauthorized", "denied", "authentication required", "forbidden")
"""What they say to those who may not have it, or whose credentials are wrong."""

PLAIN = "http response to https client"
"""What a client says of a registry without TLS."""

UNREACHABLE = (
    "connection refused",
    "no such host",
    "i/o timeout",
    "network is unreachable",
    "no route to host",
    "deadline exceeded",
    "server misbehaving",
    "operation not permitted",
)
"""What it says of one that does not answer; the last, of one that builds may not reach."""


@dataclass(frozen=True, slots=True)
class Registries:
    """What an operator says of registries.

    Attributes:
        insecure: Hosts, with their port if they have one, that need no TLS.
        auth_file: Credentials, as `skopeo login` writes them; None for none.
    """

    insecure: frozenset[str] = frozenset()
    auth_file: Path | None = None

    def is_insecure(self, reference: str) -> bool:
        """Whether the registry of an image may be asked without TLS."""
        image = parse_reference(reference.removeprefix("//"))
        return image.is_loopback or image.registry in self.insecure


def flags(*, insecure: bool, auth_file: Path | None, prefix: str = "") -> list[str]:
    """Return the flags with which skopeo asks a registry; `prefix` is `src-` for a copy."""
    tls = [f"--{prefix}tls-verify=false"] if insecure else []
    return tls if auth_file is None else [*tls, f"--{prefix}authfile", str(auth_file)]


def resolve_command(reference: str, flags: Sequence[str]) -> list[str | Path]:
    """Return the words that write the manifest of an image to standard output."""
    return ["skopeo", "inspect", "--raw", *flags, f"docker://{reference}"]


def explained(reference: str, error: BuildError) -> BuildError | NotFound:
    """Return what it means that skopeo failed to get an image of a registry."""
    registry = parse_reference(reference.removeprefix("//")).registry
    shown, said = reference.removeprefix("//"), str(error).lower()
    if any(words in said for words in UNKNOWN):
        return NotFound(f"no image {shown}: {registry} has no such repository or tag", image=shown)
    if any(words in said for words in REFUSED):
        return BuildError(
            f"{registry} refuses {shown}: it does not exist there, or needs credentials, which "
            "the operator gives in FORKD_REGISTRY_AUTH_FILE",
            image=shown,
        )
    if PLAIN in said:
        return BuildError(
            f"{registry} speaks plain HTTP, so {shown} was not fetched: the operator may allow "
            "that in FORKD_REGISTRIES_INSECURE",
            image=shown,
        )
    if any(words in said for words in UNREACHABLE):
        return BuildError(
            f"cannot reach {registry} for {shown}: {_reason(str(error))}; "
            "check the daemon's network, and FORKD_BUILD_NETWORK",
            image=shown,
        )
    return BuildError(f"cannot fetch {shown}: {_reason(str(error))}", image=shown)


def _reason(said: str) -> str:
    """Return what skopeo says went wrong, without what it says around it."""
    _, marked, rest = said.partition('msg="')
    return (rest.rpartition('"')[0] or rest).replace('\\"', '"') if marked else said
