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


WORKERS_DEFAULT = 4
"""Sandboxes that run tests at the same time, unless the command line says otherwise."""

WORKERS_MAX = 200
"""Most of them: what an executor may have."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    words = "snapshot that the fixture `sandbox` forks; without one, FORKD_TAG, else pyagent"
    group = parser.getgroup("forkd", "sandboxes of forkd")
    group.addoption("--forkd", metavar="TAG", help="run the tests in forks of a snapshot")
    group.addoption(
        "--forkd-workers",
        metavar="N",
        type=int,
        default=WORKERS_DEFAULT,
        help="with --forkd: how many forks run tests at the same time (default: %(default)s)",
    )
    group.addoption(
        "--forkd-fresh",
        action="store_true",
        help="with --forkd: run each test in a fork of its own",
    )
    group.addoption(
        "--forkd-path",
        metavar="PATH",
        help="with --forkd: the snapshot has the project in this folder; without it, the project "
        "is copied",
    )
    group.addoption(
        "--forkd-with",
        metavar="NAME",
        action="append",
        default=[],
        help="with --forkd: also send an installed distribution in pure Python, and what it needs",
    )
    group.addoption("--forkd-tag", metavar="TAG", help=words)
    parser.addini("forkd_tag", words, default="")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse what cannot be done in forks."""
    if config.getoption("forkd") is None:
        return
    for option, name in (("usepdb", "--pdb"), ("trace", "--trace"), ("tx", "-n")):
        if config.getoption(option, None):
            raise pytest.UsageError(f"{name} and --forkd exclude each other")
    workers = config.getoption("forkd_workers")
    if not 1 <= workers <= WORKERS_MAX:
        raise pytest.UsageError(f"--forkd-workers: is from 1 to {WORKERS_MAX}, not {workers}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forks, if asked to."""
    config = session.config
    tag = config.getoption("forkd")
    if tag is None or config.option.collectonly:
        return None
    if session.testsfailed and not config.option.continue_on_collection_errors:
        return None  # pytest's own loop says so
    from forkd.testing._forks import goes_away, run  # noqa: PLC0415 - see above

    away = [each for each in session.items if goes_away(each)]
    if not away:
        return None  # nor does pytest's own loop need a sandbox
    run(session, away, tag)
    return True


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
