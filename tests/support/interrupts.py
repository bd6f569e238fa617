"""Programs that tests start can be interrupted, however the tests themselves were started."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Undo what a shell does to what it runs in the background: SIGINT ignored, and inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
