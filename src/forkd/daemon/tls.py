"""Certificates of the TCP address: read, checked, and read again while connections go on.

Files are checked before anything listens, so that a wrong one is an error of the operator's, which
names the setting, and not one of each client's.
"""

from __future__ import annotations

import logging
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NoReturn

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from forkd.daemon.settings import variable
from forkd.errors import InvalidRequest
from forkd.host import files

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

    from forkd.daemon.settings import Settings

FILE_BYTES_MAX = 4 << 20
"""A file of certificates longer than this is none."""

OTHERS = 0o077
"""Permission bits of everybody but a file's owner."""

CERT, KEY, CLIENT_CA = "tls_cert", "tls_key", "tls_client_ca"

log = logging.getLogger(__name__)


class Certificates:
    """What new connections are greeted with.

    Args:
        settings: Name the files.

    Attributes:
        context: For connections that begin now.
        asks_clients: Whether clients need certificates, too.

    Raises:
        InvalidRequest: A file cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self.asks_clients = settings.tls_client_ca is not None
        self.context = _context(settings)

    def reload(self, settings: Settings) -> None:
        """Read the files that settings name now; those of before stay in use if one cannot be.

        Raises:
            InvalidRequest: A file cannot be used.
        """
        self.context = _context(settings)


def certificates(settings: Settings) -> Certificates | None:
    """Return the certificates of TCP; None if it is served without TLS.

    Raises:
        InvalidRequest: The settings do not agree, or a file cannot be used.
    """
    given = [name for name in (CERT, KEY, CLIENT_CA) if getattr(settings, name) is not None]
    if not given:
        return None
    for name in (CERT, KEY):
        if name not in given:
            raise InvalidRequest(
                f"{variable(given[0])} is set and {variable(name)} is not: TLS needs both "
                f"{variable(CERT)} and {variable(KEY)}",
                field=name,
            )
    if settings.bind is None:
        raise InvalidRequest(
            f"{variable(CERT)} is set, and nothing listens on TCP: set {variable('bind')} too",
            field="bind",
        )
    return Certificates(settings)


def _context(settings: Settings) -> ssl.SSLContext:
    cert, key = settings.tls_cert, settings.tls_key
    assert cert is not None  # noqa: S101 - `certificates` has looked
    assert key is not None  # noqa: S101 - likewise
    own = _certificates(CERT, cert)[0]
    _check_key(key, own, cert)
    _warn_of_time(CERT, cert, own)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:  # what our own checks have not foreseen
        _refuse(CERT, cert, f"cannot be used with {variable(KEY)} {key}: {error}")
    if settings.tls_client_ca is not None:
        _require_clients(context, settings.tls_client_ca)
    return context


def _require_clients(context: ssl.SSLContext, path: Path) -> None:
    for each in _certificates(CLIENT_CA, path):
        if not _is_ca(each):
            name = each.subject.rfc4514_string()
            _refuse(
                CLIENT_CA,
                path,
                f"has a certificate that is not a CA's ({name}): name the file of the CA that "
                "signs the certificates of clients",
            )
        _warn_of_time(CLIENT_CA, path, each)
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        _refuse(CLIENT_CA, path, f"cannot be used: {error}")
    context.verify_mode = ssl.CERT_REQUIRED


def _certificates(name: str, path: Path) -> list[x509.Certificate]:
    found = files.read_with_mode(path, FILE_BYTES_MAX)
    if found is None:
        _refuse(name, path, "does not exist")
    try:
        return x509.load_pem_x509_certificates(found[0])
    except ValueError:
        _refuse(name, path, "has no certificate: it must be in PEM, -----BEGIN CERTIFICATE-----")


def _check_key(path: Path, own: x509.Certificate, cert: Path) -> None:
    found = files.read_with_mode(path, FILE_BYTES_MAX)
    if found is None:
        _refuse(KEY, path, "does not exist")
    data, mode = found
    if mode & OTHERS:
        _refuse(KEY, path, f"may be read by others (mode {mode:04o}); run: chmod 600 {path}")
    try:
        public = load_pem_private_key(data, None).public_key()
    except TypeError:
        _refuse(KEY, path, f"has a password; write one without: openssl pkey -in {path} -out …")
    except (ValueError, UnsupportedAlgorithm):
        _refuse(KEY, path, "has no private key: it must be in PEM, -----BEGIN PRIVATE KEY-----")
    if _encoded(public) != _encoded(own.public_key()):
        _refuse(
            KEY,
            path,
            f"does not match the first certificate in {variable(CERT)} {cert}, which must be the "
            "server's own, before those of its CAs",
        )


def _encoded(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _is_ca(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _warn_of_time(name: str, path: Path, certificate: x509.Certificate) -> None:
    now = datetime.now(UTC)
    fields = {"setting": variable(name), "file": str(path)}
    if certificate.not_valid_after_utc < now:
        until = certificate.not_valid_after_utc.isoformat()
        log.warning(
            "certificate has expired: clients will refuse it", extra={**fields, "at": until}
        )
    elif certificate.not_valid_before_utc > now:
        since = certificate.not_valid_before_utc.isoformat()
        log.warning("certificate is not valid yet", extra={**fields, "from": since})


def _refuse(name: str, path: Path, problem: str) -> NoReturn:
    raise InvalidRequest(f"{variable(name)} {path} {problem}", field=name)
