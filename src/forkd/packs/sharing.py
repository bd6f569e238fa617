"""What `push` and `pull` do, for the SDK and so for the command line.

A pack goes to a registry or to a server, and comes from one.  Both block, piece by piece, so that
an asynchronous caller can have each piece in a thread.
"""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest
from forkd.packs import artifacts, cosign, references
from forkd.packs.container import checked, read_head
from forkd.packs.keys import Keyring
from forkd.packs.registry import Registry
from forkd.packs.remote import Remote, shown, source_of, target_of
from forkd.registry import credentials

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from typing import BinaryIO

    from cryptography.hazmat.primitives.asymmetric import ec

    from forkd.packs.container import Head
    from forkd.packs.references import Reference
    from forkd.packs.remote import Place

FOLDER_VARIABLE = "FORKD_PACKS_URL"
"""The folder of names that are pulled without one."""

TOKEN_VARIABLE = "FORKD_PACKS_TOKEN"  # noqa: S105 - its name
"""The bearer token for a server."""


@dataclass(frozen=True, slots=True)
class Uploaded:
    """What an upload stored.

    Attributes:
        target: The registry's reference, or the URL without what in it may be secret.
        bytes: How long the pack is there.
        digest: Of the artifact's manifest, or of the pack in a folder; None for a single file.
        version: In a folder; None elsewhere.
        layers: How many layers a registry has of it; None elsewhere.
        sent_layers: How many of them the registry lacked.
        sent_bytes: How much was sent.
    """

    target: str
    bytes: int
    digest: str | None = None
    version: str | None = None
    layers: int | None = None
    sent_layers: int | None = None
    sent_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ToRegistry:
    """A push to a registry, all of whose arguments are sound."""

    reference: Reference
    signer: ec.EllipticCurvePrivateKey | None
    plain_http: bool

    def __str__(self) -> str:
        """Return where it goes."""
        return str(self.reference)

    def upload(self, file: BinaryIO, head: Head) -> Generator[int | Uploaded, None, None]:  # noqa: ARG002 - as `ToServer`
        """Store a pack: yields how many of its bytes are stored, and in the end what was."""
        login = credentials.login_for(self.reference, os.environ)
        file.seek(0)
        with Registry(self.reference, login, plain_http=self.plain_http) as registry:
            for done in artifacts.push(registry, self.reference, file):
                if isinstance(done, int):
                    yield done
                    continue
                if self.signer is not None:
                    artifacts.sign(registry, self.reference, done.digest, self.signer)
                yield Uploaded(
                    str(self),
                    done.bytes,
                    done.digest,
                    layers=done.layers,
                    sent_layers=done.sent_layers,
                    sent_bytes=done.sent_bytes,
                )


@dataclass(frozen=True, slots=True)
class ToServer:
    """A push to a server, all of whose arguments are sound."""

    place: Place

    def __str__(self) -> str:
        """Return where it goes."""
        return shown(self.place.url)

    def upload(self, file: BinaryIO, head: Head) -> Generator[int | Uploaded, None, None]:
        """Store a pack, as `ToRegistry`; nothing is known while it is sent."""
        with Remote(os.environ.get(TOKEN_VARIABLE)) as remote:
            published = remote.push(file, self.place, head.key)
        size = file.seek(0, os.SEEK_END)
        if published is None:
            yield Uploaded(str(self), size, sent_bytes=size)
        else:
            yield Uploaded(str(self), size, published.digest, published.version, sent_bytes=size)


def push_target(
    tag: str,
    target: str,
    *,
    version: str | None = None,
    cosign_key: str | os.PathLike[str] | None = None,
    plain_http: bool = False,
) -> ToRegistry | ToServer:
    """Return where a snapshot's pack goes, before anything is packed.

    Raises:
        InvalidRequest: An argument is malformed, or not for that kind of target.
    """
    if not references.is_reference(target):
        _check_only_for_registries(cosign_key, plain_http=plain_http)
        return ToServer(target_of(target, tag, version))
    if version is not None:
        words = "version: is only for folders, a registry has tags; write NAME:TAG"
        raise InvalidRequest(words, field="version")
    reference = references.parse(target, field="url")
    if reference.digest is not None:
        raise InvalidRequest(f"{reference}: a push makes the digest; write NAME:TAG", field="url")
    signer = None if cosign_key is None else cosign.read_secret(Path(cosign_key))
    return ToRegistry(reference, signer, plain_http)


