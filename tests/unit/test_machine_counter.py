"""How fast the time-stamp counter runs."""

from __future__ import annotations

import mmap

import pytest

from forkd.machine.counter import counter_khz


def test_two_measurements_agree() -> None:
    first, second = counter_khz(), counter_khz()

    assert first is not None
    assert second == pytest.approx(first, rel=0.001)
    assert 500_000 < first < 10_000_000


def test_where_no_code_may_be_made_it_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(mmap, "mmap", refuse)

    assert counter_khz() is None
