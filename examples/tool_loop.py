"""Give a language model a Python tool, and run what it writes in a sandbox.

`ScriptedModel` stands in for a real model: replace `ask` with a call of your provider's API.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forkd import ExecTimeout, Sandbox


@dataclass
class ScriptedModel:
    """A model that answers from a script: code to run, or text at the end."""

    script: list[str]
    seen: list[str] = field(default_factory=list)

    def ask(self, message: str) -> str:
        """Return the next answer."""
        self.seen.append(message)
        return self.script[len(self.seen) - 1]


def run_tool(sandbox: Sandbox, code: str) -> str:
    """Run code in the sandbox's warm interpreter; return what the model should see."""
    try:
        result = sandbox.eval(code, timeout_s=30)
    except ExecTimeout:
        return "The code ran for more than 30 seconds and was interrupted."
    if result.error is not None:
        return f"{result.error.type}: {result.error.message}"
    return f"{result.stdout}{result.repr or ''}"


def main() -> str:
    """Ask until the model answers with text, and return its text."""
    model = ScriptedModel(
        [
            "CODE numbers = [3, 1, 2]",
            "CODE sorted(numbers)[-1] / 0",
            "CODE sorted(numbers)[-1]",
            "The largest number is 3.",
        ]
    )
    with Sandbox("numpy") as sandbox:
        answer = model.ask("Which is the largest of 3, 1 and 2? Answer CODE … to run Python.")
        while answer.startswith("CODE "):
            answer = model.ask(run_tool(sandbox, answer.removeprefix("CODE ")))
    print("\n".join(model.seen[1:]))
    return answer


if __name__ == "__main__":
    print(main())
