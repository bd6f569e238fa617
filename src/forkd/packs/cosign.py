"""Signatures of artifacts as cosign makes them with a key: what is signed, and how it is stored.

An artifact's signatures are an artifact of their own in the same repository, whose tag is made of
the digest of what is signed.  Keys are ECDSA P-256, in PEM.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from forkd.errors import InvalidRequest
from forkd.packs.limits import PEM_BYTES_MAX

if TYPE_CHECKING:
    from pathlib import Path

PAYLOAD_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
ANNOTATION = "dev.cosignproject.cosign/signature"

_KIND = "cosign container image signature"
_ALGORITHM = ec.ECDSA(hashes.SHA256())


def tag_of(digest: str) -> str:
    """Return the tag of the signatures of an artifact."""
    return f"{digest.replace(':', '-')}.sig"


def payload_of(name: str, digest: str) -> bytes:
    """Return what is signed of the artifact `digest` in the repository `name`."""
    said = {
        "critical": {
            "identity": {"docker-reference": name},
            "image": {"docker-manifest-digest": digest},
            "type": _KIND,
        },
        "optional": None,
    }
    return json.dumps(said, separators=(",", ":")).encode()


def is_about(payload: bytes, digest: str) -> bool:
    """Whether a payload is about the artifact `digest`."""
    try:
        critical = json.loads(payload)["critical"]
        found = critical["image"]["docker-manifest-digest"], critical["type"]
    except (ValueError, KeyError, TypeError):
        return False
    return bool(found == (digest, _KIND))


def sign(key: ec.EllipticCurvePrivateKey, payload: bytes) -> str:
    """Return the signature of a payload, as the annotation has it."""
    return base64.b64encode(key.sign(payload, _ALGORITHM)).decode()


def verifies(key: ec.EllipticCurvePublicKey, signature: object, payload: bytes) -> bool:
    """Whether an annotation is a signature of `payload` by `key`."""
    try:
        key.verify(base64.b64decode(str(signature), validate=True), payload, _ALGORITHM)
    except (InvalidSignature, binascii.Error):
        return False
    return True


def read_secret(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the secret key in a file.

    Raises:
        InvalidRequest: There is none that we can use.
    """
    raw = _raw(path)
    if b"ENCRYPTED" in raw:
        raise InvalidRequest(
            f"{path} is encrypted; give the key that `cosign import-key-pair` took, unencrypted",
            field="cosign_key",
        )
    try:
        key = serialization.load_pem_private_key(raw, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidRequest(f"{path} is no ECDSA P-256 secret key in PEM", field="cosign_key")
    return key


def read_public(path: Path) -> ec.EllipticCurvePublicKey:
    """Return the public key in a file.

    Raises:
        InvalidRequest: There is none that we can use.
    """
    try:
        key = serialization.load_pem_public_key(_raw(path))
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidRequest(f"{path} is no ECDSA P-256 public key in PEM", field="cosign_key")
    return key


def _raw(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(PEM_BYTES_MAX)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field="cosign_key") from error
