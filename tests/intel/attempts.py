"""Count how often children had to be forked, and fail a run in which one was forked again.

    pytest -p tests.intel.attempts …

A child whose guest is reset before it answers is forked again under QEMU alone, whose emulation
resets one in some thousands.  Anywhere else a reset is a fault.  Counted are the forks that the
process of pytest asks for, where most tests run the service; those of a daemon are not.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from forkd.engine.control import Control
from forkd.engine.replies import ChildReady

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forkd.engine.configs import ChildConfig
    from forkd.engine.replies import ChildFailed


class Attempts:
    """Notes the attempts of each child that became ready."""

    def __init__(self) -> None:
        self.counted: Counter[int] = Counter()

    def note(self, outcome: ChildReady | ChildFailed) -> None:
        """Count an outcome of a fork; tests make children fail on purpose."""
        if isinstance(outcome, ChildReady):
            self.counted[outcome.attempts] += 1

    def story(self) -> str:
        """Say what was counted."""
        parts = [f"{self.counted[often]} with {often}" for often in sorted(self.counted)]
        return f"attempts of {self.counted.total()} children: {', '.join(parts) or 'none'}"

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print it."""
        terminalreporter.write_line(self.story())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that is otherwise well if a child was forked more than once."""
        if set(self.counted) - {1} and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_configure(config: pytest.Config) -> None:
    attempts = Attempts()
    config.pluginmanager.register(attempts)
    asked = Control.fork

    async def fork(
        self: Control,
        children: Sequence[ChildConfig],
        *,
        deadline_s: float,
        on_outcome: Callable[[ChildReady | ChildFailed], None],
        users: str | None = None,
    ) -> None:
        def noted(outcome: ChildReady | ChildFailed) -> None:
            attempts.note(outcome)
            on_outcome(outcome)

        await asked(self, children, deadline_s=deadline_s, on_outcome=noted, users=users)

    Control.fork = fork  # type: ignore[method-assign]
    config.add_cleanup(lambda: setattr(Control, "fork", asked))
