"""What a guest's agent says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RuntimeStatus(StrEnum):
    """The warm runtime's state, in the agent's words."""

    NONE = "none"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class GuestStatus:
    """The answer to a ping.

    Attributes:
        version: The agent's version.
        pid: The agent's process id in the guest.
        uptime_s: Since the guest booted, by its own clock.
        runtime: The warm runtime's state.
    """

    version: str
    pid: int
    uptime_s: float
    runtime: RuntimeStatus
