"""When a sandbox is forked that is made by calling its class, by hand in both flavours.

`Sandbox(…)` has forked one when it returns.  A constructor cannot wait, so `AsyncSandbox(…)` forks
when it is entered by `async with`, or awaited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Self

from forkd.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

_MADE = {"info", "files", "network", "commands", "_http", "_path"}
"""What a sandbox has once it is forked."""


class AsyncOpening:
    """What begins when it is entered or awaited."""

    _start: Callable[[], Awaitable[None]] | None = None

    def _begin(self, start: Callable[[], Awaitable[None]]) -> None:
        self._start = start

    async def _opened(self) -> Self:
        start, self._start = self._start, None
        if start is not None:
            await start()
        return self

    def __await__(self) -> Generator[object, None, Self]:
        return self._opened().__await__()

    if not TYPE_CHECKING:  # else a misspelt attribute would pass

        def __getattr__(self, name: str) -> NoReturn:
            if name in _MADE:
                raise InvalidRequest(
                    "this sandbox has not been forked: use `async with AsyncSandbox(…) as sandbox` "
                    "or `sandbox = await AsyncSandbox.create(…)`"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class Opening:
    """What begins at once."""

    def _begin(self, start: Callable[[], None]) -> None:
        start()

    def _opened(self) -> Self:
        return self
