"""The guests of `fake_service`: files, programs, and an interpreter, in memory."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

from forkd.engine.faults import guest_fault
from forkd.errors import Conflict, EngineExited
from forkd.limits import PORT_MAX
from forkd.model.caller import Scope
from forkd.model.checks import in_range
from forkd.model.exec import Stderr, Stdout
from forkd.model.files import ArchiveResult, EntryKind, FileEntry
from forkd.model.guest import GuestStatus, RuntimeStatus
from tests.support import interpreter
from tests.support.fake_programs import FakeExec, evaluate_in
from tests.support.file_tree import FileTree, Refused

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping

    from forkd.model.caller import Caller
    from forkd.model.exec import EvalResult, ExecRequest, OnOutput
    from forkd.model.ids import SandboxId
    from forkd.model.output import Kept
    from forkd.model.sandbox import Sandbox
    from tests.support.fake_service import FakeService


@dataclass
class Contents:
    """What is in a guest: what forks, branches and snapshots copy."""

    files: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    contexts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def copy(self) -> Contents:
        plain = {name: value for name, value in self.names.items() if name != "__builtins__"}
        modules = {name: value for name, value in plain.items() if isinstance(value, ModuleType)}
        own = {name: value for name, value in plain.items() if name not in modules}
        names = {**modules, **copy.deepcopy(own)}
        return Contents(dict(self.files), names, {name: {} for name in self.contexts})


@dataclass
class FakeGuest:
    sandbox: Sandbox
    forked: Contents
    contents: Contents
    modes: dict[str, int | None] = field(default_factory=dict)
    users: dict[str, str | None] = field(default_factory=dict)
    console: bytes = b"Linux version 6.1.0\n"
    too_old: bool = False
    followed: threading.Event = field(default_factory=threading.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class FakeReader:
    def __init__(self, data: bytes, size_bytes: int, *, breaks: bool = False) -> None:
        self._data = data
        self._breaks = breaks
        self.size_bytes = size_bytes
        self.mode = 0o644
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._data), 65536):
            yield self._data[start : start + 65536]
            if self._breaks:
                raise EngineExited("the machine is gone")

    async def aclose(self) -> None:
        self.closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class FakePort:
    """A connection to a port of this host."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ended = asyncio.Event()
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while data := await self._reader.read(65536):
                yield data
        except OSError as error:
            raise guest_fault({"code": "io", "message": str(error)}) from error
        yield b""
        await self._ended.wait()

    async def send(self, data: bytes) -> None:
        if self._ended.is_set():
            raise Conflict("the end of what is sent was sent already")
        self._writer.write(data)
        await self._writer.drain()

    async def send_end(self) -> None:
        self._ended.set()
        self._writer.write_eof()

    async def aclose(self) -> None:
        self.closed = True
        self._writer.transport.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


