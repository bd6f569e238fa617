"""What forks save a program: the agents in `recipes/`, each run once over a daemon.

Such a program forks a sandbox and branches it.  Without forks, each of its sandboxes would be a
cold start of the recipe that it runs on.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Json, Stopwatch
from forkd.daemon.app import create_app
from forkd.daemon.server import listening
from forkd.daemon.settings import Settings
from forkd.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forkd.model.ids import Tag
    from forkd.service.host import Host
    from forkd.service.settings import HostSettings

ROOT = Path(__file__).resolve().parent.parent

BASE = "python-numpy"
"""The recipe that all of them run on."""

PACKAGES = ROOT / "build" / "frameworks"
"""Where the tests of recipes have installed the packages of frameworks, a folder for each."""

LAST_WORDS_CHARS = 2_000
"""How much is shown of what a program that failed has said."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program of a recipe.

    Attributes:
        sandboxes: How many it forks and branches.
        end: How its last line begins.
    """

    sandboxes: int
    end: str


PROGRAMS: Mapping[str, Program] = {
    "coding-agent-fork": Program(4, "+    return '-'.join(title.lower().split())"),
    "mcp-agent": Program(4, "{'scores': [1, 3, 5], 'kept': 3723}"),
    "speculative-agent": Program(6, "[('nearest town first', "),
    "autogen-branch": Program(4, "{'as it is': 1699, 'zlib': 58, 'numbers': 250, 'kept': 58}"),
    "crewai-fanout": Program(4, "{'total': '32', 'best': \"'east'\", 'north': '12', 'rows': '5'}"),
    "langgraph-react": Program(4, "{'constant': 435.0, 'linear': 168.0, 'square': 0.0, "),
    "openai-swarm": Program(3, "{'hasty': False, 'careful': True, 'rows': "),
}
"""Of each program that is measured."""


def is_ready(name: str) -> bool:
    """Tell whether a program needs no packages, or has them."""
    wants = (ROOT / "recipes" / name / "requirements.txt").exists()
    return not wants or (PACKAGES / name / "requirements.txt").exists()


async def run(settings: HostSettings, host: Host, tag: Tag, name: str) -> float:
    """Run a program over a daemon on `host`; return how many seconds it took.

    Raises:
        EngineError: It failed, or ended with other words.
    """
    socket = Settings(socket=settings.run_dir / "forkd.sock")
    async with listening(create_app(host), socket, host.tokens) as (url,):
        path = os.pathsep.join(map(str, (PACKAGES / name, ROOT / "src")))
        clock = Stopwatch()
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ROOT / "recipes" / name / "run.py"), str(tag)),
            env=os.environ | {"FORKD_URL": url, "PYTHONPATH": path},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said = (await program.communicate())[0].decode(errors="replace")
        taken_s = clock.ms() / 1e3
    check(name, said, program.returncode)
    return taken_s


def check(name: str, said: str, status: int | None) -> None:
    """Return if a program has said at its end what it should.

    Raises:
        EngineError: It has not.
    """
    last = said.splitlines()[-1] if said.strip() else ""
    if status != 0 or not last.startswith(PROGRAMS[name].end):
        raise EngineError(f"{name} ended with {status}: {said[-LAST_WORDS_CHARS:]}")


def of_program(name: str, cold_s: float, taken_s: float) -> Json:
    """Return the figures of a program.

    Args:
        name: Its recipe.
        cold_s: How long a cold start of `BASE` took in the same run.
        taken_s: How long the program took, with forks.
    """
    sandboxes = PROGRAMS[name].sandboxes
    without_s = taken_s + sandboxes * cold_s
    return {
        "sandboxes": sandboxes,
        "program_s": taken_s,
        "cold_s": cold_s,
        "without_s": without_s,
        "ratio": without_s / taken_s,
    }
