"""What surrounds every use case: who may ask for it, and that it is counted and timed.

    @use_case("fork", Scope.RUN)
    async def fork(self, caller: Caller, tag: Tag, ...) -> ForkResult: ...

The decorator is the only place where a scope is asked for, unless an argument decides.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine

    from forkd.model.caller import Caller, Scope
    from forkd.telemetry.telemetry import Telemetry

DECLARED = "__use_case__"
"""Where a decorated method has its `UseCase`."""


class Component(Protocol):
    """What has use cases."""

    @property
    def telemetry(self) -> Telemetry:
        """Where they are counted."""
        ...


@dataclass(frozen=True, slots=True)
class UseCase:
    """What was declared of one.

    Attributes:
        name: Of the operation, in metrics and traces.
        scopes: All of which the caller must have.
    """

    name: str
    scopes: tuple[Scope, ...]

    def check(self, caller: Caller) -> None:
        """Return if a caller may ask for it.

        Raises:
            Forbidden: It lacks a scope.
        """
        for scope in self.scopes:
            caller.require(scope)


C = TypeVar("C", bound=Component)
P = ParamSpec("P")
T = TypeVar("T")


def use_case(
    name: str, *scopes: Scope
) -> Callable[
    [Callable[Concatenate[C, Caller, P], Awaitable[T]]],
    Callable[Concatenate[C, Caller, P], Coroutine[object, object, T]],
]:
    """Declare a use case that returns once."""
    declared = UseCase(name, scopes)

    def decorate(
        method: Callable[Concatenate[C, Caller, P], Awaitable[T]],
    ) -> Callable[Concatenate[C, Caller, P], Coroutine[object, object, T]]:
        async def checked(self: C, caller: Caller, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with self.telemetry.operation(name):
                declared.check(caller)
                return await method(self, caller, *args, **kwargs)

        functools.update_wrapper(checked, method)
        setattr(checked, DECLARED, declared)
        return checked

    return decorate


def streaming_use_case(
    name: str, *scopes: Scope
) -> Callable[
    [Callable[Concatenate[C, Caller, P], AsyncGenerator[T, None]]],
    Callable[Concatenate[C, Caller, P], AsyncGenerator[T, None]],
]:
    """Declare a use case that yields what it has as it comes."""
    declared = UseCase(name, scopes)

    def decorate(
        method: Callable[Concatenate[C, Caller, P], AsyncGenerator[T, None]],
    ) -> Callable[Concatenate[C, Caller, P], AsyncGenerator[T, None]]:
        async def checked(
            self: C, caller: Caller, /, *args: P.args, **kwargs: P.kwargs
        ) -> AsyncGenerator[T, None]:
            with self.telemetry.operation(name):
                declared.check(caller)
                async with contextlib.aclosing(method(self, caller, *args, **kwargs)) as items:
                    async for item in items:
                        yield item

        functools.update_wrapper(checked, method)
        setattr(checked, DECLARED, declared)
        return checked

    return decorate
