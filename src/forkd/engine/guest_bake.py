"""What the agent does while a machine is baked: its defaults, the warm-up, and making it small."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forkd.engine.channel import deadline
from forkd.engine.frames import Kind
from forkd.engine.guest import GRACE_S, PYTHON, answer
from forkd.engine.replies import Warmed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from forkd.engine.guest import Guest
    from forkd.model.json import JsonObject

QUIESCE_TIMEOUT_S = 300.0
"""How long a guest may take to write its disk, drop its caches and compact its memory.

Where processors are emulated, one with four of them and 4 GiB once took more than two minutes.
"""


@dataclass(frozen=True, slots=True)
class GuestDefaults:
    """What later operations of an agent begin with.

    Attributes:
        env: Environment of programs.
        cwd: Their working directory; None for the agent's own.
        user: Their user, a name or `uid[:gid]`; None for root.
        post_fork: Code that the runtime runs after each fork; empty for none.
        post_fork_command: A program that is run after each fork; empty for none.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    post_fork: str = ""
    post_fork_command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WarmUpPlan:
    """How a guest is warmed up.

    Attributes:
        runtime: The warm runtime's name; None for none.
        code: What it evaluates first.
        ready: A program that is repeated until it exits with 0; None for none.
        timeout_s: The agent gives up after this time.
    """

    runtime: str | None
    code: str
    ready: tuple[str, ...] | None
    timeout_s: float


async def configure(guest: Guest, defaults: GuestDefaults) -> None:
    """Set the defaults of later operations; raises as `Guest.ask`."""
    members: JsonObject = {
        "env": dict(defaults.env),
        "cwd": defaults.cwd,
        "user": defaults.user,
        "post_fork": defaults.post_fork or None,
        "post_fork_command": list(defaults.post_fork_command) or None,
    }
    await guest.ask("configure", members)


async def warm(guest: Guest, plan: WarmUpPlan, on_output: Callable[[bytes], None]) -> float:
    """Warm the machine up; return how long it took, in seconds.

    Args:
        guest: Its agent.
        plan: How.
        on_output: Called with what the warm-up prints, as it comes.

    Raises:
        WarmUpError: It failed, or was not ready in time.
        EngineTimeout: The agent did not keep its deadline.
        ForkdError: As `Guest.ask`.
    """
    members: JsonObject = {
        **_runtime(plan),
        "ready": None if plan.ready is None else {"command": list(plan.ready)},
        "timeout_s": plan.timeout_s,
    }
    async with (
        deadline(plan.timeout_s + GRACE_S, "the agent did not finish the warm-up"),
        guest.operation("warm", members) as channel,
    ):
        while (frame := await channel.receive()).kind in {Kind.STDOUT, Kind.STDERR}:
            on_output(frame.payload)
        return Warmed.read(answer(frame), "warm").duration_s


def _runtime(plan: WarmUpPlan) -> JsonObject:
    if plan.runtime == PYTHON:
        return {"python": {"code": plan.code}}  # which agents of all ages know
    return {"runtime": plan.runtime and {"name": plan.runtime, "code": plan.code}}


async def quiesce(guest: Guest) -> None:
    """Have the guest made cheap to fork: caches dropped, memory compacted; as `Guest.ask`."""
    await guest.ask("quiesce", timeout_s=QUIESCE_TIMEOUT_S)
