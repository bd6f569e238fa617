"""What happens inside sandboxes: each method finds the agent and asks it.

`forkd.service.api.GuestService` documents every method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from forkd.engine import guest_files
from forkd.engine.guest_exec import GuestExec
from forkd.engine.guest_files import GuestFile, write_file
from forkd.errors import InvalidRequest
from forkd.limits import EVAL_CODE_BYTES_MAX, EXEC_TIMEOUT_S_MAX, PATH_BYTES_MAX
from forkd.model.checks import guest_path, in_range

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from forkd.engine.guest import Guest
    from forkd.model.exec import EvalResult, ExecRequest
    from forkd.model.files import FileEntry
    from forkd.model.guest import GuestStatus
    from forkd.model.ids import SandboxId

FILE_BYTES_MAX = 1 << 63
"""Beyond any offset or length that a file can have."""

MODE_MAX = 0o7777
"""All permission bits."""

ECHO_BYTES_MAX = 64 * 1024
"""Longest text that is echoed; longer ones would measure something else."""


class GuestOperations(ABC):
    """The part of the service that asks agents; a base of `HostService`."""

    @abstractmethod
    def _guest(self, sandbox: SandboxId) -> Guest:
        """Return the agent of a running sandbox, or raise NotFound or Conflict."""

    async def ping(self, sandbox: SandboxId) -> GuestStatus:
        """Ask the agent how it is."""
        return await self._guest(sandbox).ping()

    async def echo(self, sandbox: SandboxId, data: str) -> str:
        """Have `data` returned."""
        in_range("data, in bytes,", len(data.encode(errors="surrogatepass")), 0, ECHO_BYTES_MAX)
        return await self._guest(sandbox).echo(data)

    async def exec(self, sandbox: SandboxId, request: ExecRequest) -> GuestExec:
        """Start a command."""
        return await GuestExec.start(self._guest(sandbox), request)

    async def eval(
        self, sandbox: SandboxId, code: str, *, timeout_s: float | None = None
    ) -> EvalResult:
        """Run `code` in the warm runtime."""
        if len(code.encode(errors="surrogatepass")) > EVAL_CODE_BYTES_MAX:
            raise InvalidRequest(f"code is longer than {EVAL_CODE_BYTES_MAX} bytes", field="code")
        timeout_s = EXEC_TIMEOUT_S_MAX if timeout_s is None else timeout_s
        in_range("timeout_s", timeout_s, 0.001, EXEC_TIMEOUT_S_MAX)
        return await self._guest(sandbox).eval(code, timeout_s)

    async def read_file(
        self, sandbox: SandboxId, path: str, *, offset: int = 0, length: int | None = None
    ) -> GuestFile:
        """Open a file for reading."""
        guest_path("path", path, PATH_BYTES_MAX)
        in_range("offset", offset, 0, FILE_BYTES_MAX - 1)
        if length is not None:
            in_range("length", length, 0, FILE_BYTES_MAX - 1)
        return await GuestFile.open(self._guest(sandbox), path, offset=offset, length=length)

    async def write_file(
        self,
        sandbox: SandboxId,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        mode: int | None = None,
        make_parents: bool = False,
    ) -> int:
        """Write a file, whole or not at all."""
        guest_path("path", path, PATH_BYTES_MAX)
        _check_mode(mode)
        return await write_file(
            self._guest(sandbox), path, chunks, mode=mode, make_parents=make_parents
        )

    async def stat(self, sandbox: SandboxId, path: str) -> FileEntry:
        """Return one entry."""
        guest_path("path", path, PATH_BYTES_MAX)
        return await guest_files.stat(self._guest(sandbox), path)

    async def list_dir(self, sandbox: SandboxId, path: str) -> tuple[FileEntry, ...]:
        """Return a directory's entries."""
        guest_path("path", path, PATH_BYTES_MAX)
        return await guest_files.list_dir(self._guest(sandbox), path)

    async def make_dir(
        self, sandbox: SandboxId, path: str, *, parents: bool = False, mode: int | None = None
    ) -> None:
        """Make a directory."""
        guest_path("path", path, PATH_BYTES_MAX)
        _check_mode(mode)
        await guest_files.make_dir(self._guest(sandbox), path, parents=parents, mode=mode)

    async def move(self, sandbox: SandboxId, source: str, target: str) -> None:
        """Rename a file."""
        guest_path("source", source, PATH_BYTES_MAX)
        guest_path("target", target, PATH_BYTES_MAX)
        await guest_files.move(self._guest(sandbox), source, target)

    async def remove(self, sandbox: SandboxId, path: str, *, recursive: bool = False) -> None:
        """Remove a file or directory."""
        guest_path("path", path, PATH_BYTES_MAX)
        await guest_files.remove(self._guest(sandbox), path, recursive=recursive)


def _check_mode(mode: int | None) -> None:
    if mode is not None:
        in_range("mode", mode, 0, MODE_MAX)
