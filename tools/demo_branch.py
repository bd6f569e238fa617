"""`make demo-branch`: branch a machine that is thinking into five, and keep the best of them.

    python -m tools.demo_branch [--keep]

A process in one sandbox plans a tour through sixty cities, a thought at a time.  In the middle of
it the sandbox is branched into five; each sibling is told to go on in another way, and does, with
what the process had in its memory and in its files.  The tree is drawn, and the sibling with the
shortest tour takes its parent's place.

It ends with status 0 only if every sibling shares the thoughts before the branch and no others,
the parent has noticed nothing, and the promoted one is found under its parent's id.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from forkd import AsyncClient
from forkd.cli import trees
from forkd.errors import EngineError
from tools.demo import TAG, ask_all, console, running_forkd, snapshot, status_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkd import AsyncSandbox

THINKER = Path(__file__).parent / "guest" / "thinker.py"
HOME = "/var/lib/thinker"

WAYS = tuple({"heat": heat, "seed": 1, "steps": 3_000} for heat in (0.0, 0.01, 0.03, 0.1, 0.3))
"""How each of the five goes on: the hotter, the further it strays before it settles."""

THOUGHTS_BEFORE = 5
"""How far the process is, at least, when it is branched: well before its last city."""

WAIT_S = 300.0
"""How long a step of the process may take where machines are emulated."""


@dataclass(frozen=True, slots=True)
class Story:
    """What a sibling says about itself.

    Attributes:
        result: What its process reported.
        thoughts: What it has written down, line by line.
    """

    result: dict[str, Any]
    thoughts: list[str]


def complaints(before: Sequence[str], stories: Sequence[Story], after: Sequence[str]) -> list[str]:
    """Return what is wrong; nothing, if each sibling went its own way from one instant on.

    Args:
        before: What the parent had written down a moment before it was branched.
        stories: One of each sibling.
        after: What the parent has written down in the end.
    """
    found = []
    shared = [story.thoughts[:-1] for story in stories]
    if any(thoughts[: len(before)] != list(before) for thoughts in shared):
        found.append("a sibling has forgotten what its parent had written down")
    if len({tuple(thoughts) for thoughts in shared}) != 1:
        found.append("siblings disagree on the thoughts up to the last")
    found += [
        f"siblings do not share the {name} of the process that was branched"
        for name in ("secret", "pid")
        if len({story.result[name] for story in stories}) != 1
    ]
    if len({story.result["chain"] for story in stories}) != len(stories):
        found.append("two siblings ended with the same thoughts")
    for story in stories:
        said = [int(line.split()[0]) for line in story.thoughts]
        if said != list(range(1, story.result["thoughts"] + 1)):
            found.append("a sibling's thoughts are not in order")
        if story.result["visited"] != story.result["cities"]:
            found.append("a sibling has lost a city")
    if any("improved" in line for line in after):
        found.append("the parent was told a way that was a sibling's")
    return found


def main() -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="make demo-branch", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--keep", action="store_true", help="leave the winner and daemon running")
    options = parser.parse_args()

    def run() -> int:
        with running_forkd(keep=options.keep):
            return asyncio.run(with_client(keep=options.keep))

    return status_of(run)


async def with_client(*, keep: bool) -> int:
    """Have the snapshot and a sandbox of it, and run the demo in that."""
    async with AsyncClient() as client:
        await snapshot(client)
        (parent,) = await client.fork(TAG)
        try:
            wrong = await demo(client, parent)
        finally:
            if not keep:
                await end_tree(client, parent.id)
    for complaint in wrong:
        console.print(complaint, style="bold red", markup=False)
    return 1 if wrong else 0


async def demo(client: AsyncClient, parent: AsyncSandbox) -> list[str]:
    """Think, branch, go on, draw, promote; return what was wrong."""
    await begin(parent)
    before = await thoughts_of(parent)
    branch = await parent.try_branch(len(WAYS))
    if branch.failures:
        raise EngineError(f"a sibling did not become ready: {branch.failures[0].error}")
    siblings = branch.sandboxes
    console.print(
        f"branched after {len(before)} thoughts into {len(siblings)}; the parent was paused "
        f"{branch.pause_ms:.1f} ms"
    )
    await ask_all(siblings, "telling each its way", tell)
    stories = await ask_all(siblings, "waiting for each", listen)
    wrong = complaints(before, stories, await thoughts_of(parent))
    show(siblings, stories)
    trees.show(await client.tree(parent.id))
    best = min(range(len(stories)), key=lambda index: stories[index].result["length"])
    return wrong + await promote(client, parent, siblings[best], stories[best])


async def begin(parent: AsyncSandbox) -> None:
    """Start the process, and return when it is in the middle of its thoughts."""
    await parent.files.write(f"{HOME}/thinker.py", THINKER.read_bytes(), make_parents=True)
    start = f"cd {HOME} && setsid -f python3 thinker.py {HOME} </dev/null >out.log 2>&1"
    await shell(parent, start)
    lines = f"$(cat {HOME}/thoughts.log 2>/dev/null | wc -l)"
    await shell(parent, f"until [ {lines} -ge {THOUGHTS_BEFORE} ]; do sleep 0.05; done")


async def tell(sibling: AsyncSandbox, index: int) -> None:
    """Tell a sibling's process how to go on."""
    await sibling.files.write(f"{HOME}/way.json", json.dumps(WAYS[index]).encode())


