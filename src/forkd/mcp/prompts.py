"""Prompts for the commonest jobs, which clients offer as commands."""

from __future__ import annotations

from dataclasses import dataclass

from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    GetPromptResult,
    Prompt,
    PromptArgument,
    PromptMessage,
    TextContent,
)

ARGUMENT_CHARS_MAX = 64 * 1024
"""Longest argument of a prompt."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A prompt, and the text that is made of it.

    Attributes:
        listed: As clients see it.
        text: What the model is told, with a place for each argument.
        defaults: Of arguments that need not be given.
    """

    listed: Prompt
    text: str
    defaults: dict[str, str]


def _prompt(name: str, description: str, arguments: dict[str, str], text: str) -> Filled:
    """Return a prompt; of an argument's description, what follows `default:` is its default."""
    defaults = {
        key: said.partition("default: ")[2].rstrip(".")
        for key, said in arguments.items()
        if "default: " in said
    }
    listed = Prompt(
        name=name,
        title=name.replace("_", " ").capitalize(),
        description=description,
        arguments=[
            PromptArgument(name=key, description=said, required=key not in defaults)
            for key, said in arguments.items()
        ],
    )
    return Filled(listed, text, defaults)


PROMPTS: dict[str, Filled] = {
    each.listed.name: each
    for each in (
        _prompt(
            "run_in_sandbox",
            "Do a job in a fresh sandbox, so that nothing of it touches this computer.",
            {
                "job": "What is to be done.",
                "snapshot": "The snapshot to use; default: the one that fits best.",
            },
            """\
Do this job in a forkd sandbox, and nowhere else: {job}

1. list_snapshots; choose this snapshot: {snapshot}. If there is none, spawn from an image.
2. spawn_sandboxes with one sandbox. Give it a network only if the job needs one, and then only the
   destinations that it needs.
3. Use write_file, exec_command and eval_code in it. Check each exit code before you go on.
4. Show me the result: print it, or read_file what the job has made.
5. kill_sandbox.
""",
        ),
        _prompt(
            "try_several_ways",
            "Solve a problem in several ways at once, each in a branch of one sandbox; keep the "
            "best.",
            {
                "problem": "What is to be solved.",
                "sandbox_id": "The sandbox that has the state to begin from.",
                "check": "The command or the code that says how good a result is.",
                "n": "How many ways; default: 3.",
            },
            """\
Solve this problem in the forkd sandbox {sandbox_id}, in {n} different ways: {problem}

1. Think of {n} ways that differ in more than a detail.
2. branch_sandbox {sandbox_id} with n={n}: each branch has all files, processes and variables.
3. Try one way in each branch, and then run this check in each: {check}
4. Compare the results; diff_sandboxes shows what each branch has changed.
5. promote_sandbox the best branch: it takes the place of {sandbox_id}, and the others end. If none
   passes the check, kill the branches and tell me what was missing.
""",
        ),
        _prompt(
            "prepare_environment",
            "Set up an environment once, and store it as a snapshot from which sandboxes start in "
            "milliseconds.",
            {
                "image": "A container image, such as python:3.12-slim, or a recipe.",
                "setup": "What is to be installed, loaded and started.",
                "tag": "The name of the snapshot.",
            },
            """\
Prepare a forkd snapshot named {tag}, from {image}, in which this is done already: {setup}

1. spawn_sandboxes with image={image}, and with the network rules that the setup needs.
2. Do the setup with exec_command; load what is slow to load with eval_code, so that it stays in the
   warm interpreter. Wait for services with wait_for_text.
3. Check that it works.
4. branch_sandbox with tag={tag}: that stores the state, running programs included.
5. spawn_sandboxes from {tag}, check once more in the new sandbox, and kill both.
""",
        ),
    )
}
"""Prompts by their names."""


def filled(name: str, given: dict[str, str]) -> GetPromptResult:
    """Return a prompt with its arguments in their places.

    Raises:
        MCPError: There is no such prompt, or the arguments are not its own.
    """
    prompt = PROMPTS.get(name)
    if prompt is None:
        raise MCPError(INVALID_PARAMS, f"Unknown prompt: {name[:200]}")
    known = [each.name for each in prompt.listed.arguments or ()]
    values = {**prompt.defaults, **given}
    missing = [each for each in known if each not in values]
    strange = [each for each in given if each not in known]
    if missing or strange:
        said = f"is without {', '.join(missing)}" if missing else f"has no {strange[0][:200]}"
        raise MCPError(INVALID_PARAMS, f"{name} {said}; it takes {', '.join(known)}")
    long = [each for each, value in given.items() if len(value) > ARGUMENT_CHARS_MAX]
    if long:
        raise MCPError(
            INVALID_PARAMS, f"{name}: {long[0]} is longer than {ARGUMENT_CHARS_MAX} characters"
        )
    text = prompt.text.format_map(values)
    return GetPromptResult(
        description=prompt.listed.description,
        messages=[PromptMessage(role="user", content=TextContent(text=text))],
    )
