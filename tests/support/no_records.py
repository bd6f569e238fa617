"""Records that remember nothing, for components that a test wants whole without a database."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Any, cast

from forkd.service.tokens import Tokens
from forkd.store.history import Found
from forkd.store.schema import MIGRATIONS
from forkd.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forkd.service.records import Records
    from forkd.store.database import Database


class NoRecords:
    """Takes what is to be written down, and has nothing to say."""

    async def read(self, _: Callable[[Database], object]) -> Found:
        """Have nothing to say."""
        return Found((), None)

    async def ask(self, _: Callable[[Database], object]) -> int:
        """Do nothing."""
        return 0


class RecordsInMemory(NoRecords):
    """Remembers what is written down, in a database that ends with this object."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False
        )
        self._connection.row_factory = sqlite3.Row
        self._connection.executescript("".join(MIGRATIONS))

    async def ask(self, what: Callable[[Database], object]) -> Any:  # noqa: ANN401 - as `what` says
        """Return what a function of `forkd.store` finds."""
        return what(cast("Database", self))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Give what a database gives."""
        with self._connection:
            yield self._connection


def records_in_memory() -> Records:
    """Return records that remember what they are told."""
    return cast("Records", RecordsInMemory())


def no_records() -> Records:
    """Return records that remember nothing."""
    return cast("Records", NoRecords())


def no_tokens() -> Tokens:
    """Return the tokens of a daemon that only knows the one in its file."""
    return Tokens(Telemetry(), no_records())
