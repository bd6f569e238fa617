"""A crew of CrewAI whose agents work at the same time, each in a branch of one sandbox.

    python recipes/crewai-fanout/run.py [SNAPSHOT]

The data is loaded once.  Then the sandbox branches, and each agent of the crew has a branch as its
tool: it may change all it likes without disturbing the others.  A script stands in for the model.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import Agent, BaseLLM, Crew, Task
from crewai.tools import BaseTool

from forkd import Sandbox

LOAD = "sold = [('north', 7), ('south', 3), ('north', 5), ('east', 9), ('south', 8)]"

QUESTIONS = {
    "total": "sum(amount for _, amount in sold)",
    "best": "sold.sort(key=lambda each: each[1]); sold[-1][0]",
    "north": "sold = [a for place, a in sold if place == 'north']\nsum(sold)",
}
"""What each agent finds out; two of them change the data that they look at."""


class ScriptedLLM(BaseLLM):
    """A model that calls its tool with code, and answers with what the tool has said."""

    code: str

    def call(self, messages: list[dict[str, str]], *_: object, **__: object) -> str:
        """Return a call of the tool, or the answer if the tool was called."""
        own = "".join(each["content"] for each in messages if each["role"] == "assistant")
        if "Observation:" in own:
            answer = own.rpartition("Observation:")[2].strip().splitlines()[0]
            return f"Thought: I know it.\nFinal Answer: {answer}"
        arguments = json.dumps({"code": self.code})
        return f"Thought: I compute it.\nAction: python\nAction Input: {arguments}"

    def supports_function_calling(self) -> bool:
        """Say that it writes its calls as text."""
        return False


class PythonTool(BaseTool):
    """Python in a sandbox."""

    name: str = "python"
    description: str = "Run Python code; its names stay for the next call."
    sandbox: object

    def _run(self, code: str) -> str:
        return str(self.sandbox.eval(code, check=True))


def task(name: str, code: str, branch: Sandbox) -> Task:
    """Return the task of one agent, which has one branch as its tool."""
    llm = ScriptedLLM(model="scripted", code=code)
    about = {"role": name, "goal": f"Find out: {name}", "backstory": "You compute."}
    agent = Agent(**about, llm=llm, tools=[PythonTool(sandbox=branch)])
    wanted = {"description": f"Find out: {name}", "expected_output": "A value"}
    return Task(**wanted, agent=agent, async_execution=True)


def main(snapshot: str = "numpy") -> dict[str, str]:
    """Return what each agent has found out, and how many rows the source still has."""
    with Sandbox(snapshot) as source:
        source.eval(LOAD, check=True)
        with source.branch(len(QUESTIONS)) as branches:
            tasks = list(map(task, QUESTIONS, QUESTIONS.values(), branches))
            tasks[-1].async_execution = False  # a crew waits for its last task
            ended = Crew(agents=[each.agent for each in tasks], tasks=tasks).kickoff()
        found = {name: each.raw for name, each in zip(QUESTIONS, ended.tasks_output, strict=True)}
        return {**found, "rows": str(source.eval("len(sold)", check=True))}


if __name__ == "__main__":
    print(main(*sys.argv[1:2]))
