"""The few programs, and the interpreter, of the guests of `fake_service`."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from forkd.errors import Conflict, GuestError, InvalidRequest, NotFound
from forkd.limits import EVAL_CONTEXTS_MAX
from forkd.model.exec import EvalFault, EvalForms, EvalResult, Exited, Started, Stderr, Stdout
from tests.support import interpreter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.exec import ExecEvent, ExecRequest, TtySize

CHUNK = 64 * 1024

PROGRAMS = {
    "/bin/sh", "cat", "echo", "env", "exit", "fail", "late", "leave", "sh", "size", "sleep", "spew",
    "text", "true", "until-ctrl-c",
}  # fmt: skip
"""What there is: `exit N`, `sh -c "exit N"`, `spew BYTES`; `text` cannot be executed, `leave`
leaves somebody in the background who holds its output, `late` runs out of any time it is given.
A shell runs the program of a line's first word, and knows no other words."""


class FakeExec:
    """One program of `PROGRAMS`."""

    def __init__(self, request: ExecRequest, fed: asyncio.Event) -> None:
        if (name := request.args[0]) not in PROGRAMS:
            raise NotFound(f"{name}: no such program", guest_code="not_found", program=name)
        if request.args[0] == "text":
            raise GuestError("text: Exec format error (os error 8)", guest_code="exec_failed")
        self.request = request
        self.fed = fed
        self.closed = asyncio.Event()
        self._input: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._signal: asyncio.Queue[int] = asyncio.Queue()
        self._size: asyncio.Queue[TtySize] = asyncio.Queue()
        self._takes_input = request.stdin

    async def __aiter__(self) -> AsyncIterator[ExecEvent]:
        yield Started(pid=42)
        name, *rest = self._words()
        if name == "cat":
            while (data := await self._input.get()) is not None:
                yield Stdout(data)
        elif name == "until-ctrl-c":
            seen = b""
            while not seen.endswith(b"\x03"):
                seen += await self._input.get() or b""
            yield Stdout(seen)
        elif name in {"late", "sleep"}:
            async for event in self._until_killed(name):
                yield event
            return
        elif name == "size":
            size = await self._size.get()
            yield Stdout(f"{size.rows}x{size.columns}".encode())
        else:
            for event in self._at_once(name, rest):
                yield event
        code = 0
        if name in {"exit", "sh"}:
            code = int(rest[0] if name == "exit" else rest[-1].split()[-1])
        yield Exited(code, None, timed_out=False, duration_s=0.25, truncated=name == "leave")

    def _words(self) -> list[str]:
        """Return what runs, and its arguments; a shell runs the line it is given."""
        name, *rest = self.request.args
        if name == "/bin/sh" and (words := shlex.split(rest[-1])) and words[0] in PROGRAMS:
            return words
        return [name, *rest]

    async def _until_killed(self, name: str) -> AsyncIterator[ExecEvent]:
        if name == "late":
            yield Stdout(b"so far\n")
            life_s = self.request.timeout_s or 0.0
            yield Exited(None, signal.SIGKILL, timed_out=True, duration_s=life_s)
        else:
            number = await self._signal.get()
            yield Exited(None, number, number == signal.SIGKILL, 0.5)

    def _at_once(self, name: str, rest: list[str]) -> list[ExecEvent]:
        if name == "spew":
            lengths = range(int(rest[0]), 0, -CHUNK)
            return [Stdout(b"x" * min(CHUNK, left)) for left in lengths]
        if name == "env":
            return [Stdout(json.dumps(dict(self.request.env)).encode())]
        if name == "fail":
            return [Stdout(b"out"), Stderr(b"err \xff")]
        return (
            [Stdout(" ".join(rest).encode(errors="surrogateescape") + b"\n")]
            if name == "echo"
            else []
        )

    async def write_stdin(self, data: bytes) -> None:
        if not self._takes_input:
            raise Conflict("this program has no standard input")
        await self._input.put(data)
        self.fed.set()

    async def close_stdin(self) -> None:
        self._takes_input = False
        await self._input.put(None)

    async def send_signal(self, signal: int) -> None:
        await self._signal.put(signal)

    async def resize(self, size: TtySize) -> None:
        if self.request.tty is None:
            raise Conflict("this program has no terminal")
        await self._size.put(size)

    async def aclose(self) -> None:
        self.closed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def evaluate_in(
    contexts: dict[str, dict[str, Any]],
    names: dict[str, Any],
    context: str | None,
    code: str,
    timeout_s: float | None,
) -> EvalResult:
    """Run `code` here, in a context that its first use makes."""
    if context is not None:
        if context not in contexts and len(contexts) >= EVAL_CONTEXTS_MAX:
            raise InvalidRequest(f"there are {EVAL_CONTEXTS_MAX} contexts", field="context")
        return evaluate(code, contexts.setdefault(context, {}), timeout_s)
    module = SimpleNamespace(
        contexts=lambda: [{"id": name, "cwd": "/"} for name in contexts],
        remove_context=lambda name: contexts.pop(name, None) is not None,
    )
    about = "__import__('forkd')"
    if about in code:
        return evaluate(code.replace(about, "module"), {"module": module}, timeout_s)
    return evaluate(code, names, timeout_s)


def evaluate(code: str, names: dict[str, object], timeout_s: float | None) -> EvalResult:
    """Run `code` here; a `timeout_s` below a second runs out at once."""
    stdout, stderr, said = interpreter.run(code, names)
    fault = None if said["error"] is None else EvalFault(**said.pop("error"))
    timed_out = timeout_s is not None and timeout_s < 1
    results = [EvalForms(**each) for each in said.pop("results", ())]
    more = {"error": fault, "timed_out": timed_out, "stdout": stdout, "stderr": stderr}
    return EvalResult(**(said | more), results=results, output_truncated=False)
