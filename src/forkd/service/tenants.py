"""Tenants, their quotas, and what they have of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import CapacityError, NotFound
from forkd.limits import TENANTS_MAX
from forkd.model.caller import Scope, touch
from forkd.model.tenant import Quotas, TenantUsage, parse_tenant
from forkd.service.use_case import use_case
from forkd.store import rights

if TYPE_CHECKING:
    from forkd.model.caller import Caller, Tenant
    from forkd.model.tenant import QuotasChange
    from forkd.service.ledger import Ledger
    from forkd.service.records import Records
    from forkd.telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Tenants:
    """The tenants of one host; `forkd.service.api.Tenants` documents what a caller may ask."""

    telemetry: Telemetry
    records: Records
    ledger: Ledger

    async def load(self) -> None:
        """Read the quotas that there are."""
        self.ledger.quotas.update(await self.records.ask(rights.quotas))

    @use_case("set_quotas", Scope.ADMIN)
    async def set_quotas(self, caller: Caller, tenant: Tenant, quotas: Quotas) -> TenantUsage:
        """Set all quotas of a tenant."""
        self._check_room(tenant)
        await self.records.ask(lambda db: rights.put_quotas(db, tenant, quotas))
        return self._known(tenant, quotas)

    @use_case("change_quotas", Scope.ADMIN)
    async def change_quotas(
        self, caller: Caller, tenant: Tenant, change: QuotasChange
    ) -> TenantUsage:
        """Change some quotas of a tenant; the others stay."""
        self._check_room(tenant)
        quotas = await self.records.ask(lambda db: rights.change_quotas(db, tenant, change))
        return self._known(tenant, quotas)

    @use_case("remove_quotas", Scope.ADMIN)
    async def remove_quotas(self, caller: Caller, tenant: Tenant) -> None:
        """Let a tenant have as much as it wants."""
        if tenant not in self.ledger.quotas:
            raise NotFound(f"the tenant {tenant!r} has no quotas", tenant=tenant)
        await self.records.ask(lambda db: rights.remove_quotas(db, tenant))
        self.ledger.quotas.pop(tenant, None)
        touch(f"tenant:{tenant}")

    @use_case("list_tenants", Scope.READ)
    async def list(self, caller: Caller) -> tuple[TenantUsage, ...]:
        """Return every tenant that has something, or quotas; without `admin`, one's own."""
        if not caller.is_admin:
            return (self._usage(caller.tenant),)
        return tuple(map(self._usage, sorted(self.ledger.tenants())))

    def _check_room(self, tenant: Tenant) -> None:
        parse_tenant(tenant)
        known = self.ledger.quotas
        if tenant not in known and len(known) >= TENANTS_MAX:
            raise CapacityError(f"{TENANTS_MAX} tenants have quotas already")

    def _known(self, tenant: Tenant, quotas: Quotas) -> TenantUsage:
        """Apply quotas that are written down."""
        self.ledger.quotas[tenant] = quotas
        touch(f"tenant:{tenant}")
        return self._usage(tenant)

    def _usage(self, tenant: Tenant) -> TenantUsage:
        quotas = self.ledger.quotas.get(tenant, Quotas())
        return TenantUsage(tenant, quotas, self.ledger.used(tenant))
