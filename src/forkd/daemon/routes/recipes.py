"""Recipes from elsewhere: the archive of a folder in, a reference to it out."""

from __future__ import annotations

from fastapi import Request, Response

from forkd.daemon import convert, convert_images
from forkd.daemon.bodies import takes_upload
from forkd.daemon.pages import PAGED, page_of
from forkd.daemon.routes import CallerOf, PageOf, RecipesOf, bytes_as, router
from forkd.errors import InvalidRequest
from forkd.model.caller import Scope
from forkd.model.recipe import parse_uploaded
from forkd.wire import v2, v2_images

routes = router("recipes")

TAR = "application/x-tar"
_BODY = bytes_as(TAR)


@routes.post(
    "/v2/recipes",
    operation_id="upload_recipe",
    status_code=201,
    openapi_extra={"requestBody": {**_BODY, "required": True}},
)
@takes_upload(Scope.SNAPSHOTS)
async def upload_recipe(request: Request, caller: CallerOf, recipes: RecipesOf) -> v2.RecipeInfo:
    """Take a recipe's folder as a plain (ustar) archive, for as long as builds use it."""
    kind = request.headers.get("content-type", "nothing")
    if kind != TAR:
        raise InvalidRequest(f"the body must be {TAR}, not {kind[:80]}", field="body")
    return convert.recipe(await recipes.upload(caller, request.stream()))


@routes.get("/v2/recipes", operation_id="list_recipes", responses=PAGED)
async def list_recipes(
    caller: CallerOf, recipes: RecipesOf, page: PageOf, response: Response
) -> list[v2_images.HostRecipe]:
    """List the recipes of the daemon's host, by name."""
    found = page_of(await recipes.list(caller), lambda of: (of.name,), page, response)
    return [convert_images.host_recipe(each) for each in found]


@routes.get("/v2/recipes/{recipe}", operation_id="get_recipe")
async def get_recipe(recipe: str, caller: CallerOf, recipes: RecipesOf) -> v2.RecipeInfo:
    """Describe an uploaded recipe, and keep it for another while."""
    return convert.recipe(await recipes.get(caller, parse_uploaded(recipe)))
