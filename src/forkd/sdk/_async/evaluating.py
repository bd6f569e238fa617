"""Evaluating code: over one request, or with its output as it comes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forkd.errors import TransportError
from forkd.limits import EVAL_OUTPUT_BYTES_MAX, EXEC_TIMEOUT_S_MAX
from forkd.sdk._async.process import answered, received
from forkd.sdk._async.running import TIMEOUT_MARGIN_S, Kept
from forkd.sdk._requests import build
from forkd.sdk._results import CodeContext, eval_result
from forkd.wire import v2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from forkd.sdk._async.http import AsyncHttp
    from forkd.sdk._results import EvalResult


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Code that is to be evaluated, as the callers of `eval` describe it."""

    code: str
    runtime: str | None
    context: str | CodeContext | None
    limit_s: float | None
    env: Mapping[str, str] | None
    on_stdout: Callable[[str], object] | None
    on_stderr: Callable[[str], object] | None

    async def to_the_end(self, http: AsyncHttp, path: str) -> EvalResult:
        """Evaluate it in the sandbox at `path`."""
        context = self.context
        request = build(
            v2.Eval,
            code=self.code,
            runtime=self.runtime,
            context=context.id if isinstance(context, CodeContext) else context,
            timeout_secs=EXEC_TIMEOUT_S_MAX if self.limit_s is None else self.limit_s,
            env=self.env,
        )
        if self.on_stdout is None and self.on_stderr is None:
            answer = await http.call(
                v2.EvalResult,
                "POST",
                f"{path}/eval",
                body=request,
                timeout_s=None if self.limit_s is None else self.limit_s + TIMEOUT_MARGIN_S,
            )
            return eval_result(answer)
        return await self._attached(http, f"{path}/eval/stream", request)

    async def _attached(self, http: AsyncHttp, path: str, request: v2.Eval) -> EvalResult:
        """Take what the code writes as it comes; letting go of the socket interrupts the code."""
        kept = {
            v2.Kind.STDOUT: Kept(self.on_stdout, bytes_max=EVAL_OUTPUT_BYTES_MAX),
            v2.Kind.STDERR: Kept(self.on_stderr, bytes_max=EVAL_OUTPUT_BYTES_MAX),
        }
        socket = await http.socket(path)
        try:
            said = request.model_dump_json(exclude_unset=True).encode()
            await socket.send(bytes([v2.Kind.REQUEST]) + said)
            kind, payload = await received(socket)
            while kind in kept:
                await kept[kind].take(payload)
                kind, payload = await received(socket)
        finally:
            await socket.aclose()
        if kind is not v2.Kind.REPLY:
            raise TransportError(f"{kind.name} came where REPLY belongs")
        for each in kept.values():
            await each.take(b"", last=True)
        stdout, stderr = kept.values()
        return replace(
            eval_result(answered(v2.EvalResult, payload)),
            stdout=stdout.output(),
            stderr=stderr.output(),
            truncated=stdout.truncated or stderr.truncated,
        )
