"""Fixtures of pytest that are sandboxes.

    from forkd.testing import prepared

    @prepared
    def database(sandbox):
        sandbox.run("load-the-schema", check=True)

    def test_a_new_user(database):
        database.run("add-a-user", check=True)

`database` is prepared once in a session of pytest; each test gets a branch of it.  The guide is
docs/howto/test-with-forks.md.  `forkd.testing.plugin` is what pytest loads by itself.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, overload

import pytest

from forkd.errors import Conflict, EngineExited, InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forkd.sdk import Sandbox

    Prepare = Callable[[Sandbox], object]

__all__ = ["prepared"]

TTL_S = 3_600.0
"""How long a sandbox lives if pytest is killed, and so the longest that a test may take."""


class States:
    """The sandboxes that were prepared in this session, each by a function."""

    def __init__(self) -> None:
        self._kept: dict[Prepare, Sandbox | BaseException] = {}

    def branch(self, prepare: Prepare, make: Callable[[], Sandbox]) -> Sandbox:
        """Return a branch of a state, which is prepared the first time, or if it has ended."""
        found = self._kept.get(prepare)
        if isinstance(found, BaseException):
            raise found
        if found is not None:
            try:
                found.set_ttl(TTL_S)
                return found.branch(1, ttl_s=TTL_S)[0]
            except (NotFound, Conflict, EngineExited):
                found.kill()
        return self._prepared(prepare, make).branch(1, ttl_s=TTL_S)[0]

    def _prepared(self, prepare: Prepare, make: Callable[[], Sandbox]) -> Sandbox:
        try:
            made = make()
            try:
                prepare(made)
            except BaseException:
                made.kill()
                raise
        except Exception as error:
            self._kept[prepare] = error  # once is enough
            raise
        self._kept[prepare] = made
        return made

    def end(self) -> None:
        """End all of them."""
        for each in self._kept.values():
            if not isinstance(each, BaseException):
                each.kill()
        self._kept.clear()


@overload
def prepared(function: Prepare, /) -> Any: ...  # noqa: ANN401 - a fixture


@overload
def prepared(
    *,
    tag: str | None = None,
    **options: Any,  # noqa: ANN401 - of `Sandbox`
) -> Callable[[Prepare], Any]: ...


def prepared(
    function: Prepare | None = None,
    /,
    *,
    tag: str | None = None,
    **options: Any,
) -> Any:
    """Make a fixture of a function that prepares a sandbox, its one argument.

    The function runs once in a session, for the first test that wants the fixture.  Each test gets
    a branch of the sandbox as it was then, which is removed after the test.

    Args:
        function: What prepares the sandbox; the fixture has its name.
        tag: The snapshot to fork; without one, that of the fixture `sandbox`.
        options: Other options of `Sandbox`.

    Raises:
        InvalidRequest: The function does not take one argument.
    """

    def fixture(prepare: Prepare) -> Any:  # noqa: ANN401 - a fixture
        name = getattr(prepare, "__name__", "")
        if len(inspect.signature(prepare).parameters) != 1:
            raise InvalidRequest(f"{name}: a prepared state takes one argument, the sandbox")

        @pytest.fixture(name=name)
        def branch(pytestconfig: pytest.Config, forkd_states: States) -> Iterator[Sandbox]:
            with forkd_states.branch(
                prepare, lambda: forked(pytestconfig, tag, **options)
            ) as sandbox:
                yield sandbox

        return branch

    return fixture if function is None else fixture(function)


def forked(config: pytest.Config, tag: str | None = None, **options: Any) -> Sandbox:  # noqa: ANN401 - of `Sandbox`
    """Return a fork of a snapshot: the one given, else that of the command line or the settings."""
    from forkd.sdk import Sandbox  # noqa: PLC0415 - takes long, and most sessions have none

    named = tag or config.getoption("forkd_tag") or config.getini("forkd_tag") or None
    if "image" in options:
        named = tag
    return Sandbox(named, **{"ttl_s": TTL_S, **options})
