"""The command line of a run on Intel, and the job that it makes."""

from __future__ import annotations

import argparse

import pytest

from tests.intel import run


def test_a_deadline_is_a_number_of_minutes() -> None:
    assert run.minutes("90") == 90
    for wrong in ("", "0", "-3", "1.5", "soon", "²"):
        with pytest.raises(argparse.ArgumentTypeError, match="no number of minutes"):
            run.minutes(wrong)


def test_the_job_passes_on_what_a_machine_gets_and_the_arguments() -> None:
    lines = run.script(["-k", "a b"], {"FORKD_X": "it's", "SECRET": "no"}).splitlines()

    assert "export FORKD_X='it'\"'\"'s'" in lines
    assert "SECRET" not in "".join(lines)
    assert lines[-1].startswith("exec ")
    assert lines[-1].endswith("-k 'a b'")
    assert "--strict-needs" in lines[-1]
