"""Collect the tests of a project, and offer `run` to those who evaluate.

Collecting imports the project, its tests and what both import.  A child finds all of it imported,
so that its first test starts at once.
"""

import os

import pytest

PROJECT = "/srv/project"

OPTIONS = ("-q", "-p", "no:cacheprovider", "--capture=sys")

COLLECTED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


class _Outcomes:
    """A plugin of pytest that notes how each test ended."""

    def __init__(self):
        self.found = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.found[report.nodeid] = report.outcome


def run(*ids):
    """Run tests by id, or all; return how each ended: passed, failed or skipped.

    Raises:
        LookupError: There is no such test, or a module cannot be imported.
    """
    outcomes = _Outcomes()
    ended = pytest.main([*OPTIONS, *ids], plugins=[outcomes])
    if ended not in COLLECTED:
        raise LookupError(f"pytest ended with {ended!r}; its output says why")
    return outcomes.found


os.chdir(PROJECT)
if pytest.main([*OPTIONS, "--collect-only"]) != pytest.ExitCode.OK:
    raise RuntimeError(f"the tests in {PROJECT} cannot be collected")
