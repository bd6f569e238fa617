"""Certificates for tests: a CA, what it signs, and what is wrong with others."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path

DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate with its key, and those of the CAs between it and the root."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    chain: tuple[x509.Certificate, ...] = ()

    def write(self, folder: Path, name: str, *, password: bytes | None = None) -> tuple[Path, Path]:
        """Write both; return where they are."""
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        cert.write_bytes(
            b"".join(each.public_bytes(Encoding.PEM) for each in (self.certificate, *self.chain))
        )
        hidden = NoEncryption() if password is None else BestAvailableEncryption(password)
        key.touch(0o600)
        key.write_bytes(self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, hidden))
        return cert, key

    def sign(
        self, name: str, *, is_ca: bool = False, days: int = 1, names: tuple[str, ...] = ()
    ) -> Signed:
        """Return a certificate that this one has signed, for this host or for `names`."""
        chain = () if self.is_root else (self.certificate, *self.chain)
        return _signed(name, is_ca=is_ca, days=days, issuer=self, chain=chain, names=names)

    @property
    def is_root(self) -> bool:
        """Whether it has signed itself."""
        return self.certificate.issuer == self.certificate.subject


def root(name: str = "root") -> Signed:
    """Return a CA of its own."""
    return _signed(name, is_ca=True, days=1, issuer=None, chain=())


def _signed(  # noqa: PLR0913 - what a certificate consists of
    name: str,
    *,
    is_ca: bool,
    days: int,
    issuer: Signed | None,
    chain: tuple[x509.Certificate, ...],
    names: tuple[str, ...] = (),
) -> Signed:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer = key if issuer is None else issuer.key
    signer_name = subject if issuer is None else issuer.certificate.subject
    begins = datetime.now(UTC) - 10 * DAY
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(datetime.now(UTC) + days * DAY)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=True, key_cert_sign=is_ca, crl_sign=is_ca,
                content_commitment=False, key_encipherment=False, data_encipherment=False,
                key_agreement=False, encipher_only=False, decipher_only=False,
            ),
            critical=True,
        )
    )  # fmt: skip
    if not is_ca:
        served: list[x509.GeneralName] = [x509.DNSName(each) for each in names]
        if not served:
            loopback = x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))
            served = [x509.DNSName("localhost"), loopback]
        builder = builder.add_extension(x509.SubjectAlternativeName(served), critical=False)
    return Signed(builder.sign(signer, hashes.SHA256()), key, chain)
