"""What happens inside sandboxes: each method finds the agent and asks it.

`forkd.service.api.Guests` documents every method.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from forkd.engine import guest_files
from forkd.engine.guest_exec import GuestExec
from forkd.engine.guest_files import GuestFile, write_file
from forkd.engine.guest_port import GuestPort
from forkd.errors import Busy, InvalidRequest
from forkd.limits import (
    EVAL_CODE_BYTES_MAX,
    EVAL_CONTEXT_PATTERN,
    EVALS_MAX,
    EXEC_TIMEOUT_S_MAX,
    EXECS_MAX,
    FILE_MODE_MAX,
    PATH_BYTES_MAX,
    PORT_CONNECTIONS_MAX,
    PORT_CONNECTIONS_PER_SANDBOX_MAX,
    PORT_MAX,
    RUNTIME_NAME_PATTERN,
    SANDBOX_ENV_BYTES_MAX,
    SHORT_RETRY_S,
)
from forkd.model.caller import Scope
from forkd.model.checks import guest_path, in_range, unicode_length
from forkd.model.exec import check_variables
from forkd.service.places import Places
from forkd.service.use_case import use_case

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Generator, Mapping

    from forkd.engine.guest import Guest
    from forkd.model.caller import Caller
    from forkd.model.exec import EvalResult, ExecRequest, OnOutput
    from forkd.model.files import ArchiveResult, FileEntry
    from forkd.model.guest import GuestStatus
    from forkd.model.ids import SandboxId
    from forkd.model.output import Kept
    from forkd.service.introduction import Introduction
    from forkd.service.sandboxes.roster import Roster
    from forkd.telemetry.telemetry import Telemetry

_RUNTIME = re.compile(RUNTIME_NAME_PATTERN.removesuffix("$"))

_CONTEXT = re.compile(EVAL_CONTEXT_PATTERN.removesuffix("$"))

FILE_BYTES_MAX = 1 << 63
"""Beyond any offset or length that a file can have."""

ECHO_BYTES_MAX = 64 * 1024
"""Longest text that is echoed; longer ones would measure something else."""


@dataclass(frozen=True, slots=True)
class Guests:
    """The agents of one host's sandboxes.

    Attributes:
        introduction: What is told of secrets.
        execs: The places of commands, until who started them lets go.
        evals: Those of evaluations.
        ports: Those of connections to programs that listen.
    """

    telemetry: Telemetry
    roster: Roster
    introduction: Introduction
    execs: Places = field(default_factory=lambda: Places("execs", EXECS_MAX, SHORT_RETRY_S))
    evals: Places = field(default_factory=lambda: Places("evals", EVALS_MAX, SHORT_RETRY_S))
    ports: Places = field(
        default_factory=lambda: Places("connections to ports", PORT_CONNECTIONS_MAX, SHORT_RETRY_S)
    )
    _ports_of: Counter[SandboxId] = field(default_factory=Counter)

    @use_case("ping", Scope.READ)
    async def ping(self, caller: Caller, sandbox: SandboxId) -> GuestStatus:
        """Return the state of the agent."""
        return await self.roster.get(caller, sandbox).running_guest().ping()

    @use_case("echo", Scope.RUN)
    async def echo(self, caller: Caller, sandbox: SandboxId, data: str) -> str:
        """Have `data` returned."""
        in_range("data, in bytes,", unicode_length("data", data), 0, ECHO_BYTES_MAX)
        return await self._guest(caller, sandbox).echo(data)

    @use_case("start_exec", Scope.RUN)
    async def exec(self, caller: Caller, sandbox: SandboxId, request: ExecRequest) -> GuestExec:
        """Start a command."""
        owner = self.roster.get(caller, sandbox)
        guest, found = owner.running_guest(), owner.sandbox
        given = {} if found.use is None else self.introduction.environment(found.use)
        if given or found.env:
            request = replace(request, env={**given, **found.env, **request.env})
        return await GuestExec.start(guest, request, self._executing(caller))

    @use_case("eval", Scope.RUN)
    async def eval(  # noqa: PLR0913 - what a caller may ask
        self,
        caller: Caller,
        sandbox: SandboxId,
        code: str,
        *,
        timeout_s: float | None = None,
        kept: tuple[Kept, Kept] | None = None,
        runtime: str | None = None,
        context: str | None = None,
        env: Mapping[str, str] | None = None,
        on_output: OnOutput | None = None,
    ) -> EvalResult:
        """Run `code` in the warm runtime."""
        if unicode_length("code", code) > EVAL_CODE_BYTES_MAX:
            raise InvalidRequest(f"code is longer than {EVAL_CODE_BYTES_MAX} bytes", field="code")
        timeout_s = EXEC_TIMEOUT_S_MAX if timeout_s is None else timeout_s
        in_range("timeout_s", timeout_s, 0.001, EXEC_TIMEOUT_S_MAX)
        if runtime is not None and _RUNTIME.fullmatch(runtime) is None:
            raise InvalidRequest(f"{runtime[:80]!r} is not the name of a runtime", field="runtime")
        if context is not None and _CONTEXT.fullmatch(context) is None:
            raise InvalidRequest(f"{context[:80]!r} is not the name of a context", field="context")
        check_variables(env or {}, SANDBOX_ENV_BYTES_MAX)
        unicode_length("env", "".join(f"{name}={value}" for name, value in (env or {}).items()))
        guest = self._guest(caller, sandbox)
        with self.evals.take(caller):
            return await guest.eval(
                code,
                timeout_s,
                kept,
                runtime=runtime,
                context=context,
                env=env,
                on_output=on_output,
            )

    @use_case("connect_port", Scope.RUN)
    async def connect(self, caller: Caller, sandbox: SandboxId, port: int) -> GuestPort:
        """Connect to a program that listens."""
        in_range("port", port, 1, PORT_MAX)
        guest = self._guest(caller, sandbox)
        return await GuestPort.open(guest, port, self._connected(caller, sandbox))

    @use_case("read_file", Scope.RUN)
    async def read_file(
        self,
        caller: Caller,
        sandbox: SandboxId,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
    ) -> GuestFile:
        """Open a file for reading."""
        guest_path("path", path, PATH_BYTES_MAX)
        in_range("offset", offset, 0, FILE_BYTES_MAX - 1)
        if length is not None:
            in_range("length", length, 0, FILE_BYTES_MAX - 1)
        return await GuestFile.open(
            self._guest(caller, sandbox), path, offset=offset, length=length
        )

    @use_case("write_file", Scope.RUN)
    async def write_file(  # noqa: PLR0913 - what a caller may ask
        self,
        caller: Caller,
        sandbox: SandboxId,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        mode: int | None = None,
        make_parents: bool = False,
        user: str | None = None,
    ) -> int:
        """Write a file, whole or not at all."""
        guest_path("path", path, PATH_BYTES_MAX)
        _check_mode(mode)
        return await write_file(
            self._guest(caller, sandbox),
            path,
            chunks,
            mode=mode,
            make_parents=make_parents,
            user=user,
        )

    @use_case("read_archive", Scope.RUN)
    async def read_archive(self, caller: Caller, sandbox: SandboxId, path: str) -> GuestFile:
        """Open a tree for reading as an archive."""
        guest_path("path", path, PATH_BYTES_MAX)
        return await GuestFile.open_archive(self._guest(caller, sandbox), path)

    @use_case("write_archive", Scope.RUN)
    async def write_archive(  # noqa: PLR0913 - what a caller may ask
        self,
        caller: Caller,
        sandbox: SandboxId,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        user: str | None = None,
        keep_owner: bool = False,
    ) -> ArchiveResult:
        """Make a tree of an archive."""
        guest_path("path", path, PATH_BYTES_MAX)
        guest = self._guest(caller, sandbox)
        return await guest_files.write_archive(
            guest, path, chunks, user=user, keep_owner=keep_owner
        )

    @use_case("stat_file", Scope.RUN)
    async def stat(self, caller: Caller, sandbox: SandboxId, path: str) -> FileEntry:
        """Return one entry."""
        guest_path("path", path, PATH_BYTES_MAX)
        return await guest_files.stat(self._guest(caller, sandbox), path)

    @use_case("list_dir", Scope.RUN)
    async def list_dir(
        self, caller: Caller, sandbox: SandboxId, path: str
    ) -> tuple[FileEntry, ...]:
        """Return a directory's entries."""
        guest_path("path", path, PATH_BYTES_MAX)
        return await guest_files.list_dir(self._guest(caller, sandbox), path)

    @use_case("make_dir", Scope.RUN)
    async def make_dir(  # noqa: PLR0913 - what a caller may ask
        self,
        caller: Caller,
        sandbox: SandboxId,
        path: str,
        *,
        parents: bool = False,
        mode: int | None = None,
        user: str | None = None,
    ) -> None:
        """Make a directory."""
        guest_path("path", path, PATH_BYTES_MAX)
        _check_mode(mode)
        guest = self._guest(caller, sandbox)
        await guest_files.make_dir(guest, path, parents=parents, mode=mode, user=user)

    @use_case("move_file", Scope.RUN)
    async def move(self, caller: Caller, sandbox: SandboxId, source: str, target: str) -> None:
        """Rename a file."""
        guest_path("source", source, PATH_BYTES_MAX)
        guest_path("target", target, PATH_BYTES_MAX)
        await guest_files.move(self._guest(caller, sandbox), source, target)

    @use_case("remove_file", Scope.RUN)
    async def remove(
        self, caller: Caller, sandbox: SandboxId, path: str, *, recursive: bool = False
    ) -> None:
        """Remove a file or directory."""
        guest_path("path", path, PATH_BYTES_MAX)
        await guest_files.remove(self._guest(caller, sandbox), path, recursive=recursive)

    @contextlib.contextmanager
    def _executing(self, caller: Caller) -> Generator[None, None, None]:
        """Have a place for a command as long as the block takes, and its time counted."""
        with self.telemetry.operation("exec"), self.execs.take(caller):
            yield

    @contextlib.contextmanager
    def _connected(self, caller: Caller, sandbox: SandboxId) -> Generator[None, None, None]:
        """Have a place for a connection as long as the block takes."""
        if self._ports_of[sandbox] >= PORT_CONNECTIONS_PER_SANDBOX_MAX:
            raise Busy(
                f"sandbox {sandbox} has {PORT_CONNECTIONS_PER_SANDBOX_MAX} connections to its "
                "ports, and may have no more at once: close some",
                retry_after_s=SHORT_RETRY_S,
            )
        with self.ports.take(caller):
            self._ports_of[sandbox] += 1
            try:
                yield
            finally:
                self._ports_of[sandbox] -= 1
                if not self._ports_of[sandbox]:
                    del self._ports_of[sandbox]

    def _guest(self, caller: Caller, sandbox: SandboxId) -> Guest:
        """Return the agent of a running sandbox that belongs to the caller."""
        return self.roster.get(caller, sandbox).running_guest()


def _check_mode(mode: int | None) -> None:
    if mode is not None:
        in_range("mode", mode, 0, FILE_MODE_MAX)
