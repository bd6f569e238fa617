"""What guests are asked, and how long the answers take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.harness import Json, Stopwatch, median, summary
from forkd.engine.guest_exec import GuestExec
from forkd.errors import EngineError
from forkd.model.exec import ExecRequest, Exited

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from forkd.engine.guest import Guest

CODE = "numpy.zeros(5).tolist()"
"""What every child must be able to say."""

EVAL_TIMEOUT_S = 600.0
"""How long one answer may take, while a thousand others are being asked."""

WARM_UP = 10
"""Round trips that nobody counts: the first ones touch pages and open the connection."""

ROUNDS = 200
"""Counted round trips of each kind; a quarter of them for programs, which cost more."""


async def numpy(guest: Guest) -> None:
    """Have the warm runtime compute something, and see that it is right.

    Raises:
        EngineError: It is not.
    """
    result = await guest.eval(CODE, EVAL_TIMEOUT_S)
    if result.value != [0.0] * 5:
        raise EngineError(f"a child answered {result.repr!r} ({result.error})")


async def nothing(guest: Guest) -> None:
    """Have the warm runtime evaluate as little as there is."""
    await guest.eval("None", EVAL_TIMEOUT_S)


async def echo(guest: Guest) -> None:
    """Have the agent answer, and do nothing else."""
    await guest.echo("x")


async def program(guest: Guest) -> None:
    """Run the least program there is, to its end.

    Raises:
        EngineError: It failed.
    """
    async with await GuestExec.start(guest, ExecRequest(("/bin/true",))) as running:
        async for event in running:
            if isinstance(event, Exited) and event.exit_code != 0:
                raise EngineError(f"/bin/true ended with {event.exit_code}")


async def round_trips(guest: Guest, rounds: int = ROUNDS) -> Json:
    """Measure round trips over a connection that is kept; the kinds take turns."""
    kinds = {"vsock_echo": echo, "eval": numpy, "eval_nothing": nothing}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(WARM_UP + rounds):
        for name, ask in kinds.items():
            times[name].append(await _timed(ask, guest))
    times["exec"] = [await _timed(program, guest) for _ in range(2 + rounds // 4)][2:]
    figures = {
        name: summary(taken if name == "exec" else taken[WARM_UP:]) for name, taken in times.items()
    }
    echo_ms = median(times["vsock_echo"][WARM_UP:])
    for name in ("eval", "eval_nothing"):
        figures[name]["ratio_to_echo"] = figures[name]["p50_ms"] / echo_ms
    return figures


async def _timed(ask: Callable[[Guest], Awaitable[object]], guest: Guest) -> float:
    clock = Stopwatch()
    await ask(guest)
    return clock.ms()
