"""A chain of snapshots that comes from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forkd.model.ids import Tag
    from forkd.model.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class UnpackRequest:
    """Under which name, and on which terms, a pack is taken.

    Attributes:
        tag: What its head is called here.
        trusted: Public keys, of 32 bytes each, whose signature is believed.
        allow_unsigned: Whether a pack that is unsigned, or signed by another key, is taken too.
    """

    tag: Tag
    trusted: tuple[bytes, ...] = ()
    allow_unsigned: bool = False


@dataclass(frozen=True, slots=True)
class UnpackedLink:
    """One snapshot of the chain, as it is called here.

    Attributes:
        tag: Its name.
        reused: Whether it was here before.
    """

    tag: Tag
    reused: bool


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A pack that is in the store now.

    Attributes:
        snapshot: Its head.
        links: Its chain, base first, the head included.
        signed_by: The public key that signed it; None if nobody did.
        missing_features: Features of the CPU that its guest saw and this host lacks, or its vendor.
    """

    snapshot: Snapshot
    links: tuple[UnpackedLink, ...]
    signed_by: bytes | None
    missing_features: tuple[str, ...]
