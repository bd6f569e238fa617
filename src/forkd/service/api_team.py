"""What a team asks of a host beside machines: rights, events and figures.

The rules are those of `forkd.service.api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from forkd.model.caller import Caller, Tenant
    from forkd.model.event import EventBatch
    from forkd.model.host import HostInfo
    from forkd.model.ids import SandboxId
    from forkd.model.network import NetworkChange, NetworkStatus
    from forkd.model.secret import Secret, SecretRequest
    from forkd.model.tenant import Quotas, QuotasChange, TenantUsage
    from forkd.model.token import NewToken, Token, TokenRequest
    from forkd.model.usage import Usage


class Tokens(Protocol):
    """Bearer tokens, for callers over the network."""

    async def create(self, caller: Caller, request: TokenRequest) -> NewToken:
        """Make a token; its secret is in the answer and nowhere else.  Scope `admin`.

        Raises:
            Conflict: There is one of that name.
            CapacityError: There are `TOKENS_MAX`.
            StoreError: It could not be written down.
        """
        ...

    async def list(self, caller: Caller) -> tuple[Token, ...]:
        """Return every token, by name, without its secret.  Scope `admin`."""
        ...

    async def remove(self, caller: Caller, name: str) -> None:
        """Remove a token.  Scope `admin`.

        It is refused from now on, and requests under way for it are ended.

        Raises:
            StoreError: That could not be written down; the token holds on.
        """
        ...


class Tenants(Protocol):
    """Who shares this host, what each may have, and what it has."""

    async def set_quotas(self, caller: Caller, tenant: Tenant, quotas: Quotas) -> TenantUsage:
        """Set all quotas of a tenant; what it has already stays.  Scope `admin`.

        Raises:
            CapacityError: There are `TENANTS_MAX` tenants with quotas.
            StoreError: They could not be written down.
        """
        ...

    async def change_quotas(
        self, caller: Caller, tenant: Tenant, change: QuotasChange
    ) -> TenantUsage:
        """Change some quotas of a tenant; the others stay.  Scope `admin`.

        Raises:
            CapacityError: There are `TENANTS_MAX` tenants with quotas.
            StoreError: They could not be written down.
        """
        ...

    async def remove_quotas(self, caller: Caller, tenant: Tenant) -> None:
        """Let a tenant have as much as the host has.  Scope `admin`.

        Raises:
            StoreError: That could not be written down.
        """
        ...

    async def list(self, caller: Caller) -> tuple[TenantUsage, ...]:
        """Return every tenant that has quotas or anything else.  Scope `read`.

        Without `admin` it is only the caller's own.
        """
        ...


class Journal(Protocol):
    """What happens to sandboxes and snapshots."""

    def follow(
        self, caller: Caller, after: int | None = None, *, follow: bool = True
    ) -> AsyncGenerator[EventBatch, None]:
        """Yield the events that a caller may see, as they come.  Scope `read`.

        The first batch comes at once, and one without events when none came for a while.  What is
        not there any more is told as an event of the kind `gap`, before what follows it.  It ends
        when the host does.

        Args:
            caller: Who asks.
            after: The last id that the caller has seen; None for what comes from now on.
            follow: Go on with what comes; or end after what there is.

        Raises:
            CapacityError: There are too many followers.
            StoreError: The history cannot be read.
        """
        ...


class Figures(Protocol):
    """What a host does and how full it is, in figures."""

    async def exposition(self, caller: Caller, accept: str) -> tuple[bytes, str]:
        """Return all figures as text for Prometheus, and which media type it is.

        What needs a look at every process may be some seconds old.

        Args:
            caller: Who asks; figures are of the whole host, whatever its tenant.
            accept: Which media types it takes, as in an `Accept` header.

        Raises:
            Forbidden: The caller lacks the scope `read`.
            HostError: The kernel does not say how full it is.
        """
        ...


class Usages(Protocol):
    """What sandboxes use of the host.  Scope `read`."""

    async def list(self, caller: Caller) -> tuple[Usage, ...]:
        """Return what every running sandbox uses; measured at most a second ago."""
        ...

    async def get(self, caller: Caller, sandbox: SandboxId) -> Usage:
        """Return what one running sandbox uses now.

        Raises:
            Conflict: It does not run.
        """
        ...


class Networks(Protocol):
    """What sandboxes may reach.  Scope `read` to look, `run` to change it."""

    async def get(self, caller: Caller, sandbox: SandboxId) -> NetworkStatus:
        """Return what a sandbox may reach, and what it was refused.

        Raises:
            Conflict: It has no network.
        """
        ...

    async def change(
        self, caller: Caller, sandbox: SandboxId, change: NetworkChange
    ) -> NetworkStatus:
        """Change what a sandbox may reach, at once; connections that it may not have any more end.

        Raises:
            Conflict: It has no network, or does not run.
            InvalidRequest: The rules are too many, or overlap in too many ways.
        """
        ...


class Secrets(Protocol):
    """What the egress proxy puts into requests of sandboxes.  Scope `read` to list, else `run`.

    A secret is its tenant's; `tenant` names another than the caller's, which takes `admin`.
    """

    async def put(
        self, caller: Caller, request: SecretRequest, tenant: Tenant | None = None
    ) -> Secret:
        """Set a secret, in the place of one of its name; its value is never told again.

        Raises:
            CapacityError: There are `SECRETS_PER_TENANT_MAX` of that tenant.
            StoreError: It could not be written down.
        """
        ...

    async def list(self, caller: Caller) -> tuple[Secret, ...]:
        """Return every secret, without its value; without `admin`, those of the caller's tenant."""
        ...

    async def remove(self, caller: Caller, name: str, tenant: Tenant | None = None) -> None:
        """Remove a secret; it is put into no request from now on.

        Raises:
            StoreError: That could not be written down.
        """
        ...


class System(Protocol):
    """The host itself.  Scope `read`."""

    async def info(self, caller: Caller) -> HostInfo:
        """Return what this host is and how full it is."""
        ...
