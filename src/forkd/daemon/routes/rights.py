"""Tokens, and tenants with their quotas."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Response

from forkd.daemon import convert_rights as convert
from forkd.daemon.bodies import takes_body
from forkd.daemon.pages import PAGED, by_name, page_of
from forkd.daemon.routes import CallerOf, PageOf, TenantsOf, TokensOf, router
from forkd.model.caller import Scope
from forkd.model.tenant import parse_name, parse_tenant
from forkd.wire import v2_rights

routes = router("rights")

NameOf = Annotated[str, Path(description="Name of a token or a tenant.")]


@routes.post("/v2/tokens", operation_id="create_token", status_code=201)
@takes_body(Scope.ADMIN, creates=True)
async def create_token(
    body: v2_rights.TokenCreate, caller: CallerOf, tokens: TokensOf
) -> v2_rights.TokenCreated:
    """Make a token; its secret is in this answer only."""
    return convert.new_token(await tokens.create(caller, convert.token_request(body)))


@routes.get("/v2/tokens", operation_id="list_tokens", responses=PAGED)
async def list_tokens(
    query: PageOf, caller: CallerOf, tokens: TokensOf, response: Response
) -> list[v2_rights.TokenInfo]:
    """List tokens, by name."""
    found = await tokens.list(caller)
    return [convert.token(each) for each in page_of(found, by_name, query, response)]


@routes.delete("/v2/tokens/{name}", operation_id="delete_token", status_code=204)
async def delete_token(name: NameOf, caller: CallerOf, tokens: TokensOf) -> None:
    """Remove a token; it is refused from now on, and its requests under way are ended."""
    await tokens.remove(caller, parse_name(name, field="name"))


@routes.get("/v2/tenants", operation_id="list_tenants", responses=PAGED)
async def list_tenants(
    query: PageOf, caller: CallerOf, tenants: TenantsOf, response: Response
) -> list[v2_rights.TenantInfo]:
    """List tenants with quotas and what they use; without `admin`, the caller's own."""
    found = await tenants.list(caller)
    return [convert.tenant(each) for each in page_of(found, by_name, query, response)]


@routes.put("/v2/tenants/{name}/quotas", operation_id="set_quotas")
@takes_body(Scope.ADMIN)
async def set_quotas(
    name: NameOf, body: v2_rights.QuotasSet, caller: CallerOf, tenants: TenantsOf
) -> v2_rights.TenantInfo:
    """Set all quotas of a tenant; what it has already stays."""
    quotas = convert.quotas(body)
    return convert.tenant(await tenants.set_quotas(caller, parse_tenant(name), quotas))


@routes.patch("/v2/tenants/{name}/quotas", operation_id="change_quotas")
@takes_body(Scope.ADMIN)
async def change_quotas(
    name: NameOf, body: v2_rights.QuotasChange, caller: CallerOf, tenants: TenantsOf
) -> v2_rights.TenantInfo:
    """Change some quotas of a tenant; those that the body does not name stay."""
    change = convert.quotas_change(body)
    return convert.tenant(await tenants.change_quotas(caller, parse_tenant(name), change))


@routes.delete("/v2/tenants/{name}/quotas", operation_id="remove_quotas", status_code=204)
async def remove_quotas(name: NameOf, caller: CallerOf, tenants: TenantsOf) -> None:
    """Remove all quotas of a tenant."""
    await tenants.remove_quotas(caller, parse_tenant(name))
