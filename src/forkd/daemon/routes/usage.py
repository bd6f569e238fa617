"""What sandboxes use of the host."""

from __future__ import annotations

from fastapi import Response

from forkd.daemon import convert_events as convert
from forkd.daemon.pages import PAGED, by_age, page_of
from forkd.daemon.routes import CallerOf, IdOf, PageOf, UsageOf, router
from forkd.wire import v2_events

routes = router("usage")


@routes.get("/v2/usage", operation_id="list_usage", responses=PAGED)
async def list_usage(
    query: PageOf, caller: CallerOf, usage: UsageOf, response: Response
) -> list[v2_events.UsageInfo]:
    """List what running sandboxes use, the oldest first; measured at most a second ago."""
    found = await usage.list(caller)
    page = page_of(found, lambda each: by_age(each.sandbox), query, response)
    return [convert.usage(each) for each in page]


@routes.get("/v2/sandboxes/{id}/usage", operation_id="get_usage")
async def get_usage(sandbox: IdOf, caller: CallerOf, usage: UsageOf) -> v2_events.UsageInfo:
    """Say what a running sandbox uses now."""
    return convert.usage(await usage.get(caller, sandbox))
