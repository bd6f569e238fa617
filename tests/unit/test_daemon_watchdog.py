"""How often a service manager wants to be told that the daemon's event loop turns."""

from __future__ import annotations

import pytest

from forkd.daemon.watchdog import interval_s


@pytest.mark.parametrize(
    ("variables", "wanted_s"),
    [
        ({"WATCHDOG_USEC": "60000000"}, 20),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7"}, 1),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "often"}, None),
        ({}, None),
    ],
)
def test_the_manager_says_how_often(variables: dict[str, str], wanted_s: float | None) -> None:
    assert interval_s(variables, 7) == wanted_s
