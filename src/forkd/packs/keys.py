"""Who signs packs, and whose signature is believed: ed25519, and two folders of small files.

    <folder>/keys/<name>      a secret key: `forkd-secret-ed25519 <base64>`, mode 0600
    <folder>/trusted/<name>   a public key: `forkd-ed25519 <base64>`

A new key is trusted from the start, because it is one's own; `rm` takes both files.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from forkd.errors import Conflict, InvalidRequest, NotFound
from forkd.packs.limits import TRUSTED_KEYS_MAX

SECRET = "forkd-secret-ed25519"  # noqa: S105 - what such a file begins with
PUBLIC = "forkd-ed25519"
KEY_BYTES = 32
SIGNATURE_BYTES = 64

KEY_FILE_BYTES_MAX = 1024
"""A key file longer than this is not one of ours."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,63}")


def sign(secret: bytes, message: bytes) -> bytes:
    """Return the signature of `message` by a secret key."""
    return Ed25519PrivateKey.from_private_bytes(secret).sign(message)


def public_of(secret: bytes) -> bytes:
    """Return the public key that belongs to a secret one."""
    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def verifies(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether `signature` of `message` was made with the secret key of `public`."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def show(public: bytes) -> str:
    """Return a public key as people pass it on."""
    return f"{PUBLIC} {base64.b64encode(public).decode()}"


def parse_public(text: str) -> bytes:
    """Return the public key in `text`, as `show` wrote it.

    Raises:
        InvalidRequest: It is none.
    """
    return _parse(text, PUBLIC, "a public key")


def _parse(text: str, kind: str, what: str) -> bytes:
    word, _, encoded = text.strip().partition(" ")
    try:
        key = base64.b64decode(encoded.strip(), validate=True)
    except binascii.Error:
        key = b""
    if word != kind or len(key) != KEY_BYTES:
        raise InvalidRequest(f"{what} is `{kind}` and 44 characters of base64", field="key")
    return key


@dataclass(frozen=True, slots=True)
class Key:
    """One name of a keyring.

    Attributes:
        name: What it is called here.
        public: Its public key.
        own: Whether we can sign with it.
        trusted: Whether its signature is believed.
    """

    name: str
    public: bytes
    own: bool
    trusted: bool


class Keyring:
    """The keys below one folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self._keys = (folder or default_folder()) / "keys"
        self._trusted = (folder or default_folder()) / "trusted"

    def new(self, name: str) -> Key:
        """Make a key and trust it.

        Raises:
            Conflict: The name is taken.
            CapacityError: The trust list is full.
        """
        self._free(name)
        private = Ed25519PrivateKey.generate()
        secret, public = private.private_bytes_raw(), private.public_key().public_bytes_raw()
        _write(self._keys / name, f"{SECRET} {base64.b64encode(secret).decode()}\n", mode=0o600)
        _write(self._trusted / name, show(public) + "\n", mode=0o644)
        return Key(name, public, own=True, trusted=True)

    def trust(self, name: str, public: bytes) -> Key:
        """Believe the signatures of a key from now on.

        Raises:
            Conflict: The name is taken by another key.
        """
        if (path := self._trusted / _checked(name)).exists():
            if _public_in(path) != public:
                raise Conflict(f"the name {name} belongs to another key", name=name)
        else:
            self._free(name)
            _write(path, show(public) + "\n", mode=0o644)
        return self.get(name)

    def list_all(self) -> list[Key]:
        """Return every key, by name."""
        return [self.get(name) for name in sorted({*_names(self._keys), *_names(self._trusted)})]

    def get(self, name: str) -> Key:
        """Return one key.

        Raises:
            NotFound: There is none of that name.
        """
        own, trusted = self._keys / _checked(name), self._trusted / name
        if own.exists():
            return Key(name, public_of(self.secret(name)), own=True, trusted=trusted.exists())
        if trusted.exists():
            return Key(name, _public_in(trusted), own=False, trusted=True)
        raise NotFound(f"no key {name!r} in {self._keys.parent}; `forkd key ls` shows them")

    def secret(self, name: str) -> bytes:
        """Return a secret key, to sign with.

        Raises:
            NotFound: There is none of that name.
            InvalidRequest: Others may read it, or it is damaged.
        """
        path = self._keys / _checked(name)
        if not path.exists():
            raise NotFound(f"no secret key {name!r}; `forkd key new {name}` makes one", name=name)
        if path.stat().st_mode & 0o077:
            raise InvalidRequest(f"others may read {path}; `chmod 600` it, or make another")
        return _parse(_text(path), SECRET, f"{path}: a secret key")

    def trusted(self) -> list[bytes]:
        """Return the public keys whose signature is believed."""
        return [_public_in(self._trusted / name) for name in _names(self._trusted)]

    def name_of(self, public: bytes) -> str | None:
        """Return what a public key is called here; None if it is not known."""
        return next((key.name for key in self.list_all() if key.public == public), None)

    def remove(self, name: str) -> None:
        """Forget a key, its secret too if we have that.

        Raises:
            NotFound: There is none of that name.
        """
        self.get(name)
        for folder in (self._keys, self._trusted):
            (folder / name).unlink(missing_ok=True)

    def _free(self, name: str) -> None:
        if (self._keys / _checked(name)).exists() or (self._trusted / name).exists():
            raise Conflict(f"there is a key {name} already", name=name)
        if len(_names(self._trusted)) >= TRUSTED_KEYS_MAX:
            raise Conflict(f"{TRUSTED_KEYS_MAX} keys are trusted already; `forkd key rm` one")


def default_folder() -> Path:
    """Return where keys are: `FORKD_KEYS`, or the user's configuration."""
    if named := os.environ.get("FORKD_KEYS"):
        return Path(named)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "forkd"


def _checked(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"a key's name is a letter, digit or _, then up to 63 of these, '.', '@' and '-': "
            f"{name[:80]!r}",
            field="name",
        )
    return name


def _names(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(each.name for each in folder.iterdir() if _NAME.fullmatch(each.name))


def _public_in(path: Path) -> bytes:
    return _parse(_text(path), PUBLIC, f"{path}: a public key")


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(KEY_FILE_BYTES_MAX).decode(errors="replace")


def _write(path: Path, text: str, *, mode: int) -> None:
    """Put a key under its name, whole, and never open to more than it should be."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, aside = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(aside).rename(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
