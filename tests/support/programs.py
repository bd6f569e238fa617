"""Run a program to its end beside an event loop, which may serve what the program asks."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


async def outcome_of(
    *words: object,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run a program without input; return its exit status and what it says on both outputs.

    It is killed if it is not done in time, or if the caller is cancelled.

    Args:
        words: Its command line.
        timeout_s: How long it may take.
        cwd: Where it runs; None for here.
        env: Its environment; None for ours.

    Raises:
        TimeoutError: It was not done in time.
    """
    process = await asyncio.create_subprocess_exec(
        *map(str, words),
        cwd=cwd,
        env=env,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, said.decode(errors="replace")


async def said_by(
    *words: object,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a program as `outcome_of` does; return what it says.

    Raises:
        AssertionError: It failed; has what it says.
        TimeoutError: It was not done in time.
    """
    status, said = await outcome_of(*words, timeout_s=timeout_s, cwd=cwd, env=env)
    assert status == 0, said
    return said
