"""Records that remember nothing, for components that a test wants whole without a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from forkd.service.tokens import Tokens
from forkd.store.history import Found
from forkd.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable

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


def no_records() -> Records:
    """Return records that remember nothing."""
    return cast("Records", NoRecords())


def no_tokens() -> Tokens:
    """Return the tokens of a daemon that only knows the one in its file."""
    return Tokens(Telemetry(), no_records())
