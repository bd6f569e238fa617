"""Says on standard output how far a run has come: one JSON object per line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.harness import Json

REPEATED_MAX = 3
"""Most rounds of one run that are thrown away because a child did not live through them.

An emulated processor ends one guest in some thousands, the floor's included, without a reason.
`rounds_repeated` says how many it were, so that a build that ends guests by itself shows.
"""


@dataclass(slots=True)
class Teller:
    """Says how far the run has come; the number of steps is known before the first."""

    steps: int
    done: int = 0
    repeated: int = 0

    def begin(self, message: str) -> None:
        """Say that the next step begins."""
        say({"event": "progress", "fraction": self.done / self.steps, "message": message})
        self.done += 1

    async def patiently(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do a round, and do it again if a child ended in it, `REPEATED_MAX` times in all.

        Raises:
            EngineError: It happened once more.
        """
        while True:
            try:
                return await work()
            except EngineError as error:
                if self.repeated == REPEATED_MAX:
                    raise
                self.repeated += 1
                say({"event": "progress", "message": f"again, for {error}"})


def say(event: Json) -> None:
    """Write one event."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()
