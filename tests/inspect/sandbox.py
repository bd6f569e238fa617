"""Inspect AI's idea of a sandbox, over our SDK: a thin adapter, as a user would write one."""

from __future__ import annotations

import errno
import os
import posixpath
from typing import TYPE_CHECKING, Any, NoReturn

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
)

from forkd.errors import ForkdError, InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forkd import AsyncSandbox

WORK = "/srv/work"
"""Where relative paths begin, and programs; every user may enter it."""

SIGNALLED = 128
"""A program that a signal ended has this plus the signal as exit status, as in a shell."""

NO_PROGRAM = 127
"""Exit status of a shell for a program that does not exist."""

ERRNOS = {
    "not_found": errno.ENOENT,
    "permission_denied": errno.EACCES,
    "is_a_directory": errno.EISDIR,
    "not_a_directory": errno.ENOTDIR,
    "exec_failed": errno.EACCES,
}
"""What Python calls the refusals of a guest's agent."""


class ForkdEnvironment(SandboxEnvironment):
    """One sandbox of ours."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        super().__init__()
        self._sandbox = sandbox

    async def exec(  # noqa: PLR0913, PLR0917 - as Inspect has it
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002 - as Inspect has it
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,  # noqa: ASYNC109 - as Inspect has it
        timeout_retry: bool = True,  # noqa: ARG002, FBT001, FBT002 - as Inspect has it
        concurrency: bool = True,  # noqa: ARG002, FBT001, FBT002 - as Inspect has it
    ) -> ExecResult[str]:
        """Run a program and wait for it."""
        output = {"stdout": bytearray(), "stderr": bytearray()}
        data = input.encode() if isinstance(input, str) else input
        options: dict[str, Any] = {"env": env or {}, "cwd": _absolute(cwd or "."), "user": user}
        process = self._sandbox.exec_stream(
            cmd, stdin=data is not None, timeout_s=timeout, **options
        )
        try:
            async with process:
                if data is not None:
                    await process.write(data)
                    await process.close_stdin()
                async for piece in process:
                    output[piece.stream] += piece.data
        except NotFound as error:
            return _failed(NO_PROGRAM, error)
        except InvalidRequest as error:  # there is no such user
            return _failed(1, error)
        except ForkdError as error:
            _raise(error, cmd[0])
        ended = process.exit
        if ended is None or ended.timed_out:
            raise TimeoutError
        stdout, stderr = (output[each].decode(errors="replace") for each in ("stdout", "stderr"))
        code = SIGNALLED + (ended.signal or 0) if ended.exit_code is None else ended.exit_code
        return ExecResult(success=code == 0, returncode=code, stdout=stdout, stderr=stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, its folders made."""
        try:
            await self._sandbox.files.write(_absolute(file), contents, make_parents=True)
        except ForkdError as error:
            _raise(error, file)

    async def read_file(self, file: str, text: bool = True) -> str | bytes:  # noqa: FBT001, FBT002 - as Inspect has it
        """Return what is in a file."""
        path = _absolute(file)
        try:
            found = await self._sandbox.files.stat(path)
            if found.size_bytes > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
                said = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR
                raise OutputLimitExceededError(said, None)
            data = await self._sandbox.files.read(path)
        except ForkdError as error:
            _raise(error, file)
        return data.decode() if text else data

    @classmethod
    async def sample_cleanup(cls, *_: object) -> None:
        """Do nothing: whoever forked the sandbox ends it."""


def _failed(exit_code: int, error: ForkdError) -> ExecResult[str]:
    return ExecResult(success=False, returncode=exit_code, stdout="", stderr=str(error))


def _absolute(path: str) -> str:
    return posixpath.normpath(posixpath.join(WORK, path))


def _raise(error: ForkdError, path: str) -> NoReturn:
    """Raise what Python would for a file or program of this host."""
    number = ERRNOS.get(str(error.context.get("guest_code")))
    if number is None:
        raise error
    raise OSError(number, os.strerror(number).lower(), path) from error