async def listen(sibling: AsyncSandbox, _: int) -> Story:
    """Wait until a sibling's process is done, and return what it says."""
    await shell(sibling, f"until [ -e {HOME}/result.json ]; do sleep 0.05; done")
    result = json.loads(await sibling.files.read(f"{HOME}/result.json"))
    return Story(result, await thoughts_of(sibling))


async def thoughts_of(sandbox: AsyncSandbox) -> list[str]:
    """Return what a process has written down, without a line that it is writing."""
    text = (await sandbox.files.read(f"{HOME}/thoughts.log")).decode()
    return text.split("\n")[:-1]


async def promote(
    client: AsyncClient, parent: AsyncSandbox, winner: AsyncSandbox, story: Story
) -> list[str]:
    """Let the winner take its parent's place; return what was wrong."""
    place, was = parent.id, winner.id
    ended = await winner.promote()
    console.print(f"{was} is {place} now; {len(ended)} ended")
    found = await client.sandboxes.get(place)
    kept = await listen(found, 0)
    name = (await shell(found, "hostname")).strip()
    wrong = []
    if kept != story:
        wrong.append("the promoted sandbox is not the one that won")
    if name != place:
        wrong.append(f"the promoted sandbox calls itself {name}, not {place}")
    if len((await client.tree(place)).roots[0].children) != 0:
        wrong.append("a loser is still there")
    trees.show(await client.tree(place))
    return wrong


async def shell(sandbox: AsyncSandbox, command: str) -> str:
    """Run a command in a shell; return what it printed.

    Raises:
        EngineError: It failed.
    """
    done = await sandbox.exec(["sh", "-c", command], timeout_s=WAIT_S)
    if done.exit_code != 0:
        raise EngineError(f"{shlex.quote(command)} ended with {done.exit_code}: {done.stderr}")
    return done.stdout


async def end_tree(client: AsyncClient, member: str) -> None:
    """End a sandbox and everybody that was branched from it."""
    tree = await client.tree(member)
    waiting = list(tree.roots)
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children)
        if node.sandbox is not None:
            await (await client.sandboxes.get(node.id)).kill()


def show(siblings: Sequence[AsyncSandbox], stories: Sequence[Story]) -> None:
    """Print what became of each sibling."""
    table = Table(title="five ways to go on", title_justify="left")
    for name in ("sibling", "heat", "tour", "thoughts", "last thought"):
        table.add_column(name, no_wrap=True)
    for sibling, story in zip(siblings, stories, strict=True):
        table.add_row(
            f"{sibling.id[:9]}…",
            f"{story.result['way']['heat']:.2f}",
            f"{story.result['length']:.4f}",
            str(story.result["thoughts"]),
            story.thoughts[-1].split(" ", 2)[2],
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
