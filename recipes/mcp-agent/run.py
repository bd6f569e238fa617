"""An agent whose only tools are those of forkd's MCP server, over standard input and output.

    python recipes/mcp-agent/run.py [SNAPSHOT]

The agent shows its model the tools, and carries out the calls that the model makes.  The model
tries three ideas in branches, and promotes the best.  `ScriptedModel` stands in for a real model.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Generator

from mcp import Client, StdioServerParameters, types

SERVER = StdioServerParameters(
    command=sys.executable, args=["-m", "forkd", "mcp", "serve"], env=dict(os.environ)
)

DATA = """
texts = {"90s": 90, "2m": 120, "1h": 3600, "1h 30m": 5400, "2m 5s": 125}
units = {"s": 1, "m": 60, "h": 3600}
def passed(seconds):
    return sum(attempt(seconds, text) == wanted for text, wanted in texts.items())
def attempt(seconds, text):
    try:
        return seconds(text)
    except ValueError:
        return None
"""

IDEAS = (
    "def seconds(text): return int(text[:-1])",
    "def seconds(text): return int(text[:-1]) * units[text[-1]]",
    "def seconds(text): return sum(int(each[:-1]) * units[each[-1]] for each in text.split())",
)


class ScriptedModel:
    """A model that calls tools as a script says, with what earlier calls have answered."""

    def __init__(self, tools: list[types.Tool]) -> None:
        print("the model is shown", len(tools), "tools:", *sorted(each.name for each in tools)[:3])

    def converse(self, snapshot: str) -> Generator[tuple[str, dict], dict, dict[str, object]]:
        """Yield calls, each of which is sent its answer; return what the agent says at its end."""
        made = yield "spawn_sandboxes", {"snapshot_tag": snapshot}
        if "error" in made:
            return made
        box = made["sandboxes"][0]["id"]
        yield "eval_code", {"sandbox_id": box, "code": DATA}
        branched = yield "branch_sandbox", {"sandbox_id": box, "n": len(IDEAS)}
        scores = {}
        for idea, branch in zip(IDEAS, branched["sandboxes"], strict=True):
            asked = {"sandbox_id": branch["id"], "code": f"{idea}\npassed(seconds)"}
            scores[branch["id"]] = int((yield "eval_code", asked)["result"])
        best = max(scores, key=scores.get)
        yield "promote_sandbox", {"sandbox_id": best}  # takes the source's id; the others end
        kept = yield "eval_code", {"sandbox_id": box, "code": "seconds('1h 2m 3s')"}
        yield "kill_sandbox", {"sandbox_id": box}
        return {"scores": list(scores.values()), "kept": int(kept["result"])}


async def carry_out(client: Client, call: tuple[str, dict]) -> dict:
    """Call a tool; return its answer, or its error, which a model may read and do better."""
    name, arguments = call
    answer = await client.call_tool(name, arguments)
    said = answer.content[0].text if answer.is_error else json.dumps(answer.structured_content)
    print(f"{name}: {said[:60]}")
    return {"error": said} if answer.is_error else answer.structured_content


async def main(snapshot: str = "numpy") -> dict[str, object]:
    """Return how many texts each idea read rightly, and what the agent's sandbox says at last."""
    async with Client(SERVER) as client:
        talk = ScriptedModel((await client.list_tools()).tools).converse(snapshot)
        call = next(talk)
        while True:
            answer = await carry_out(client, call)
            try:
                call = talk.send(answer)
            except StopIteration as ended:
                return ended.value


if __name__ == "__main__":
    print(asyncio.run(main(*sys.argv[1:2])))
