"""Whether the agent of a machine that runs is still there."""

from __future__ import annotations

import asyncio
import contextlib
from enum import StrEnum
from typing import TYPE_CHECKING

from forkd.engine.guest import Guest
from forkd.errors import EngineExited, ForkdError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

AGENT_GRACE_S = 5.0
"""How long an agent may refuse every connection before it counts as gone."""

AGENT_RETRY_S = 0.25
"""How long between two attempts to reach it."""

AGENT_QUEUE_MIN = 64
"""Fewer operations than the queue of any agent has places: none is refused for a full queue."""

CHECK_TIMEOUT_S = 10.0
"""How long a look at an agent may take."""


class AgentState(StrEnum):
    """How an agent is.

    A silent one is slow, or that of a guest that halted; one that is gone refuses every connection.
    """

    ANSWERS = "answers"
    SILENT = "silent"
    GONE = "gone"


async def state_of_agent(vsock: Path, can_tell: Callable[[], bool]) -> AgentState:
    """Return how the agent behind a machine's socket is.

    Args:
        vsock: The socket.
        can_tell: Whether a refused connection says anything; asked before each attempt.
    """
    agent = Guest(vsock, connect_timeout_s=AGENT_GRACE_S)
    loop = asyncio.get_running_loop()
    until = loop.time() + AGENT_GRACE_S
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            while can_tell():
                with contextlib.suppress(EngineExited):
                    await agent.ping()
                    return AgentState.ANSWERS
                if loop.time() > until:
                    return AgentState.GONE
                await asyncio.sleep(AGENT_RETRY_S)
    except (TimeoutError, ForkdError):
        return AgentState.SILENT
    finally:
        agent.close()
    return AgentState.SILENT
