"""One call of a tool: the daemon that it asks, and the client that waits for it."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr

from forkd.sdk import AsyncSandbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from forkd.sdk import AsyncClient
    from forkd.wire.v2 import ProgressEvent

A = TypeVar("A", bound="Arguments")
R = TypeVar("R", bound="Result")


PICTURES = (
    (b"\x89PNG\r\n\x1a\n", 0, "image/png"),
    (b"\xff\xd8\xff", 0, "image/jpeg"),
    (b"GIF8", 0, "image/gif"),
    (b"WEBP", 8, "image/webp"),
)
"""Pictures that clients show: a mark, where it is, and what they are."""


class Arguments(BaseModel):
    """What a tool takes: frozen, strict, without members that we do not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture, for the client to show and for the model to see.

    Attributes:
        data: Its bytes.
        media_type: What they are.
    """

    data: bytes
    media_type: str


def picture_type(data: bytes) -> str | None:
    """Return what kind of picture begins with `data`; None if none does."""
    kinds = (kind for mark, at, kind in PICTURES if data[at : at + len(mark)] == mark)
    return next(kinds, None)


class Result(BaseModel):
    """What a tool answers."""

    model_config = ConfigDict(frozen=True)

    _pictures: tuple[Picture, ...] = PrivateAttr(default=())

    def with_pictures(self, *pictures: Picture) -> Self:
        """Have pictures shown beside it."""
        self._pictures = pictures
        return self

    @property
    def pictures_shown(self) -> tuple[Picture, ...]:
        """What is shown beside it."""
        return self._pictures


class Report(Protocol):
    """Tells the client how far a call has come."""

    async def __call__(
        self, progress: float, total: float | None = None, message: str | None = None
    ) -> None:
        """Tell it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool.

    Attributes:
        client: The daemon that it asks.
        report: Tells the client how far it has come; nothing if the client does not ask for that.
    """

    client: AsyncClient
    report: Report

    async def sandbox(self, sandbox_id: str) -> AsyncSandbox:
        """Return the sandbox of an id, the beginning of an id, or a name.

        Raises:
            NotFound: There is none.
        """
        return await AsyncSandbox.connect(sandbox_id, client=self.client)

    @asynccontextmanager
    async def steps(self) -> AsyncIterator[Callable[[ProgressEvent], object]]:
        """Pass the steps of a long operation on to the client, in order, inside of a block."""
        waiting: asyncio.Queue[ProgressEvent | None] = asyncio.Queue()

        async def tell() -> None:
            told = 0
            while (step := await waiting.get()) is not None:
                told += 1
                await self.report(told, None, step.message)

        telling = asyncio.create_task(tell())
        try:
            yield waiting.put_nowait
            waiting.put_nowait(None)
            await telling
        finally:
            telling.cancel()


@dataclass(frozen=True, slots=True)
class Tool(Generic[A, R]):
    """A tool, as clients see it, and what it does.

    Attributes:
        name: What clients call.
        title: What people read.
        description: What a model reads when it chooses a tool.
        arguments: What it takes.
        result: What it answers.
        run: What it does.
        reads: It changes nothing.
        destroys: It may end or replace something that cannot be had back.
        repeatable: A second call with the same arguments changes nothing more.
    """

    name: str
    title: str
    description: str
    arguments: type[A]
    result: type[R]
    run: Callable[[Call, A], Awaitable[R]]
    reads: bool
    destroys: bool
    repeatable: bool


class Toolbox:
    """Tools by their names, in the order in which they were added."""

    def __init__(self) -> None:
        self.tools: dict[str, Tool[Any, Any]] = {}

    def tool(
        self,
        arguments: type[A],
        result: type[R],
        *,
        reads: bool = False,
        destroys: bool = False,
        repeatable: bool = False,
    ) -> Callable[[Callable[[Call, A], Awaitable[R]]], Callable[[Call, A], Awaitable[R]]]:
        """Register a function as a tool: its name is the tool's, its docstring the description."""

        def register(
            run: Callable[[Call, A], Awaitable[R]],
        ) -> Callable[[Call, A], Awaitable[R]]:
            name = run.__name__
            self.tools[name] = Tool(
                name=name,
                title=name.replace("_", " ").capitalize(),
                description=inspect.cleandoc(run.__doc__ or ""),
                arguments=arguments,
                result=result,
                run=run,
                reads=reads,
                destroys=destroys,
                repeatable=reads or repeatable,
            )
            return run

        return register
