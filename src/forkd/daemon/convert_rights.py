"""Between what clients see of tokens and tenants, and what we think in."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from forkd.model.caller import Scope
from forkd.model.tenant import Quotas, QuotasChange, parse_tenant
from forkd.model.token import TokenRequest
from forkd.wire import v2_rights

if TYPE_CHECKING:
    from forkd.model.tenant import TenantUsage
    from forkd.model.token import NewToken, Token


def token_request(request: v2_rights.TokenCreate) -> TokenRequest:
    """Return what token to make."""
    expires_at = None
    if request.expires_in_secs is not None:
        expires_at = datetime.now(UTC) + timedelta(seconds=request.expires_in_secs)
    scopes = frozenset(map(Scope, request.scopes))
    return TokenRequest(request.name, parse_tenant(request.tenant), scopes, expires_at)


def token(of: Token) -> v2_rights.TokenInfo:
    """Return a token without its secret."""
    return v2_rights.TokenInfo.model_validate(_members(of))


def new_token(of: NewToken) -> v2_rights.TokenCreated:
    """Return a token with its secret."""
    return v2_rights.TokenCreated.model_validate({**_members(of.token), "token": of.secret})


def quotas(of: v2_rights.QuotasSet) -> Quotas:
    """Return what a tenant may have."""
    return Quotas(**of.model_dump())


def quotas_change(of: v2_rights.QuotasChange) -> QuotasChange:
    """Return which quotas are to become different."""
    return QuotasChange(of.model_dump(exclude_unset=True))


def tenant(of: TenantUsage) -> v2_rights.TenantInfo:
    """Return a tenant."""
    return v2_rights.TenantInfo(
        name=of.name,
        quotas=v2_rights.Quotas(**asdict(of.quotas)),
        used=v2_rights.Amounts(**asdict(of.used)),
    )


def _members(of: Token) -> dict[str, object]:
    return {
        "name": of.name,
        "tenant": of.tenant,
        "scopes": sorted(of.scopes),
        "created_at_unix": int(of.created_at.timestamp()),
        "expires_at_unix": None if of.expires_at is None else int(of.expires_at.timestamp()),
    }
