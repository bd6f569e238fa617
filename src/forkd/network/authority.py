"""The CA of a tree of sandboxes, and certificates that it signs; pure.

Its key follows from the host's key and the tree's id: there is nothing to store, to give away or to
forget, and the next daemon has it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS, LEAF_DAYS = 3_650, 30
"""How long a CA lives, and what it signs."""

_BEFORE = timedelta(days=1)
"""How long before their making they are valid: a guest's clock may be behind."""

_CURVE = ec.SECP256R1()
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of P-256 (SEC 2, section 2.4.2)."""

_DERIVED_BYTES = 48
"""So many more than the order has that taking the remainder favours no key (FIPS 186-5, A.2.1)."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A certificate with its key, both in PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """A CA.

    Args:
        host_key: What only this host knows.
        root: Of which tree of sandboxes.
    """

    def __init__(self, host_key: bytes, root: str) -> None:
        info = b"forkd authority " + root.encode()
        derived = HKDF(hashes.SHA256(), _DERIVED_BYTES, salt=None, info=info).derive(host_key)
        number = int.from_bytes(derived) % (_ORDER - 1) + 1
        self._key = ec.derive_private_key(number, _CURVE)
        self._name = _name(f"forkd {root}")

    def certificate(self, now: datetime | None = None) -> bytes:
        """Return its own certificate, in PEM, which differs each time in its dates only."""
        key = self._key.public_key()
        signed = (
            self._builder(self._name, key, AUTHORITY_DAYS, now)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return signed.public_bytes(Encoding.PEM)

    def leaf(self, name: str, now: datetime | None = None) -> Leaf:
        """Return a certificate for a server of this name."""
        key = ec.generate_private_key(_CURVE)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        signed = (
            self._builder(_name("forkd egress proxy"), key.public_key(), LEAF_DAYS, now)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(usages, critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Leaf(signed.public_bytes(Encoding.PEM), secret)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: int, now: datetime | None
    ) -> x509.CertificateBuilder:
        now = now or datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BEFORE)
            .not_valid_after(now + timedelta(days=days))
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs,
        content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
