"""Running sandboxes as a whole: branch, reset, promote, compare, and who is whose child."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Response

from forkd.daemon import convert
from forkd.daemon.bodies import takes_body
from forkd.daemon.pages import PAGED, page_of
from forkd.daemon.routes import (
    BranchesOf,
    CallerOf,
    ComparisonsOf,
    IdOf,
    PromotionsOf,
    SandboxesOf,
    TreesOf,
    router,
    sandbox_of,
)
from forkd.daemon.routes.sandboxes import none_ready
from forkd.errors import InvalidRequest
from forkd.model.caller import Scope
from forkd.model.ids import parse_tag
from forkd.wire import v2_trees

routes = router("trees")


@routes.post(
    "/v2/sandboxes/{id}/branch",
    operation_id="branch",
    status_code=201,
    responses={207: {"model": v2_trees.BranchInfo, "description": "Some siblings failed"}},
)
@takes_body(Scope.RUN, creates=True)
async def branch(
    sandbox: IdOf,
    body: v2_trees.BranchCreate,
    caller: CallerOf,
    branches: BranchesOf,
    sandboxes: SandboxesOf,
    response: Response,
) -> v2_trees.BranchInfo:
    """Branch a running sandbox: `n` siblings, a snapshot `tag`, or both, of one instant."""
    tag = None if body.tag is None else parse_tag(body.tag)
    count = body.n if body.n is not None else int(tag is None)
    if count == 0 and tag is None:
        raise InvalidRequest("n is 0 and there is no tag: nothing to do", field="n")
    found = await sandboxes.get(caller, sandbox)
    options = convert.branch_options(body)
    result = await branches.branch(caller, sandbox, count, options, tag=tag, wait=body.wait)
    if result.fork.failures and not result.fork.sandboxes and tag is None:
        raise none_ready(result.fork)
    response.headers["Server-Timing"] = (
        f"pause;dur={result.pause_ms:.3f}, fork;dur={result.fork.wall_ms:.3f}"
    )
    response.status_code = 207 if result.fork.failures else 201
    return convert.branch(found.tag, result)


@routes.post("/v2/sandboxes/{id}/reset", operation_id="reset")
@takes_body(Scope.RUN)
async def reset(
    sandbox: IdOf, caller: CallerOf, sandboxes: SandboxesOf, body: v2_trees.Reset | None = None
) -> v2_trees.ResetInfo:
    """Take a sandbox back to its fork point; it keeps its id and its address."""
    terms = body or v2_trees.Reset()
    reset_ms = await sandboxes.reset(caller, sandbox, deadline_s=terms.deadline_secs)
    return v2_trees.ResetInfo(reset_ms=reset_ms)


@routes.post("/v2/sandboxes/{id}/promote", operation_id="promote")
async def promote(
    sandbox: IdOf, caller: CallerOf, promotions: PromotionsOf
) -> v2_trees.PromotionInfo:
    """Let a sandbox take its parent's id, name, address and place; parent and siblings end."""
    return convert.promotion(await promotions.promote(caller, sandbox))


@routes.get("/v2/tree", operation_id="tree", responses=PAGED)
async def tree(
    query: Annotated[v2_trees.TreeFilter, Query()],
    caller: CallerOf,
    trees: TreesOf,
    sandboxes: SandboxesOf,
    response: Response,
) -> v2_trees.TreeInfo:
    """Say who was branched from whom, and what each holds; pages are of whole trees, by id."""
    member = None
    if query.sandbox_id is not None:
        member = await sandbox_of(caller, sandboxes, query.sandbox_id, field="sandbox_id")
    roots = page_of(await trees.draw(caller, member), lambda root: (root.id,), query, response)
    return convert.tree(await trees.budgets(caller), roots)


@routes.post("/v2/diff", operation_id="diff")
@takes_body(Scope.RUN)
async def diff(
    body: v2_trees.DiffCreate, caller: CallerOf, comparisons: ComparisonsOf
) -> v2_trees.DiffInfo:
    """Say which files of two sandboxes or snapshots differ, and how far their memory does."""
    before, after = convert.machine_name(body.a, "a"), convert.machine_name(body.b, "b")
    return convert.difference(await comparisons.compare(caller, before, after))
