"""The reference's programs and code inside a sandbox: ping, exec, eval."""

from __future__ import annotations

from fastapi import Response

from forkd.daemon.bodies import takes_body
from forkd.daemon.exec import to_the_end
from forkd.daemon.reference import ReferenceIdOf, convert
from forkd.daemon.routes import CallerOf, GuestsOf, KeepOf, router
from forkd.daemon.streaming import with_outputs
from forkd.errors import GuestError, NotFound
from forkd.limits import EVAL_OUTPUT_BYTES_MAX, EXEC_OUTPUT_BYTES_MAX, EXEC_TIMEOUT_S_DEFAULT
from forkd.model.caller import Scope
from forkd.model.exec import ExecRequest
from forkd.wire import v1

routes = router("processes")

NOT_RUN = 1
"""Exit code of a program that could not be run."""


@routes.post("/sandboxes/{id}/ping", operation_id="ping")
async def ping(sandbox: ReferenceIdOf, caller: CallerOf, guests: GuestsOf) -> v1.Pong:
    """Ask the agent in the guest how it is."""
    return convert.pong(await guests.ping(caller, sandbox))


@routes.post("/sandboxes/{id}/exec", operation_id="exec", response_model=v1.ExecResult)
@takes_body(Scope.RUN)
async def exec_(
    sandbox: ReferenceIdOf, body: v1.Exec, caller: CallerOf, guests: GuestsOf, keep: KeepOf
) -> Response:
    """Run a program to its end; that it cannot be run is a result, too."""
    stdout, stderr = kept = keep(EXEC_OUTPUT_BYTES_MAX), keep(EXEC_OUTPUT_BYTES_MAX)
    request = ExecRequest(args=tuple(body.args), timeout_s=body.timeout_secs)
    try:
        ended = await to_the_end(guests, caller, sandbox, request, kept)
    except (NotFound, GuestError) as error:
        if isinstance(error, NotFound) and "program" not in error.context:
            raise
        exit_code = NOT_RUN
        stderr.add(f"{error}\n".encode())
    else:
        exit_code = convert.exit_code(ended)
        if ended.timed_out:
            line = f"timed out after {body.timeout_secs:g} s\n"
            stderr.add(("\n" * (len(stderr) > 0) + line).encode())
    result = v1.ExecResult(stdout="", stderr="", exit_code=exit_code)
    return with_outputs(result, {"stdout": stdout, "stderr": stderr})


@routes.post("/sandboxes/{id}/eval", operation_id="eval")
@takes_body(Scope.RUN)
async def eval_(
    sandbox: ReferenceIdOf, body: v1.Eval, caller: CallerOf, guests: GuestsOf, keep: KeepOf
) -> v1.EvalResult:
    """Run code in the warm runtime; what it raises is a result, what it prints is dropped."""
    kept = keep(EVAL_OUTPUT_BYTES_MAX), keep(EVAL_OUTPUT_BYTES_MAX)
    timeout_s = EXEC_TIMEOUT_S_DEFAULT
    result = await guests.eval(caller, sandbox, body.code, timeout_s=timeout_s, kept=kept)
    return convert.eval_result(result, timeout_s)
