"""A pack's frame: its head with a signature, then compressed chunks, then its end.

Everything that is read is bounded before it is read or decompressed, and a pack that goes on
behind its end is refused.  `protocol/packs/FORMAT.md` has the bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import zstandard

from forkd.errors import PackError
from forkd.packs import keys, limits
from forkd.packs import manifest as manifests

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from forkd.packs.manifest import PackManifest

MAGIC = b"FKDPACK\0"

CUT = b""
"""Among records: the chunk ends here, however full it is."""

END = struct.pack("<II", 0, 0)
"""What ends a pack."""

CHUNK_HEAD = struct.Struct("<II")
"""In front of each chunk: its length as stored, and that of what it holds."""

_FIXED = struct.Struct("<8sII")
_UNSIGNED = bytes(keys.KEY_BYTES + keys.SIGNATURE_BYTES)
_ZSTD_LEVEL = 3


class Readable(Protocol):
    """What a pack is read from."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; fewer only at the end."""
        ...


class Pieces:
    """An iterator of bytes that can be read."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._held = bytearray()

    def read(self, size: int, /) -> bytes:
        """Return `size` bytes; fewer only at the end."""
        while len(self._held) < size:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self._held += piece
        taken = bytes(self._held[:size])
        del self._held[:size]
        return taken

    def rest(self) -> Iterator[bytes]:
        """Yield what has not been read."""
        if self._held:
            yield bytes(self._held)
            self._held.clear()
        yield from self._pieces


@dataclass(frozen=True, slots=True)
class Head:
    """What a pack begins with.

    Attributes:
        manifest: What it holds.
        raw: The manifest's own bytes, which the signature is about.
        key: The public key that signed it; None if nobody did.
        signature: The signature; empty if there is none.
    """

    manifest: PackManifest
    raw: bytes
    key: bytes | None = None
    signature: bytes = b""

    @property
    def signed_message(self) -> bytes:
        """What is signed: all that comes before the signature."""
        return _FIXED.pack(MAGIC, manifests.PACK_VERSION, len(self.raw)) + self.raw

    def signed(self, secret: bytes) -> Head:
        """Return this head with a signature by `secret`."""
        signature = keys.sign(secret, self.signed_message)
        return replace(self, key=keys.public_of(secret), signature=signature)

    def encode(self) -> bytes:
        """Return the head's bytes."""
        proof = _UNSIGNED if self.key is None else self.key + self.signature
        return self.signed_message + proof


def head_of(manifest: PackManifest) -> Head:
    """Return the unsigned head of a pack."""
    return Head(manifest, manifests.encode(manifest))


def read_head(source: Readable) -> Head:
    """Read a head; a signature that does not match is refused, whoever made it.

    Raises:
        PackError: It is no pack, too new, cut short, or something in it is refused.
    """
    fixed = exactly(source, _FIXED.size)
    magic, version, length = _FIXED.unpack(fixed)
    if magic != MAGIC:
        raise PackError("this is no pack: it does not begin with FKDPACK", reason="not_ours")
    if version > manifests.PACK_VERSION:
        raise manifests.too_new(version)
    if version != manifests.PACK_VERSION:
        raise PackError(f"this is no pack: no pack has version {version}", reason="not_ours")
    if length > limits.PACK_MANIFEST_BYTES_MAX:
        raise PackError(
            f"the pack's manifest has {length} bytes, "
            f"at most {limits.PACK_MANIFEST_BYTES_MAX} are read",
            reason="limit",
        )
    raw = exactly(source, length)
    proof = exactly(source, len(_UNSIGNED))
    return _verified(raw, proof)


def _verified(raw: bytes, proof: bytes) -> Head:
    key, signature = proof[: keys.KEY_BYTES], proof[keys.KEY_BYTES :]
    message = _FIXED.pack(MAGIC, manifests.PACK_VERSION, len(raw)) + raw
    if proof == _UNSIGNED:
        return Head(manifests.parse(raw), raw)
    if not keys.verifies(key, signature, message):
        raise PackError(
            "the pack's signature does not match its manifest: one of them was changed",
            reason="signature",
        )
    return Head(manifests.parse(raw), raw, key, signature)


