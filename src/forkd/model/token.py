"""A bearer token: who has it, what it may do, and until when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest
from forkd.model.tenant import parse_name, parse_tenant

if TYPE_CHECKING:
    from datetime import datetime

    from forkd.model.caller import Scope, Tenant


@dataclass(frozen=True, slots=True)
class Token:
    """A token, without its secret, of which only a digest is kept.

    Attributes:
        name: What it is called, unique on this host; the principal of whoever has it.
        tenant: On whose behalf it acts.
        scopes: What it may do.
        created_at: When it was made.
        expires_at: From when on it is refused; None for never.
    """

    name: str
    tenant: Tenant
    scopes: frozenset[Scope]
    created_at: datetime
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that was just made, with its secret, which is told once."""

    token: Token
    secret: str


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A token to be made; members as of `Token`.

    Raises:
        InvalidRequest: The name or the tenant is none, or there are no scopes.
    """

    name: str
    tenant: Tenant
    scopes: frozenset[Scope]
    expires_at: datetime | None = None

    def __post_init__(self) -> None:
        parse_name(self.name, field="name")
        parse_tenant(self.tenant)
        if not self.scopes:
            raise InvalidRequest("a token needs at least one scope", field="scopes")
        if self.expires_at is not None and self.expires_at.tzinfo is None:
            raise InvalidRequest("expires_at needs a time zone, such as Z", field="expires_at")
