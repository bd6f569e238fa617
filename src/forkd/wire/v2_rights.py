"""Tokens, tenants and their quotas, on the wire.

The rules are those of `wire.v2`.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from forkd import limits
from forkd.wire.parts import Answer, Request

Name = Annotated[
    str,
    Field(
        pattern=limits.NAME_PATTERN,
        description="Lower-case letters, digits, '.', '_' and '-'; a letter or digit first.",
    ),
]
ScopeName = Literal["read", "run", "snapshots", "metrics", "admin"]
Quota = Annotated[int | None, Field(ge=0, le=limits.QUOTA_MAX)]


class TokenCreate(Request):
    """Make a token."""

    name: Name
    scopes: list[ScopeName] = Field(
        min_length=1,
        max_length=len(get_args(ScopeName)),
        description="`read` looks; `run` forks, branches and runs programs; `snapshots` makes and "
        "removes snapshots; `metrics` sees the figures of the whole host; `admin` includes all of "
        "them, for every tenant.",
    )
    tenant: Name = "default"
    expires_in_secs: Annotated[int | None, Field(ge=1, le=limits.TOKEN_LIFE_S_MAX)] = Field(
        default=None, description="When it expires, in seconds from now; null: never."
    )


class TokenInfo(Answer):
    """A token, without its secret."""

    name: str
    tenant: str
    scopes: list[ScopeName]
    created_at_unix: int
    expires_at_unix: int | None


class TokenCreated(TokenInfo):
    """A token that was just made."""

    token: str = Field(description="The secret, for `Authorization: Bearer`; it is not kept.")


class QuotasSet(Request):
    """All quotas of a tenant; null is no limit."""

    sandboxes: Quota = None
    vcpus: Quota = None
    memory_mib: Quota = None
    disk_mib: Quota = None
    snapshot_mib: Quota = None
    forks_per_minute: Quota = None


class QuotasChange(QuotasSet):
    """Some quotas of a tenant: a member that is absent stays, null lifts the limit."""


class Quotas(Answer):
    """What a tenant may have of each; null is no limit."""

    sandboxes: int | None
    vcpus: int | None
    memory_mib: int | None
    disk_mib: int | None
    snapshot_mib: int | None
    forks_per_minute: int | None


class Amounts(Answer):
    """What a tenant has of each."""

    sandboxes: int = Field(description="Sandboxes that have not ended.")
    vcpus: int
    memory_mib: int = Field(description="What they may use: their limit, or their guest's memory.")
    disk_mib: int = Field(description="What they may use: their limit, or the size of their disk.")
    snapshot_mib: int = Field(description="What snapshots take in the store.")
    forks_per_minute: int = Field(description="Forks and siblings within the last minute.")


class TenantInfo(Answer):
    """A tenant."""

    name: str
    quotas: Quotas
    used: Amounts


class SnapshotShare(Request):
    """Whether every tenant may use a snapshot."""

    shared: bool
