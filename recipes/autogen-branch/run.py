"""An AutoGen team whose code runs in a sandbox: an executor that can branch.

    python recipes/autogen-branch/run.py [SNAPSHOT]

One team prepares the data; then the executor branches, and a team on each branch solves the task in
its own way.  The best branch is promoted.  Replayed answers stand in for the model.
"""

from __future__ import annotations

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent, CodeExecutorAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.code_executor import CodeExecutor, CodeResult
from autogen_ext.models.replay import ReplayChatCompletionClient

from forkd import AsyncSandbox

PREPARE = "words = ('fork branch reset promote sandbox ' * 50).split()\nprint(len(words), 'words')"

COUNT = "print(len(coded))"

CODINGS = {
    "as it is": f"coded = ' '.join(words).encode()\n{COUNT}",
    "zlib": f"import zlib\ncoded = zlib.compress(' '.join(words).encode())\n{COUNT}",
    "numbers": f"known = sorted(set(words))\ncoded = bytes(map(known.index, words))\n{COUNT}",
}


class ForkdExecutor(CodeExecutor):
    """Runs code blocks in the warm interpreter of a sandbox, whose names stay between them."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self.sandbox = sandbox

    async def execute_code_blocks(self, code_blocks, cancellation_token):  # noqa: ARG002 - its names
        """Run blocks as one cell; return what they printed, and how they failed."""
        result = await self.sandbox.eval("\n".join(block.code for block in code_blocks))
        failed = f"{result.error.type}: {result.error.message}" if result.error else ""
        return CodeResult(int(bool(failed)), result.stdout + failed)

    async def branch(self, n: int) -> list[ForkdExecutor]:
        """Return executors that have all that this one has now."""
        return [ForkdExecutor(each) for each in await self.sandbox.branch(n)]

    async def start(self) -> None:
        """Do nothing: the sandbox runs."""

    async def restart(self) -> None:
        """Go back to how the sandbox was when it was forked."""
        await self.sandbox.reset()

    stop = start


async def solve(executor: CodeExecutor, code: str) -> str:
    """Have a team write and run code; return what the code printed."""
    model = ReplayChatCompletionClient([f"```python\n{code}\n```"])
    members = [AssistantAgent("writer", model), CodeExecutorAgent("runner", executor)]
    ended = await RoundRobinGroupChat(members, max_turns=2).run(task="Code the words briefly.")
    return ended.messages[-1].to_text()


async def main(snapshot: str = "numpy") -> dict[str, int]:
    """Return how long each coding is, and the one that the sandbox keeps."""
    async with await AsyncSandbox.create(snapshot) as sandbox:
        executor = ForkdExecutor(sandbox)
        print(await solve(executor, PREPARE))
        branches = await executor.branch(len(CODINGS))
        printed = await asyncio.gather(*map(solve, branches, CODINGS.values()))
        lengths = dict(zip(CODINGS, map(int, printed), strict=True))
        best = list(lengths).index(min(lengths, key=lengths.get))
        await branches[best].sandbox.promote()  # takes the sandbox's id; the others end
        return {**lengths, "kept": int(await solve(executor, COUNT))}


if __name__ == "__main__":
    print(asyncio.run(main(*sys.argv[1:2])))
