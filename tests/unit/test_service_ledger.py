"""What tenants have: how many forks there were within a minute."""

from __future__ import annotations

import asyncio

import pytest

from forkd.errors import QuotaExceeded
from forkd.model.caller import Tenant
from forkd.model.tenant import Amounts, Quotas
from forkd.service.ledger import FORKS_WINDOW_S, Ledger

ONE = Amounts(forks_per_minute=1)
TEAM = Tenant("team")


async def test_a_fork_counts_for_a_minute_and_not_for_much_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, ledger = 1_000.5, Ledger()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    ledger.quotas[TEAM] = Quotas(forks_per_minute=3)
    for _ in range(3):
        with ledger.reserve(TEAM, ONE):
            now_s += 0.4

    now_s = 1_000.5 + FORKS_WINDOW_S - 0.1
    with pytest.raises(QuotaExceeded):
        ledger.check(TEAM, ONE)
    now_s = 1_002 + FORKS_WINDOW_S
    ledger.check(TEAM, Amounts(forks_per_minute=3))


async def test_forks_of_a_day_are_not_kept_though_nobody_has_a_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, ledger = 0.0, Ledger()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)

    for _ in range(3_000):
        with ledger.reserve(TEAM, ONE):
            now_s += 0.5

    assert ledger.used(TEAM).forks_per_minute <= 2 * (FORKS_WINDOW_S + 1)
    assert ledger.kept() <= FORKS_WINDOW_S + 2
