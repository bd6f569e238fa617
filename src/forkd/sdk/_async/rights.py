"""A daemon's tokens and tenants, for its admin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter

from forkd.sdk._requests import build, explicit, patch
from forkd.wire.v2_rights import (
    QuotasChange,
    QuotasSet,
    TenantInfo,
    TokenCreate,
    TokenCreated,
    TokenInfo,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forkd.sdk._async.http import AsyncHttp

UNLIMITED = "unlimited"
"""A quota without a limit."""

_TOKENS = TypeAdapter(list[TokenInfo])
_TENANTS = TypeAdapter(list[TenantInfo])


class AsyncTokens:
    """The daemon's tokens; all of it takes the scope `admin`."""

    def __init__(self, http: AsyncHttp) -> None:
        self._http = http

    async def create(
        self,
        name: str,
        scopes: Iterable[str],
        *,
        tenant: str = "default",
        expires_in_s: int | None = None,
    ) -> TokenCreated:
        """Make a token; its secret is in the answer, and nobody can look it up later.

        Args:
            name: What it is called.
            scopes: What it may do: "read", "run", "snapshots", "metrics", "admin".
            tenant: Whose it is.
            expires_in_s: How long it is valid, in seconds; None: until it is removed.

        Raises:
            Conflict: There is one of that name.
        """
        request = build(
            TokenCreate,
            name=name,
            scopes=list(scopes),
            tenant=tenant,
            expires_in_secs=expires_in_s,
        )
        return await self._http.call(TokenCreated, "POST", "/v2/tokens", body=request, creates=True)

    async def list(self) -> list[TokenInfo]:
        """Return every token, by name, without its secret."""
        return await self._http.call(_TOKENS, "GET", "/v2/tokens")

    async def delete(self, name: str) -> None:
        """Remove a token; it is refused from now on, and what it asked for is ended.

        Raises:
            NotFound: There is none of that name.
        """
        await self._http.send("DELETE", f"/v2/tokens/{self._http.quoted(name)}")


class AsyncTenants:
    """Who shares the daemon, and what each may have."""

    def __init__(self, http: AsyncHttp) -> None:
        self._http = http

    async def list(self) -> list[TenantInfo]:
        """Return tenants, their quotas and what they have; without `admin`, the caller's own."""
        return await self._http.call(_TENANTS, "GET", "/v2/tenants")

    @explicit
    async def set_quotas(  # noqa: PLR0913 - one for each quota
        self,
        name: str,
        *,
        sandboxes: int | None = None,
        vcpus: int | None = None,
        memory_mib: int | None = None,
        disk_mib: int | None = None,
        snapshot_mib: int | None = None,
        forks_per_minute: int | None = None,
    ) -> TenantInfo:
        """Set all quotas of a tenant; those that are None have no limit.

        Args:
            name: The tenant.
            sandboxes: How many sandboxes it may have.
            vcpus: How many virtual CPUs they may have together.
            memory_mib: How much memory they may have together, in MiB.
            disk_mib: How much private disk they may have together, in MiB.
            snapshot_mib: How much its snapshots may take, in MiB.
            forks_per_minute: How many forks and branches it may make in a minute.
        """
        request = build(
            QuotasSet,
            sandboxes=sandboxes,
            vcpus=vcpus,
            memory_mib=memory_mib,
            disk_mib=disk_mib,
            snapshot_mib=snapshot_mib,
            forks_per_minute=forks_per_minute,
        )
        return await self._http.call(
            TenantInfo, "PUT", _quotas_path(self._http, name), body=request
        )

    @explicit
    async def change_quotas(  # noqa: PLR0913 - one for each quota
        self,
        name: str,
        *,
        sandboxes: int | Literal["unlimited"] | None = None,
        vcpus: int | Literal["unlimited"] | None = None,
        memory_mib: int | Literal["unlimited"] | None = None,
        disk_mib: int | Literal["unlimited"] | None = None,
        snapshot_mib: int | Literal["unlimited"] | None = None,
        forks_per_minute: int | Literal["unlimited"] | None = None,
    ) -> TenantInfo:
        """Change quotas of a tenant; those that are None stay, and "unlimited" lifts the limit.

        Args:
            name: The tenant.
            sandboxes: How many sandboxes it may have.
            vcpus: How many virtual CPUs they may have together.
            memory_mib: How much memory they may have together, in MiB.
            disk_mib: How much private disk they may have together, in MiB.
            snapshot_mib: How much its snapshots may take, in MiB.
            forks_per_minute: How many forks and branches it may make in a minute.

        Raises:
            InvalidRequest: All are None, or one is out of range.
        """
        limits = {
            "sandboxes": sandboxes,
            "vcpus": vcpus,
            "memory_mib": memory_mib,
            "disk_mib": disk_mib,
            "snapshot_mib": snapshot_mib,
            "forks_per_minute": forks_per_minute,
        }
        given = {name: value for name, value in limits.items() if value is not None}
        lifted = {name: None if value == UNLIMITED else value for name, value in given.items()}
        request = patch(QuotasChange, **lifted)
        return await self._http.call(
            TenantInfo, "PATCH", _quotas_path(self._http, name), body=request
        )

    async def remove_quotas(self, name: str) -> None:
        """Let a tenant have as much as the host has.

        Raises:
            NotFound: It has no quotas.
        """
        await self._http.send("DELETE", _quotas_path(self._http, name))


def _quotas_path(http: AsyncHttp, name: str) -> str:
    return f"/v2/tenants/{http.quoted(name)}/quotas"
