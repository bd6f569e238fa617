"""What counts as left behind."""

from __future__ import annotations

from tests.support.leaks import Inventory, leaked


def test_only_what_is_new_is_a_leak() -> None:
    before = Inventory(mounts=frozenset({"/", "/old"}), files=frozenset({"/tmp/forkd-a"}))
    after = Inventory(mounts=frozenset({"/", "/new"}), files=frozenset({"/tmp/forkd-a"}))

    assert leaked(before, after) == ["mounts: /new"]


def test_every_kind_is_compared() -> None:
    full = Inventory(*(frozenset({"it"}) for _ in range(8)))

    assert len(leaked(Inventory(), full)) == 8