def secret_key(name: str) -> bytes:
    """Return a secret key of the user's.

    Raises:
        NotFound: There is none of that name.
    """
    return Keyring().secret(name)


def trusted_keys() -> list[bytes]:
    """Return the public keys that the user trusts."""
    return Keyring().trusted()


def signed_in(file: BinaryIO, secret: bytes | None) -> Head:
    """Sign the pack in a file; None leaves it unsigned."""
    file.seek(0)
    head = read_head(file)
    if secret is not None:
        head = head.signed(secret)
        file.seek(0)
        file.write(head.encode())
    return head


@dataclass(frozen=True, slots=True)
class FromRegistry:
    """A pull from a registry, all of whose arguments are sound."""

    reference: Reference
    key: ec.EllipticCurvePublicKey | None
    plain_http: bool

    name: str | None = None
    """What the snapshot is called there; None if its own tag says."""

    def pieces(self) -> Generator[bytes, None, None]:
        """Yield the pack as it is there."""
        login = credentials.login_for(self.reference, os.environ)
        with Registry(self.reference, login, plain_http=self.plain_http) as registry:
            yield from artifacts.fetch(registry, self.reference, self.key)


@dataclass(frozen=True, slots=True)
class FromServer:
    """A pull from a server, all of whose arguments are sound."""

    place: Place

    @property
    def name(self) -> str | None:
        """What the snapshot is called there, as of `FromRegistry`."""
        return self.place.name

    def pieces(self) -> Generator[bytes, None, None]:
        """Yield the pack as it is there."""
        with Remote(os.environ.get(TOKEN_VARIABLE)) as remote:
            url, published = remote.find(self.place)
            with remote.fetch(url, published) as pieces:
                yield from pieces


def pull_source(
    source: str,
    *,
    folder: str | None = None,
    cosign_key: str | os.PathLike[str] | None = None,
    plain_http: bool = False,
) -> FromRegistry | FromServer:
    """Return where a pack comes from, before anything is fetched.

    Raises:
        InvalidRequest: An argument is malformed, or not for that kind of source.
    """
    if not references.is_reference(source):
        _check_only_for_registries(cosign_key, plain_http=plain_http)
        return FromServer(source_of(source, folder or os.environ.get(FOLDER_VARIABLE)))
    reference = references.parse(source, field="source")
    key = None if cosign_key is None else cosign.read_public(Path(cosign_key))
    return FromRegistry(reference, key, plain_http)


def download(
    source: FromRegistry | FromServer, trusted: Iterable[bytes], *, allow_unsigned: bool
) -> Generator[bytes, None, None]:
    """Yield the pieces of a pack, first its whole head.

    Raises:
        PackError: Nobody who is trusted has signed it, and that matters; or it was changed.
    """
    with contextlib.closing(source.pieces()) as pieces:
        head, rest = checked(pieces, trusted, allow_unsigned=allow_unsigned)
        yield head.encode()
        yield from rest


def tag_in(head: bytes) -> str:
    """Return what a pack calls its snapshot, from its head."""
    return read_head(io.BytesIO(head)).manifest.head.tag


def _check_only_for_registries(
    cosign_key: str | os.PathLike[str] | None, *, plain_http: bool
) -> None:
    given = {"cosign_key": cosign_key is not None, "plain_http": plain_http}
    for name in (each for each, is_given in given.items() if is_given):
        words = f"{name}: is only for registries; write REGISTRY/NAME:TAG"
        raise InvalidRequest(words, field=name)
