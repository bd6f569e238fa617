"""Code in a sandbox, and contexts for it, under E2B's names."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forkd.errors import InvalidRequest
from forkd.sdk._async.programs import AsyncPrograms
from forkd.sdk._parallel import async_told
from forkd.sdk._requests import explicit
from forkd.sdk._results import CodeContext, judged, messages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from forkd.sdk._results import EvalError, EvalResult, OutputMessage, Result

CONTEXTS_RUNTIME = "python"
"""The warm runtime that has contexts."""


class AsyncContexts(AsyncPrograms):
    """The part of a sandbox that runs code as E2B does; `AsyncSandbox` has all of it."""

    @explicit
    async def run_code(  # noqa: PLR0913 - E2B's
        self,
        code: str,
        *,
        language: str | None = None,
        context: str | CodeContext | None = None,
        timeout: float | None = None,
        envs: Mapping[str, str] | None = None,
        on_stdout: Callable[[OutputMessage], object] | None = None,
        on_stderr: Callable[[OutputMessage], object] | None = None,
        on_result: Callable[[Result], object] | None = None,
        on_error: Callable[[EvalError], object] | None = None,
    ) -> EvalResult:
        """Run code as `eval` does, under E2B's name.

        Args:
            code: Statements; a last expression is the value.
            language: Refuse the code if the warm runtime is another one.
            context: Where it runs; as of `eval`.
            timeout: Interrupt the code after this time, in seconds; None: never.
            envs: Variables of the environment, for this code alone.
            on_stdout: Called with each piece of output, as it comes.
            on_stderr: Called with each piece of error output, as it comes.
            on_result: Called with each of the results, in their order, once the code has ended.
            on_error: Called with the exception that the code raised, if it raised one.

        Raises:
            ExecTimeout: Its time ran out; variables that it has set are kept.
        """
        result = await self.eval(
            code,
            runtime=language,
            context=context,
            check=False,
            timeout_s=timeout,
            env=envs,
            on_stdout=messages(on_stdout, error=False),
            on_stderr=messages(on_stderr, error=True),
        )
        if on_result is not None:
            for each in result.results:
                await async_told(on_result, each)
        if on_error is not None and result.error is not None and not result.timed_out:
            await async_told(on_error, result.error)
        return judged(result, check=None)

    @explicit
    async def create_code_context(
        self, *, cwd: str | None = None, language: str | None = None
    ) -> CodeContext:
        """Make a context: code in it has names and a working directory of its own.

        Contexts are in one process: modules are loaded once for all, one evaluation runs at a time,
        and code that ends the process ends all of them.  Branches of the sandbox have its contexts.

        Args:
            cwd: Where its code starts; the image's folder if None.
            language: The warm runtime's, which must be Python.

        Raises:
            InvalidRequest: There is no such folder, or there are too many contexts.
            Conflict: The warm runtime is another one.
        """
        made = CodeContext(f"ctx-{secrets.token_hex(8)}", language or CONTEXTS_RUNTIME, cwd or "")
        return await self._begin_context(made)

    async def _begin_context(self, context: CodeContext) -> CodeContext:
        move = f"__import__('os').chdir({context.cwd!r})\n" if context.cwd else ""
        made = await self.eval(
            f"{move}__import__('os').getcwd()", runtime=context.language, context=context
        )
        if made.error is not None:
            await self.remove_code_context(context)
            raise InvalidRequest(f"cwd: {made.error}", field="cwd")
        return replace(context, cwd=str(made.value))

    async def list_code_contexts(self) -> list[CodeContext]:
        """Return the contexts that there are, besides that of the warm-up."""
        found: Any = (await self._of_contexts("contexts()")).value
        return [CodeContext(each["id"], CONTEXTS_RUNTIME, each["cwd"] or "") for each in found]

    async def remove_code_context(self, context: str | CodeContext) -> bool:
        """Forget a context with all its names; what its code started goes on.

        Returns:
            Whether there was one.
        """
        name = context.id if isinstance(context, CodeContext) else context
        return bool((await self._of_contexts(f"remove_context({name!r})")).value)

    async def restart_code_context(self, context: CodeContext) -> CodeContext:
        """Empty a context: its names are forgotten, and its code starts in its first folder."""
        await self.remove_code_context(context)
        return await self._begin_context(context)

    async def _of_contexts(self, call: str) -> EvalResult:
        code = f"__import__('forkd').{call}"
        return (await self.eval(code, runtime=CONTEXTS_RUNTIME)).check()
