"""What a guest is told of the secrets of its sandbox: a CA to trust, and placeholders.

The CA's certificate is put behind those that the guest trusts, and into a file of its own with
them, which the variables of common clients name.  Commands are started with these variables, and
the warm runtime has them in its environment.  No value is ever told.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.engine.guest import PYTHON
from forkd.engine.guest_files import GuestFile, write_file
from forkd.errors import Conflict, EngineError, NotFound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from forkd.engine.guest import Guest
    from forkd.model.secret import SecretUse
    from forkd.service.vault import Vault

BUNDLE = "/etc/forkd/ca-certificates.crt"
"""Where a guest has all that it trusts."""

SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora
    "/etc/ssl/ca-bundle.pem",  # openSUSE
)
"""Where distributions have what programs trust that ask nobody; the first that is there counts."""

BUNDLE_BYTES_MAX = 2 << 20
"""Longest such file; a longer one is none."""

TRUST_VARIABLES = (
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS", "AWS_CA_BUNDLE",
)  # fmt: skip
"""Variables by which OpenSSL, requests, curl, pip, git, Node.js and boto find what to trust."""

EVAL_S = 60.0

_MARK = b"# What follows is the CA of forkd's egress proxy, for this sandbox.\n"


@dataclass(frozen=True, slots=True)
class Introduction:
    """What guests are told.

    Attributes:
        vault: Where secrets and CAs are.
    """

    vault: Vault

    def environment(self, use: SecretUse) -> dict[str, str]:
        """Return what a sandbox's programs have in their environment."""
        return {**dict.fromkeys(TRUST_VARIABLES, BUNDLE), **self.vault.placeholders(use)}

    async def give(self, guest: Guest, use: SecretUse) -> None:
        """Tell a guest, which may have been told before.

        Raises:
            ForkdError: It could not be told.
        """
        certificate = self.vault.authority(use.root).certificate()
        path, before = await _trusted(guest)
        bundle = before.partition(_MARK)[0] + _MARK + certificate
        for each in {path, BUNDLE}:
            await _write_for_root(guest, each, bundle)
        for runtime, code in assignments(self.environment(use)).items():
            try:
                result = await guest.eval(code, EVAL_S, runtime=runtime)
            except Conflict:
                continue  # it has no runtime, or another one
            if result.error is not None:
                said = result.error.message
                raise EngineError(f"the runtime did not take its variables: {said}")
            return


def assignments(variables: Mapping[str, str]) -> dict[str, str]:
    """Return code that sets variables of a warm runtime's environment, by the runtime's name."""
    text = json.dumps(variables)
    return {
        PYTHON: f"__import__('os').environ.update(__import__('json').loads({text!r}))",
        "node": f"Object.assign(process.env, {text}); undefined",
    }


async def _trusted(guest: Guest) -> tuple[str, bytes]:
    """Return where a guest has what it trusts, and that."""
    for path in SYSTEM_BUNDLES:
        try:
            async with await GuestFile.open(guest, path, offset=0, length=None) as file:
                found = b""
                async for piece in file:
                    found += piece
                    if len(found) > BUNDLE_BYTES_MAX:
                        raise EngineError(
                            f"{path} in the guest has more than {BUNDLE_BYTES_MAX} bytes"
                        )
                return path, found
        except NotFound:
            continue
    return SYSTEM_BUNDLES[0], b""


async def _write_for_root(guest: Guest, path: str, data: bytes) -> None:
    """Write a file of root's, whoever the image's user is."""
    try:
        await write_file(guest, path, _whole(data), mode=0o644, make_parents=True, user="root")
    except Conflict as error:
        if error.context.get("guest_code") != "invalid_request":
            raise
        # The agent is older than `user`: all that it makes is root's.
        await write_file(guest, path, _whole(data), mode=0o644, make_parents=True, user=None)


async def _whole(data: bytes) -> AsyncIterator[bytes]:
    yield data
