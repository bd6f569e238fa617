"""Pushing and pulling packs, as far as both flavours do the same.

`forkd.packs` is slow to load, and an extra of the package, so it is loaded where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd import installed
from forkd.errors import HostError
from forkd.wire.v2 import ProgressEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.packs.container import Head
    from forkd.packs.sharing import Uploaded

DEFAULT_KEY = "default"
"""The key that signs if none is named."""

TOLD_BYTES = 64 * 1024 * 1024
"""How far a pack comes between two steps of which nothing else tells the end."""

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push has stored.

    Attributes:
        target: The registry's reference, or the URL without its query and its credentials.
        tag: The snapshot.
        links: The snapshots of its chain, base first, itself included.
        signed_by: The public key that signed it, as hex; None if it is not signed.
        bytes: How long the pack is.
        digest: In a registry, of the artifact's manifest; in a folder, of the pack; else None.
        version: Its version in a folder; None elsewhere.
        sent_bytes: How much of it was sent.
        layers: How many layers it has in a registry; None elsewhere.
        sent_layers: How many of them the registry lacked.
    """

    target: str
    tag: str
    links: list[str]
    signed_by: str | None
    bytes: int
    digest: str | None
    version: str | None
    sent_bytes: int | None
    layers: int | None
    sent_layers: int | None


def pushed(head: Head, uploaded: Uploaded) -> Pushed:
    """Return what a caller is told of an upload."""
    return Pushed(
        target=uploaded.target,
        tag=head.manifest.head.tag,
        links=[link.tag for link in head.manifest.links],
        signed_by=None if head.key is None else head.key.hex(),
        bytes=uploaded.bytes,
        digest=uploaded.digest,
        version=uploaded.version,
        sent_bytes=uploaded.sent_bytes,
        layers=uploaded.layers,
        sent_layers=uploaded.sent_layers,
    )


def check_installed() -> None:
    """Return if the libraries of packs are installed.

    Raises:
        HostError: They are not; the message says what to run.
    """
    if (lack := installed.lacking("packs")) is not None:
        raise HostError(lack)


class Steps:
    """How far one stage of a transfer has come, told at its beginning and now and then.

    Args:
        told: Called with each step; None for nobody.
        stage: The stage.
        message: What is done.

    Attributes:
        size: How many bytes were transferred.
    """

    def __init__(
        self, told: Callable[[ProgressEvent], object] | None, stage: str, message: str
    ) -> None:
        self._told = told
        self._stage = stage
        self._message = message
        self.size = 0
        self._tell(message, None)

    def add(self, size: int) -> None:
        """Take note of so many bytes more, and tell it now and then."""
        before, self.size = self.size, self.size + size
        if before // TOLD_BYTES != self.size // TOLD_BYTES:
            self._tell(f"{self._message}, {self.size // MIB} MiB", None)

    def reach(self, size: int, whole: int) -> None:
        """Tell that `size` of so many bytes were transferred."""
        self.size = size
        self._tell(f"{self._message}, {size // MIB} MiB", size / whole)

    def _tell(self, message: str, fraction: float | None) -> None:
        if self._told is not None:
            step = ProgressEvent(stage=self._stage, message=message, fraction=fraction)
            self._told(step)
