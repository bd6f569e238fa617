"""Secrets with their values, in memory, and the key under which they are on the disk.

    <state>/secrets.key   32 random bytes, made with the first secret, readable by its owner only

The database holds values encrypted by a key that follows from it (AES-256-GCM, with the secret's
tenant and name as associated data): who gets a copy of the database alone has none of them.  Who
gets both files has them all: the daemon must be able to start without anybody who types a password.
The CAs of sandboxes follow from the same key.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from forkd.errors import NotFound, StoreError
from forkd.host import files
from forkd.model.secret import Bound, SecretValue
from forkd.network.authority import Authority

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.model.caller import Tenant
    from forkd.model.secret import Secret, SecretUse

KEY_FILE = "secrets.key"
KEY_BYTES = 32

AUTHORITIES_MAX = 1_024
"""Most CAs that are kept to sign again; another follows from the key at once."""

_NONCE_BYTES = 12
_VERSION = b"\x01"
_HEAD_BYTES = len(_VERSION) + _NONCE_BYTES


class Vault:
    """The secrets of one host.

    Args:
        state_dir: Where the key is.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / KEY_FILE
        self._key = b""
        self._bound: dict[tuple[Tenant, str], Bound] = {}
        self._authorities: OrderedDict[str, Authority] = OrderedDict()

    def unlock(self, *, make: bool) -> None:
        """Read the key; may block.

        Args:
            make: Make one if there is none.

        Raises:
            StoreError: There is none, or it is none.
            HostError: The kernel refused.
        """
        found = files.read(self._path, KEY_BYTES + 1)
        if found is None and make:
            found = secrets.token_bytes(KEY_BYTES)
            files.write_atomic(self._path, found, mode=0o600)
        if found is None:
            raise StoreError(f"there is no {self._path}, without which no secret can be read")
        if len(found) != KEY_BYTES:
            raise StoreError(f"{self._path} is damaged: it has not {KEY_BYTES} bytes")
        self._key = found

    def seal(self, secret: Secret, value: SecretValue) -> bytes:
        """Return a value as it is on the disk."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._cipher().encrypt(nonce, value.reveal().encode(), _about(secret))
        return _VERSION + nonce + sealed

    def unseal(self, secret: Secret, sealed: bytes) -> SecretValue:
        """Return a value that is on the disk.

        Raises:
            StoreError: It was sealed by a later forkd, with another key, or as another secret.
        """
        version, nonce, rest = sealed[:1], sealed[1:_HEAD_BYTES], sealed[_HEAD_BYTES:]
        if version > _VERSION:
            raise StoreError(
                f"the secret {secret.name} is stored in version {version[0]}, and this forkd reads "
                f"{_VERSION[0]}: start the forkd that wrote it, or a later one",
                reason="too_new",
            )
        try:
            if version != _VERSION:
                rest = b""  # which no key opens
            return SecretValue(self._cipher().decrypt(nonce, rest, _about(secret)).decode())
        except (InvalidTag, ValueError):
            raise StoreError(
                f"the secret {secret.name} cannot be read with {self._path}: set it again"
            ) from None

    def put(self, bound: Bound) -> None:
        """Have a secret, in the place of one of its tenant and name."""
        self._bound[bound.secret.tenant, bound.secret.name] = bound

    def drop(self, tenant: Tenant, name: str) -> None:
        """Have a secret no more; one that is not there is fine."""
        self._bound.pop((tenant, name), None)

    def all(self) -> tuple[Secret, ...]:
        """Return every secret, by tenant and name, without its value."""
        return tuple(self._bound[key].secret for key in sorted(self._bound))

    def has(self, tenant: Tenant, name: str) -> bool:
        """Whether there is a secret of that name."""
        return (tenant, name) in self._bound

    def check(self, tenant: Tenant, names: tuple[str, ...]) -> None:
        """Return if a tenant has all these secrets.

        Raises:
            NotFound: It has not.
        """
        for name in names:
            if not self.has(tenant, name):
                raise NotFound(f"no secret {name!r}", secret=name)

    def bound(self, use: SecretUse) -> tuple[Bound, ...]:
        """Return the secrets that a sandbox may use now; those that are gone are not there."""
        found = (self._bound.get((use.tenant, name)) for name in use.names)
        return tuple(each for each in found if each is not None)

    def ports(self, use: SecretUse) -> frozenset[int]:
        """Return the ports of the hosts that a sandbox's secrets are for."""
        return frozenset(port for each in self.bound(use) for port in each.secret.ports)

    def placeholders(self, use: SecretUse) -> dict[str, str]:
        """Return the variables that hold placeholders in a sandbox."""
        held = (each.secret for each in self.bound(use))
        return {each.env: each.placeholder for each in held if each.env is not None}

    def authority(self, root: str) -> Authority:
        """Return the CA of a tree of sandboxes."""
        if not self._key:
            self.unlock(make=True)  # its secrets were removed, and so nobody has read it yet
        found = self._authorities.pop(root, None) or Authority(self._key, root)
        self._authorities[root] = found
        if len(self._authorities) > AUTHORITIES_MAX:
            self._authorities.popitem(last=False)
        return found

    def _cipher(self) -> AESGCM:
        info = b"forkd secrets"
        return AESGCM(HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=info).derive(self._key))


def _about(secret: Secret) -> bytes:
    return f"{secret.tenant}/{secret.name}".encode()