def check_trust(head: Head, trusted: Iterable[bytes], *, allow_unsigned: bool) -> None:
    """Return if a pack is signed by a key that is trusted, or if that does not matter.

    Raises:
        PackError: It is not, and it does.
    """
    if allow_unsigned or head.key in set(trusted):
        return
    if head.key is None:
        raise PackError(
            "the pack is not signed; --allow-unsigned takes it all the same", reason="unsigned"
        )
    raise PackError(
        f"the pack is signed by a key that is not trusted: `{keys.show(head.key)}`; "
        f"`forkd key trust` believes it from then on",
        reason="untrusted",
    )


def checked(
    pieces: Iterable[bytes], trusted: Iterable[bytes], *, allow_unsigned: bool
) -> tuple[Head, Iterator[bytes]]:
    """Return the head of a pack that is trusted, as of `check_trust`, and what comes behind it."""
    source = Pieces(pieces)
    head = read_head(source)
    check_trust(head, trusted, allow_unsigned=allow_unsigned)
    return head, source.rest()


def chunks_of(records: Iterable[bytes]) -> Iterator[bytes]:
    """Compress records into chunks; the last piece is the end of the pack."""
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    held = bytearray()
    for record in records:
        if record == CUT and held:
            yield _chunk(compressor, bytes(held))
            held.clear()
        held += record
        while len(held) >= limits.CHUNK_BYTES_MAX:
            yield _chunk(compressor, bytes(held[: limits.CHUNK_BYTES_MAX]))
            del held[: limits.CHUNK_BYTES_MAX]
    if held:
        yield _chunk(compressor, bytes(held))
    yield END


def _chunk(compressor: zstandard.ZstdCompressor, data: bytes) -> bytes:
    stored = compressor.compress(data)
    return CHUNK_HEAD.pack(len(stored), len(data)) + stored


def contents(source: Readable) -> Iterator[bytes]:
    """Yield what the chunks hold, until the end of the pack.

    Raises:
        PackError: A chunk is damaged or too large, or the pack is cut short or goes on.
    """
    decompressor = zstandard.ZstdDecompressor()
    while True:
        stored, holds = CHUNK_HEAD.unpack(exactly(source, CHUNK_HEAD.size))
        if stored == holds == 0:
            break
        if not 0 < stored <= limits.CHUNK_STORED_BYTES_MAX:
            raise _bad_chunk(f"takes {stored} bytes")
        if not 0 < holds <= limits.CHUNK_BYTES_MAX:
            raise _bad_chunk(f"says that it holds {holds} bytes")
        yield _decompressed(decompressor, exactly(source, stored), holds)
    if source.read(1):
        raise PackError("the pack goes on behind its end", reason="trailing")


def _decompressed(decompressor: zstandard.ZstdDecompressor, stored: bytes, holds: int) -> bytes:
    try:
        frame = zstandard.get_frame_parameters(stored)
        if frame.content_size != holds or frame.dict_id:
            raise _bad_chunk(f"holds {frame.content_size} bytes and says {holds}")
        return decompressor.decompress(stored, max_output_size=holds, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _bad_chunk(f"does not decompress: {error}") from None


def _bad_chunk(why: str) -> PackError:
    return PackError(f"the pack is damaged: a chunk {why}", reason="damaged")


def exactly(source: Readable, size: int) -> bytes:
    """Return `size` bytes.

    Raises:
        PackError: There are fewer.
    """
    data = source.read(size)
    while 0 < len(data) < size:
        more = source.read(size - len(data))
        if not more:
            break
        data += more
    if len(data) != size:
        raise PackError("the pack is cut short", reason="truncated")
    return data
