"""Requests and answers about packs of snapshots.

The rules are those of `wire.v2`.
"""

from __future__ import annotations

from pydantic import Field

from forkd import limits
from forkd.wire.parts import Answer, Query
from forkd.wire.v2 import SnapshotInfo


class Unpack(Query):
    """On which terms a pack is taken; the pack is the request's body."""

    trusted: str = Field(
        default="",
        max_length=limits.TRUSTED_CHARS_MAX,
        pattern=r"^([0-9a-f]{64}(,[0-9a-f]{64})*)?$",
        description="Public keys whose signature is believed, as hex, with commas between them.",
    )
    allow_unsigned: bool = Field(default=False, description="Whoever signed it, or nobody.")


class UnpackedLink(Answer):
    """One snapshot of a pack's chain."""

    tag: str = Field(description="What it is called here.")
    reused: bool = Field(description="Whether it was here before.")


class Unpacked(Answer):
    """A pack is in the store."""

    snapshot: SnapshotInfo
    links: list[UnpackedLink] = Field(description="Its chain, base first, itself included.")
    signed_by: str | None = Field(description="The public key that signed it, as hex.")
    missing_features: list[str] = Field(
        description="What its guest saw of the processor and is not here: features, or the vendor."
    )
