"""Programs and code inside a sandbox: ping, exec, eval."""

from __future__ import annotations

from fastapi import WebSocket

from forkd.daemon import convert
from forkd.daemon.exec import attach, run
from forkd.daemon.routes import CallerOf, GuestsOf, IdOf, router
from forkd.wire import v1

routes = router("processes")


@routes.post("/v1/sandboxes/{id}/ping", operation_id="ping")
async def ping(sandbox: IdOf, caller: CallerOf, guests: GuestsOf) -> v1.Pong:
    """Ask the agent in the guest how it is."""
    return convert.pong(await guests.ping(caller, sandbox))


@routes.post("/v1/sandboxes/{id}/exec", operation_id="exec")
async def exec_(sandbox: IdOf, body: v1.Exec, caller: CallerOf, guests: GuestsOf) -> v1.ExecResult:
    """Run a program, wait for it, and return what it wrote."""
    return await run(guests, caller, sandbox, body)


@routes.post("/v1/sandboxes/{id}/eval", operation_id="eval")
async def eval_(sandbox: IdOf, body: v1.Eval, caller: CallerOf, guests: GuestsOf) -> v1.EvalResult:
    """Run code in the warm runtime; its exceptions are part of the answer."""
    result = await guests.eval(caller, sandbox, body.code, timeout_s=body.timeout_secs)
    return convert.eval_result(result)


@routes.websocket("/v1/sandboxes/{id}/exec/stream")
async def exec_stream(websocket: WebSocket, id: str, caller: CallerOf, guests: GuestsOf) -> None:  # noqa: A002 - the path's own word
    """Run a program with its streams attached; protocol/rest/README.md describes the messages."""
    await attach(websocket, guests, caller, id)
