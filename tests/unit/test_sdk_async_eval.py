"""Evaluated code tells what it writes as it comes, and has variables of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd import AsyncClient, AsyncSandbox
from forkd.errors import Conflict, ExecTimeout, InvalidRequest
from forkd.limits import EVAL_OUTPUT_BYTES_MAX
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.types import EvalError, OutputMessage, Result
    from tests.support.daemon import RunningDaemon

BOTH = "import sys\nprint('one')\nprint('two')\nprint('bad', file=sys.stderr)\n6 * 7"

VARIABLE = "import os; os.environ.get('FORKD_OF_A_CELL')"


@pytest.fixture
async def sandbox(daemon: RunningDaemon) -> AsyncIterator[AsyncSandbox]:
    daemon.service.stored = some_snapshots("warm")
    async with AsyncClient(daemon.url) as client:
        yield await client.sandbox("warm")


async def test_output_is_told_while_the_code_runs(
    daemon: RunningDaemon, sandbox: AsyncSandbox
) -> None:
    """The code goes on only once its first line was told."""
    pieces: list[str] = []

    async def take(piece: str) -> None:
        pieces.append(piece)
        daemon.loop.call_soon_threadsafe(daemon.service.eval_goes_on.set)

    daemon.service.eval_goes_on.clear()
    result = await sandbox.eval(BOTH, on_stdout=take)

    assert pieces == ["one\n", "two\n"]
    assert (result.stdout, result.stderr, result.value) == ("one\ntwo\n", "bad\n", 42)
    assert not result.truncated


async def test_what_fails_in_a_callback_interrupts_the_code(
    daemon: RunningDaemon, sandbox: AsyncSandbox
) -> None:
    def fail(piece: str) -> None:
        raise ValueError(piece)

    daemon.service.eval_goes_on.clear()
    with pytest.raises(ValueError, match="one"):
        await sandbox.eval(BOTH, on_stdout=fail)

    daemon.wait_for(lambda: daemon.service.eval_left)


async def test_callbacks_of_run_code_are_those_of_e2b(sandbox: AsyncSandbox) -> None:
    said: list[OutputMessage] = []
    results: list[Result] = []
    errors: list[EvalError] = []

    execution = await sandbox.run_code(
        BOTH,
        on_stdout=said.append,
        on_stderr=said.append,
        on_result=results.append,
        on_error=errors.append,
    )

    assert [(each.line, each.error) for each in said] == [
        ("one\n", False),
        ("two\n", False),
        ("bad\n", True),
    ]
    assert str(said[0]) == "one\n"
    assert said[0].timestamp > 1_700_000_000 * 10**9
    assert results == execution.results
    assert (results[0].text, results[0].is_main_result, errors) == ("42", True, [])

    failed = await sandbox.run_code("1 / 0", on_result=results.append, on_error=errors.append)
    assert (failed.error, len(results)) == (errors[0], 1)
    assert errors[0].name == "ZeroDivisionError"


async def test_a_timeout_is_raised_once_everything_was_told(sandbox: AsyncSandbox) -> None:
    said: list[str] = []
    results: list[Result] = []
    errors: list[EvalError] = []

    with pytest.raises(ExecTimeout) as caught:
        await sandbox.run_code(
            "print('so far')\n1",
            timeout=0.5,
            on_stdout=lambda message: said.append(message.line),
            on_result=results.append,
            on_error=errors.append,
        )

    assert caught.value.result.stdout == "so far\n"
    assert (said, [each.text for each in results], errors) == (["so far\n"], ["1"], [])


async def test_variables_hold_for_one_evaluation(sandbox: AsyncSandbox) -> None:
    mine = {"FORKD_OF_A_CELL": "mine"}

    assert (await sandbox.eval(VARIABLE, env=mine)).value == "mine"
    assert (await sandbox.run_code(VARIABLE, envs=mine)).text == "'mine'"
    told = await sandbox.run_code(VARIABLE, envs=mine, on_stdout=print)
    assert told.text == "'mine'"
    assert (await sandbox.eval(VARIABLE)).value is None


async def test_what_is_refused_is_raised_with_callbacks_too(sandbox: AsyncSandbox) -> None:
    with pytest.raises(Conflict, match="there is no runtime 'node'"):
        await sandbox.eval("1", runtime="node", on_stdout=print)
    with pytest.raises(InvalidRequest, match="context"):
        await sandbox.eval("1", context="No", on_stdout=print)


async def test_all_output_is_told_and_its_beginning_kept(sandbox: AsyncSandbox) -> None:
    line, told = 100_000, 0

    def count(piece: str) -> None:
        nonlocal told
        told += len(piece)

    result = await sandbox.eval(f"for _ in range(12): print('x' * {line - 1})", on_stdout=count)

    assert told == 12 * line
    assert (len(result.stdout), result.truncated) == (EVAL_OUTPUT_BYTES_MAX, True)
