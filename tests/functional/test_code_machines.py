"""Evaluated code in real machines: what it shows and writes, its contexts, and idle sandboxes.

The contract tests ask the runtime alone, and the SDK's tests a fake of it.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest

from forkd import AsyncClient
from tests.support.real_daemon import daemon_of
from tests.support.real_host import EVAL_TIMEOUT_S, FORK_DEADLINE_S, REAL_IN_SOAK, TAG

if TYPE_CHECKING:
    from forkd import AsyncSandbox
    from forkd.types import EvalError, OutputMessage, Result
    from tests.support.real_host import RealHost

pytestmark = [*REAL_IN_SOAK, pytest.mark.timeout(300)]

GO = "/tmp/go-on"

WAITS = f"""
import os, sys, time
print("working on", os.environ["JOB"])
while not os.path.exists("{GO}"):
    time.sleep(0.05)
print("done", file=sys.stderr)
os.environ["JOB"]
"""
"""Code that ends only once a file is there."""

SHOWS = """
class Chart:
    def _repr_html_(self):
        return "<b>chart</b>"

    def _repr_png_(self):
        return b"\\x89PNG of numpy " + numpy.arange(3).tobytes()

display(Chart())
Chart()
"""

IDLE_TTL_S = 2


async def test_code_shows_and_tells_and_has_contexts(real_host: RealHost) -> None:
    async with daemon_of(real_host) as url, AsyncClient(url) as client:
        sandbox = await client.sandbox(TAG, deadline_s=FORK_DEADLINE_S)
        await results_come(sandbox)
        await output_comes_while_the_code_runs(sandbox)
        await contexts_are_apart_and_branched(sandbox)


async def results_come(sandbox: AsyncSandbox) -> None:
    """Forms of what was displayed, and of the value."""
    shown: list[Result] = []
    execution = await sandbox.run_code(SHOWS, timeout=EVAL_TIMEOUT_S, on_result=shown.append)

    assert execution.error is None, execution.error.traceback
    assert shown == execution.results
    assert [(each.html, each.is_main_result) for each in shown] == [
        ("<b>chart</b>", False),
        ("<b>chart</b>", True),
    ]
    assert base64.b64decode(shown[1].png or "").startswith(b"\x89PNG of numpy \0")


async def output_comes_while_the_code_runs(sandbox: AsyncSandbox) -> None:
    """The code goes on only once somebody has heard of its first line."""
    said: list[OutputMessage] = []
    errors: list[EvalError] = []

    async def heard(message: OutputMessage) -> None:
        said.append(message)
        await sandbox.files.write(GO, b"")

    execution = await sandbox.run_code(
        WAITS,
        envs={"JOB": "numbers"},
        timeout=EVAL_TIMEOUT_S,
        on_stdout=heard,
        on_stderr=said.append,
    )
    assert [(each.line, each.error) for each in said] == [
        ("working on numbers\n", False),
        ("done\n", True),
    ]
    assert (execution.text, execution.stderr) == ("'numbers'", "done\n")

    await sandbox.run_code(WAITS, timeout=EVAL_TIMEOUT_S, on_error=errors.append)
    assert [each.name for each in errors] == ["KeyError"]


async def contexts_are_apart_and_branched(sandbox: AsyncSandbox) -> None:
    """A sibling has the contexts of its source."""
    context = await sandbox.create_code_context(cwd="/usr")
    await sandbox.run_code("x = 'there'", context=context)
    await sandbox.eval("x = 'here'", check=True)

    async with await sandbox.branch(1, deadline_s=FORK_DEADLINE_S) as (sibling,):
        code = "import os; [x, os.getcwd()]"
        assert (await sibling.eval(code, context=context)).value == ["there", "/usr"]
        assert (await sibling.eval("x")).value == "here"
        assert await sibling.remove_code_context(context)
    assert [each.id for each in await sandbox.list_code_contexts()] == [context.id]


async def test_a_sandbox_that_nobody_uses_ends_and_one_in_use_does_not(
    real_host: RealHost,
) -> None:
    async with daemon_of(real_host) as url, AsyncClient(url) as client:
        sandbox = await client.sandbox(TAG, idle_ttl_s=IDLE_TTL_S, deadline_s=FORK_DEADLINE_S)

        done = await sandbox.run(f"sleep {2 * IDLE_TTL_S}; echo used")

        assert done.stdout == "used\n"
        assert await sandbox.wait(timeout_s=EVAL_TIMEOUT_S) == "idle"
