"""Tokens, and tenants with their quotas."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from forkd.daemon import convert_rights as convert
from forkd.daemon.bodies import takes_body
from forkd.daemon.routes import CallerOf, TenantsOf, TokensOf, router
from forkd.model.caller import Scope
from forkd.model.tenant import parse_name, parse_tenant
from forkd.wire import v2_rights

routes = router("rights")

NameOf = Annotated[str, Path(description="Name of a token or a tenant.")]


@routes.post("/v2/tokens", operation_id="create_token", status_code=201)
@takes_body(Scope.ADMIN)
async def create_token(
    body: v2_rights.TokenCreate, caller: CallerOf, tokens: TokensOf
) -> v2_rights.TokenCreated:
    """Make a token; its secret is in this answer only."""
    return convert.new_token(await tokens.create(caller, convert.token_request(body)))


@routes.get("/v2/tokens", operation_id="list_tokens")
async def list_tokens(caller: CallerOf, tokens: TokensOf) -> list[v2_rights.TokenInfo]:
    """List tokens, by name."""
    return [convert.token(each) for each in await tokens.list(caller)]


@routes.delete("/v2/tokens/{name}", operation_id="delete_token", status_code=204)
async def delete_token(name: NameOf, caller: CallerOf, tokens: TokensOf) -> None:
    """Remove a token; it is refused from now on, and its requests under way are ended."""
    await tokens.remove(caller, parse_name(name, field="name"))


@routes.get("/v2/tenants", operation_id="list_tenants")
async def list_tenants(caller: CallerOf, tenants: TenantsOf) -> list[v2_rights.TenantInfo]:
    """List tenants with quotas and what they use; without `admin`, the caller's own."""
    return [convert.tenant(each) for each in await tenants.list(caller)]


@routes.put("/v2/tenants/{name}/quotas", operation_id="set_quotas")
@takes_body(Scope.ADMIN)
async def set_quotas(
    name: NameOf, body: v2_rights.QuotasSet, caller: CallerOf, tenants: TenantsOf
) -> v2_rights.TenantInfo:
    """Set all quotas of a tenant; what it has already stays."""
    quotas = convert.quotas(body)
    return convert.tenant(await tenants.set_quotas(caller, parse_tenant(name), quotas))


@routes.delete("/v2/tenants/{name}/quotas", operation_id="remove_quotas", status_code=204)
async def remove_quotas(name: NameOf, caller: CallerOf, tenants: TenantsOf) -> None:
    """Remove all quotas of a tenant."""
    await tenants.remove_quotas(caller, parse_tenant(name))
