"""Secrets: set, listed and removed; their values go to the egress proxy and nowhere else."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forkd.errors import CapacityError, ForkdError, NotFound
from forkd.limits import SECRETS_PER_TENANT_MAX
from forkd.model.caller import Scope, touch
from forkd.model.secret import Bound, Secret
from forkd.service.use_case import use_case
from forkd.store import secrets as stored

if TYPE_CHECKING:
    from forkd.model.caller import Caller, Tenant
    from forkd.model.secret import SecretRequest
    from forkd.service.records import Records
    from forkd.service.vault import Vault
    from forkd.telemetry.telemetry import Telemetry

log = logging.getLogger(__name__)


class Secrets:
    """The secrets of one host; `forkd.service.api_team.Secrets` says what a caller may ask."""

    def __init__(self, telemetry: Telemetry, records: Records, vault: Vault) -> None:
        self.telemetry = telemetry
        self._records = records
        self._vault = vault
        self._unreadable: set[tuple[Tenant, str]] = set()
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Read the secrets that there are; what cannot be read is logged, and not there."""
        rows = await self._records.ask(stored.secrets)
        if not rows:
            return
        try:
            await asyncio.to_thread(self._vault.unlock, make=False)
        except ForkdError as error:
            log.error("secrets not readable", extra={"error": str(error)})  # noqa: TRY400 - the message is the news
        for secret, sealed in rows:
            try:
                self._vault.put(Bound(secret, self._vault.unseal(secret, sealed)))
            except ForkdError as error:
                self._unreadable.add((secret.tenant, secret.name))
                log.warning("secret not readable", extra={"error": str(error)})

    @use_case("set_secret", Scope.RUN)
    async def put(
        self, caller: Caller, request: SecretRequest, tenant: Tenant | None = None
    ) -> Secret:
        """Set a secret, in the place of one of its name."""
        tenant = _tenant(caller, tenant)
        touch(f"secret:{request.name}")
        secret = Secret(
            request.name, tenant, request.hosts, request.header, request.env, datetime.now(UTC)
        )
        async with self._changing:
            if not self._vault.has(tenant, secret.name):
                had = sum(each.tenant == tenant for each in self._vault.all())
                if had >= SECRETS_PER_TENANT_MAX:
                    raise CapacityError(
                        f"{tenant} has {SECRETS_PER_TENANT_MAX} secrets already", tenant=tenant
                    )
            await asyncio.to_thread(self._vault.unlock, make=True)
            sealed = self._vault.seal(secret, request.value)
            await self._records.ask(lambda db: stored.put_secret(db, secret, sealed))
            self._vault.put(Bound(secret, request.value))
            self._unreadable.discard((tenant, secret.name))
        return secret

    @use_case("list_secrets", Scope.READ)
    async def list(self, caller: Caller) -> tuple[Secret, ...]:
        """Return every secret, by name, without its value; without `admin`, the caller's own."""
        return tuple(
            each for each in self._vault.all() if caller.is_admin or each.tenant == caller.tenant
        )

    @use_case("remove_secret", Scope.RUN)
    async def remove(self, caller: Caller, name: str, tenant: Tenant | None = None) -> None:
        """Remove a secret; it is put into no request from now on."""
        tenant = _tenant(caller, tenant)
        touch(f"secret:{name}")
        async with self._changing:
            if not self._vault.has(tenant, name) and (tenant, name) not in self._unreadable:
                raise NotFound(f"no secret {name!r}", secret=name)
            await self._records.ask(lambda db: stored.remove_secret(db, tenant, name))
            self._vault.drop(tenant, name)
            self._unreadable.discard((tenant, name))


def _tenant(caller: Caller, given: Tenant | None) -> Tenant:
    """Return whose secret is meant.

    Raises:
        Forbidden: Another tenant's, and the caller lacks `admin`.
    """
    if given is None or given == caller.tenant:
        return caller.tenant
    caller.require(Scope.ADMIN)
    return given
