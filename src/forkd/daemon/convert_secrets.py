"""Between what clients see of secrets, and what we think in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.model.secret import SecretRequest, SecretValue, parse_hosts
from forkd.model.tenant import parse_tenant
from forkd.wire import v2_secrets

if TYPE_CHECKING:
    from forkd.model.caller import Tenant
    from forkd.model.secret import Secret


def secret_request(name: str, request: v2_secrets.SecretSet) -> SecretRequest:
    """Return what secret to set."""
    value = SecretValue(request.value)
    return SecretRequest(name, value, parse_hosts(request.hosts), request.header, request.env)


def tenant(of: v2_secrets.SecretOf) -> Tenant | None:
    """Return whose secret is meant; None for the caller's own."""
    return None if of.tenant is None else parse_tenant(of.tenant)


def secret(of: Secret) -> v2_secrets.SecretInfo:
    """Return a secret as clients see it."""
    return v2_secrets.SecretInfo(
        name=of.name,
        tenant=of.tenant,
        hosts=[str(each) for each in of.hosts],
        header=of.header,
        env=of.env,
        placeholder=of.placeholder,
        created_at_unix=int(of.created_at.timestamp()),
    )