@dataclass
class FakeGuests:
    world: FakeService

    async def ping(self, caller: Caller, sandbox: SandboxId) -> GuestStatus:
        self.world.running_guest(caller, sandbox, Scope.READ)
        return GuestStatus("0.1.0", 1, 12.0, RuntimeStatus.READY)

    async def echo(self, caller: Caller, sandbox: SandboxId, data: str) -> str:
        self.world.running_guest(caller, sandbox)
        return data

    async def exec(self, caller: Caller, sandbox: SandboxId, request: ExecRequest) -> FakeExec:
        own = self.world.running_guest(caller, sandbox).sandbox.env
        request = replace(request, env={**own, **request.env})
        self.world.execs.append(FakeExec(request, self.world.exec_fed))
        return self.world.execs[-1]

    async def eval(
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
        if runtime not in {None, "python"}:
            raise Conflict(
                f"there is no runtime '{runtime}' in this sandbox: its warm runtime is python",
                guest_code="no_runtime",
            )
        contents = self.world.running_guest(caller, sandbox).contents
        with interpreter.variables(env or {}):
            result = evaluate_in(contents.contexts, contents.names, context, code, timeout_s)
        if on_output is not None:
            await self._told(result, on_output)
            return replace(result, stdout="", stderr="")
        if kept is not None:
            kept[0].add(result.stdout.encode())
            return replace(result, output_truncated=kept[0].truncated)
        return result

    async def _told(self, result: EvalResult, on_output: OnOutput) -> None:
        """Tell what code has printed line by line; the last line once the world lets it go on."""
        lines: list[Stdout | Stderr] = []
        lines += [Stdout(each.encode()) for each in result.stdout.splitlines(keepends=True)]
        lines += [Stderr(each.encode()) for each in result.stderr.splitlines(keepends=True)]
        try:
            for line in lines[:-1]:
                await on_output(line)
            await self.world.eval_goes_on.wait()
            for line in lines[-1:]:
                await on_output(line)
        except asyncio.CancelledError:
            self.world.eval_left.set()
            raise

    async def connect(self, caller: Caller, sandbox: SandboxId, port: int) -> FakePort:
        in_range("port", port, 1, PORT_MAX)
        self.world.running_guest(caller, sandbox)
        self._check_age(sandbox)
        try:
            connection = FakePort(*await asyncio.open_connection("127.0.0.1", port))
        except OSError as error:
            words = f"nothing listens on port {port} of 127.0.0.1 or ::1 in the sandbox"
            raise guest_fault({"code": "refused", "message": words}) from error
        self.world.ports.append(connection)
        return connection

    async def read_file(
        self,
        caller: Caller,
        sandbox: SandboxId,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
    ) -> FakeReader:
        with self._files(caller, sandbox) as files:
            data = files.read(path)
        end = None if length is None else offset + length
        gone = self.world.running[sandbox].sandbox.exit_reason is not None
        return FakeReader(data[offset:end], len(data), breaks=gone)

    async def write_file(
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
        with self._files(caller, sandbox) as files:
            files.check_place(path, make_parents=make_parents)
            data = b"".join([each async for each in chunks])
            files.write(path, data)
        self.world.running[sandbox].modes[path] = mode
        self.world.running[sandbox].users[path] = user
        return len(data)

    async def read_archive(self, caller: Caller, sandbox: SandboxId, path: str) -> FakeReader:
        self._check_age(sandbox)
        with self._files(caller, sandbox) as files:
            data = files.pack(path)
        return FakeReader(data, 0)

    async def write_archive(
        self,
        caller: Caller,
        sandbox: SandboxId,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        user: str | None = None,
        keep_owner: bool = False,
    ) -> ArchiveResult:
        self._check_age(sandbox)
        with self._files(caller, sandbox) as files:
            data = b"".join([each async for each in chunks])
            result = files.unpack(path, data)
        self.world.running[sandbox].users[path] = "archive" if keep_owner else user
        return result

    async def stat(self, caller: Caller, sandbox: SandboxId, path: str) -> FileEntry:
        with self._files(caller, sandbox) as files:
            return an_entry(files.entry(path))

    async def list_dir(
        self, caller: Caller, sandbox: SandboxId, path: str
    ) -> tuple[FileEntry, ...]:
        with self._files(caller, sandbox) as files:
            return tuple(map(an_entry, files.list_dir(path)))

    async def make_dir(
        self,
        caller: Caller,
        sandbox: SandboxId,
        path: str,
        *,
        parents: bool = False,
        mode: int | None = None,
        user: str | None = None,
    ) -> None:
        with self._files(caller, sandbox) as files:
            files.make_dir(path, parents=parents)
        self.world.running[sandbox].modes[path] = mode
        self.world.running[sandbox].users[path] = user

    async def move(self, caller: Caller, sandbox: SandboxId, source: str, target: str) -> None:
        with self._files(caller, sandbox) as files:
            files.move(source, target)

    async def remove(
        self, caller: Caller, sandbox: SandboxId, path: str, *, recursive: bool = False
    ) -> None:
        with self._files(caller, sandbox) as files:
            files.remove(path, recursive=recursive)

    def _check_age(self, sandbox: SandboxId) -> None:
        """Refuse as an agent does that has never heard of archives."""
        guest = self.world.running.get(sandbox)
        if guest is not None and guest.too_old:
            words = "unknown operation"
            raise guest_fault({"code": "invalid_request", "message": words, "field": "op"})

    @contextlib.contextmanager
    def _files(self, caller: Caller, sandbox: SandboxId) -> Iterator[FileTree]:
        """Work on a guest's files; what the agent refuses is raised as the engine does."""
        try:
            yield FileTree(self.world.running_guest(caller, sandbox).contents.files)
        except Refused as error:
            words = str(error).encode(errors="replace").decode()  # as an agent says it
            raise guest_fault({"code": error.code, "message": words}) from error


def an_entry(members: dict[str, Any]) -> FileEntry:
    return FileEntry(**(members | {"kind": EntryKind(members["kind"])}))
