"""Read the 64-byte header of a stored file, as `protocol/store/FORMAT.md` has it.

It tells "not ours", "too new", "too old" and "damaged" apart without reading the body.  That the
body matches its digest is checked by the VMM, once, when it loads the file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NoReturn

from blake3 import blake3

from forkd.errors import StoreError
from forkd.host import files

if TYPE_CHECKING:
    from pathlib import Path

HEADER_BYTES = 64

_HEADER = struct.Struct("<8sIIQ32s8s")
_CHECKED_BYTES = 56
_CHECK_BYTES = 8


class Magic(bytes, Enum):
    """What a stored file is."""

    STATE = b"FKDSTATE"
    MEMORY = b"FKDMEMRY"
    LAYER = b"FKDLAYER"

    @property
    def version(self) -> int:
        """The only version of such files that is read."""
        return 2 if self is Magic.STATE else 1


@dataclass(frozen=True, slots=True)
class Header:
    """A header that passed every check.

    Attributes:
        magic: What the file is.
        body_bytes: Length of the body.
        digest: BLAKE3 digest of the body, as hex.
    """

    magic: Magic
    body_bytes: int
    digest: str


def read_header(path: Path, magic: Magic) -> Header:
    """Read the header of `path`, which must be `magic`, and check the file's length by it.

    Raises:
        StoreError: The file is missing, not ours, too new, too old or damaged;
            `context["reason"]` says which: `missing`, `not_ours`, `too_new`, `too_old`,
            `damaged`.
        HostError: The kernel cannot read it.
    """
    found = files.read_start(path, HEADER_BYTES)
    if found is None:
        _refuse("missing", path, "there is no such file")
    raw, size = found
    if not raw.startswith(magic.value):
        _refuse("not_ours", path, f"it does not begin with {magic.value.decode()}")
    if len(raw) < HEADER_BYTES:
        _refuse("damaged", path, "it ends in its header")
    _, version, reserved, body_bytes, digest, check = _HEADER.unpack(raw)
    if blake3(raw[:_CHECKED_BYTES]).digest()[:_CHECK_BYTES] != check:
        _refuse("damaged", path, "its header does not match its own digest")
    if version > magic.version:
        why = f"it has version {version}, and we read {magic.version}"
        _refuse("too_new", path, f"{why}; start a later forkd, or bake the snapshot again")
    if version < 1 or reserved:
        _refuse("damaged", path, "its header holds impossible values")
    if version < magic.version:
        why = f"it has version {version}, and we read {magic.version}; bake the snapshot again"
        _refuse("too_old", path, why)
    if size != HEADER_BYTES + body_bytes:
        _refuse(
            "damaged", path, f"it has {size} bytes, its header says {HEADER_BYTES + body_bytes}"
        )
    return Header(magic, body_bytes, digest.hex())


def _refuse(reason: str, path: Path, why: str) -> NoReturn:
    words = {
        "missing": "is missing",
        "not_ours": "is not ours",
        "too_new": "is too new",
        "too_old": "is too old",
    }
    raise StoreError(
        f"{path.name} {words.get(reason, 'is damaged')}: {why}", reason=reason, path=str(path)
    )
