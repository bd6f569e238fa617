"""Programs and code inside a sandbox: ping, exec, eval."""

from __future__ import annotations

from functools import partial

from fastapi import Response, WebSocket

from forkd.daemon import convert
from forkd.daemon.bodies import takes_body
from forkd.daemon.exec import attach, attach_eval, evaluate, run
from forkd.daemon.ports import connect
from forkd.daemon.routes import CallerOf, GuestsOf, IdOf, KeepOf, SandboxesOf, router, sandbox_of
from forkd.model.caller import Scope
from forkd.wire import v2

routes = router("processes")


@routes.post("/v2/sandboxes/{id}/ping", operation_id="ping")
async def ping(sandbox: IdOf, caller: CallerOf, guests: GuestsOf) -> v2.Pong:
    """Ask the agent in the guest how it is."""
    return convert.pong(await guests.ping(caller, sandbox))


@routes.post("/v2/sandboxes/{id}/exec", operation_id="exec", response_model=v2.ExecResult)
@takes_body(Scope.RUN)
async def exec_(
    sandbox: IdOf, body: v2.Exec, caller: CallerOf, guests: GuestsOf, keep: KeepOf
) -> Response:
    """Run a program, wait for it, and return what it wrote."""
    return await run(guests, caller, sandbox, body, keep)


@routes.post("/v2/sandboxes/{id}/eval", operation_id="eval", response_model=v2.EvalResult)
@takes_body(Scope.RUN)
async def eval_(
    sandbox: IdOf, body: v2.Eval, caller: CallerOf, guests: GuestsOf, keep: KeepOf
) -> Response:
    """Run code in the warm runtime; its exceptions are part of the answer."""
    return await evaluate(guests, caller, sandbox, body, keep)


@routes.websocket("/v2/sandboxes/{id}/exec/stream")
async def exec_stream(
    websocket: WebSocket,
    id: str,  # noqa: A002 - the path's own word
    caller: CallerOf,
    guests: GuestsOf,
    sandboxes: SandboxesOf,
) -> None:
    """Run a program with its streams attached; protocol/rest/README.md describes the messages."""
    await attach(websocket, guests, caller, id, partial(sandbox_of, caller, sandboxes))


@routes.websocket("/v2/sandboxes/{id}/eval/stream")
async def eval_stream(
    websocket: WebSocket,
    id: str,  # noqa: A002 - the path's own word
    caller: CallerOf,
    guests: GuestsOf,
    sandboxes: SandboxesOf,
) -> None:
    """Run code and have its output as it comes; protocol/rest/README.md describes the messages."""
    await attach_eval(websocket, guests, caller, id, partial(sandbox_of, caller, sandboxes))


@routes.websocket("/v2/sandboxes/{id}/ports/{port}")
async def connect_port(
    websocket: WebSocket, sandbox: IdOf, port: str, caller: CallerOf, guests: GuestsOf
) -> None:
    """Connect to a program that listens; protocol/rest/README.md describes the messages."""
    await connect(websocket, guests, caller, sandbox, port)
