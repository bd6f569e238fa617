"""Secrets that the egress proxy puts into requests of sandboxes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Response

from forkd.daemon import convert_secrets as convert
from forkd.daemon.bodies import takes_body
from forkd.daemon.pages import PAGED, by_owner, page_of
from forkd.daemon.routes import CallerOf, PageOf, SecretsOf, router
from forkd.model.caller import Scope
from forkd.model.tenant import parse_name
from forkd.wire import v2_secrets

routes = router("secrets")

NameOf = Annotated[str, Path(description="Name of a secret.")]


@routes.put("/v2/secrets/{name}", operation_id="set_secret")
@takes_body(Scope.RUN)
async def set_secret(
    name: NameOf,
    body: v2_secrets.SecretSet,
    whose: Annotated[v2_secrets.SecretOf, Query()],
    caller: CallerOf,
    secrets: SecretsOf,
) -> v2_secrets.SecretInfo:
    """Set a secret, in the place of one of its name; its value is in no answer."""
    request = convert.secret_request(parse_name(name, field="name"), body)
    return convert.secret(await secrets.put(caller, request, convert.tenant(whose)))


@routes.get("/v2/secrets", operation_id="list_secrets", responses=PAGED)
async def list_secrets(
    query: PageOf, caller: CallerOf, secrets: SecretsOf, response: Response
) -> list[v2_secrets.SecretInfo]:
    """List secrets without their values; without `admin`, those of the caller's tenant."""
    found = await secrets.list(caller)
    return [convert.secret(each) for each in page_of(found, by_owner, query, response)]


@routes.delete("/v2/secrets/{name}", operation_id="delete_secret", status_code=204)
async def delete_secret(
    name: NameOf,
    whose: Annotated[v2_secrets.SecretOf, Query()],
    caller: CallerOf,
    secrets: SecretsOf,
) -> None:
    """Remove a secret; it is put into no request from now on."""
    await secrets.remove(caller, parse_name(name, field="name"), convert.tenant(whose))
