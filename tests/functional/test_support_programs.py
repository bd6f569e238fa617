"""Programs that tests run say what they print, and none is left running."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.programs import outcome_of, said_by


async def test_a_program_has_no_input_and_both_outputs_are_heard(tmp_path: Path) -> None:
    line = "cat; pwd; echo $WORD >&2; printf '\\377'; exit 3"
    words = ("sh", "-c", line)

    status, said = await outcome_of(*words, timeout_s=30, cwd=tmp_path, env={"WORD": "said"})

    assert (status, said) == (3, f"{tmp_path}\nsaid\n\ufffd")


async def test_what_a_program_says_is_in_the_error_if_it_fails() -> None:
    assert await said_by("echo", 6 * 7, timeout_s=30) == "42\n"
    with pytest.raises(AssertionError, match="why"):
        await said_by("sh", "-c", "echo why; exit 1", timeout_s=30)


async def test_a_program_that_is_late_is_killed() -> None:
    before = children()
    with pytest.raises(TimeoutError):
        await said_by("sleep", 60, timeout_s=0)
    assert children() == before


def children() -> str:
    """Return the processes that this thread has started and that have not ended."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()
