"""A repository with packs, in a registry."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from forkd.errors import Denied, ForkdError, NotFound, PackError, TransportError
from forkd.registry import client
from forkd.registry.session import Fault, Kind, Trust

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

    from forkd.packs.references import Reference
    from forkd.registry.credentials import Login

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"

_REASONS = {Kind.LOST: "lost", Kind.CHANGED: "digest", Kind.TOO_LONG: "limit"}


class Registry(client.Registry):
    """A repository of a registry.

    Args:
        reference: A pack in it.
        login: Who asks; None for anybody.
        plain_http: Whether the registry is asked without TLS, though it is not on this host.
        transport: What sends requests; None for the network.
        wait: Waits for so many seconds before the registry is asked again.

    Raises:
        NotFound: By any method: the registry has no such repository or tag.
        PackError: A part is lost, was changed, or is too long.
        Denied: The registry wants other credentials.
        TransportError: It does not answer, or not with what was asked for.
    """

    def __init__(
        self,
        reference: Reference,
        login: Login | None,
        *,
        plain_http: bool,
        transport: httpx.BaseTransport | None = None,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(
            reference,
            "pack",
            (MANIFEST_TYPE,),
            login,
            trust=Trust.PLAIN if plain_http or reference.is_loopback else Trust.TLS,
            explain=_explained,
            transport=transport,
            wait=wait,
        )


def _explained(fault: Fault) -> ForkdError:
    if fault.kind is Kind.MISSING:
        return NotFound(fault.text)
    if fault.kind is Kind.REFUSED:
        return Denied(fault.text)
    if (reason := _REASONS.get(fault.kind)) is not None:
        return PackError(fault.text, reason=reason)
    over_tls = fault.kind in {Kind.TLS, Kind.NO_TLS}
    return TransportError(fault.text + ("; --plain-http asks without TLS" if over_tls else ""))


def parsed(raw: bytes, what: str) -> dict[str, Any]:
    """Return a manifest.

    Raises:
        PackError: It is no JSON object.
    """
    try:
        said = json.loads(raw)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise PackError(f"the manifest of {what} is damaged", reason="damaged")
    return said
