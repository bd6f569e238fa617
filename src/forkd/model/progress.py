"""How far a long operation has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of a long operation.

    Attributes:
        stage: Name of the step, stable enough to match on: `kernel`, `rootfs`, `boot`, ...
        fraction: How much of this stage is done, 0.0 to 1.0; None if nobody knows.
        message: One sentence for a person.
    """

    stage: str
    fraction: float | None
    message: str
