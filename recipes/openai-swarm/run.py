"""Agents that hand over to each other, where each handoff is a branch of the sandbox.

    python recipes/openai-swarm/run.py [SNAPSHOT]

An agent of OpenAI's Agents SDK, the successor of Swarm, hands its task over to a specialist.  The
handoff branches the sandbox.  If the specialist's work passes a check, its branch is promoted.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass

import agents
from agents import RunContextWrapper
from openai.types.responses import ResponseFunctionToolCall

from forkd import AsyncSandbox

LOAD = "rows = [('ada', 36), ('ADA', 36), ('alan', 41)]"
CHECK = "sorted(rows) == [('ada', 36), ('alan', 41)]"

SPECIALISTS = {
    "hasty": "rows.clear()",
    "careful": "rows = list({name.lower(): (name.lower(), age) for name, age in rows}.values())",
}


@dataclass
class Desk:
    """What a run works on: the sandbox of the agent whose turn it is."""

    at: AsyncSandbox


class ScriptedModel(agents.Model):
    """A model that calls one tool; a real one goes in its place."""

    def __init__(self, tool: str, **arguments: str) -> None:
        self.tool, self.arguments = tool, json.dumps(arguments)

    async def get_response(self, *_, **__):
        """Return the call."""
        made = {"call_id": self.tool, "name": self.tool, "arguments": self.arguments}
        call = ResponseFunctionToolCall(**made, type="function_call")
        return agents.ModelResponse(output=[call], usage=agents.Usage(), response_id=None)

    stream_response = get_response


@agents.function_tool
async def python(desk: RunContextWrapper[Desk], code: str) -> str:
    """Run Python in the sandbox; its names stay for the next call."""
    return str(await desk.context.at.eval(code))


async def take_over(desk: RunContextWrapper[Desk]) -> None:
    """Give the next agent a branch of the sandbox."""
    (desk.context.at,) = await desk.context.at.branch()


async def hand_over(sandbox: AsyncSandbox, name: str, code: str) -> bool:
    """Have a specialist do the task; return whether its work was good, and was kept."""
    writes = {"tools": [python], "tool_use_behavior": "stop_on_first_tool"}
    specialist = agents.Agent(name, model=ScriptedModel("python", code=code), **writes)
    handoff = agents.handoff(specialist, on_handoff=take_over)
    first = agents.Agent("first", model=ScriptedModel(f"transfer_to_{name}"), handoffs=[handoff])
    desk = Desk(sandbox)
    ended = await agents.Runner.run(first, "Each person once, please.", context=desk)
    good = bool((await desk.at.eval(CHECK, check=True)).value)
    print(ended.last_agent.name, "is done:", "kept" if good else "dropped")
    await (desk.at.promote() if good else desk.at.kill())
    return good


async def main(snapshot: str = "numpy") -> dict[str, object]:
    """Return whose work was kept, and what the sandbox has in the end."""
    agents.set_tracing_disabled(disabled=True)
    async with await AsyncSandbox.create(snapshot) as sandbox:
        await sandbox.eval(LOAD, check=True)
        kept = {name: await hand_over(sandbox, name, code) for name, code in SPECIALISTS.items()}
        return {**kept, "rows": (await sandbox.eval("rows")).value}


if __name__ == "__main__":
    print(asyncio.run(main(*sys.argv[1:2])))
