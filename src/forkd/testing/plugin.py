"""The plugin that pytest loads: options, and fixtures that are sandboxes.

It is loaded by each run of pytest in an environment that has forkd, so that it imports nothing but
pytest before a test asks for something of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.sdk import Sandbox
    from forkd.testing import States


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    words = "snapshot that the fixture `sandbox` forks; without one, FORKD_TAG, else pyagent"
    group = parser.getgroup("forkd", "sandboxes of forkd")
    group.addoption("--forkd-tag", metavar="TAG", help=words)
    parser.addini("forkd_tag", words, default="")


@pytest.fixture
def sandbox(pytestconfig: pytest.Config) -> Iterator[Sandbox]:
    """Give the test a sandbox of its own: a fork of the snapshot that `--forkd-tag` names."""
    from forkd.testing import forked  # noqa: PLC0415 - see above

    with forked(pytestconfig) as made:
        yield made


@pytest.fixture(scope="session")
def forkd_states() -> Iterator[States]:
    """Keep the states that `forkd.testing.prepared` makes in this session."""
    from forkd.testing import States  # noqa: PLC0415 - see above

    states = States()
    yield states
    states.end()
