"""What sandboxes use of the host."""

from __future__ import annotations

from forkd.daemon import convert_events as convert
from forkd.daemon.routes import CallerOf, IdOf, UsageOf, router
from forkd.wire import v2_events

routes = router("usage")


@routes.get("/v2/usage", operation_id="list_usage")
async def list_usage(caller: CallerOf, usage: UsageOf) -> list[v2_events.UsageInfo]:
    """List what running sandboxes use, the oldest first; measured at most a second ago."""
    return [convert.usage(each) for each in await usage.list(caller)]


@routes.get("/v2/sandboxes/{id}/usage", operation_id="get_usage")
async def get_usage(sandbox: IdOf, caller: CallerOf, usage: UsageOf) -> v2_events.UsageInfo:
    """Say what a running sandbox uses now."""
    return convert.usage(await usage.get(caller, sandbox))
