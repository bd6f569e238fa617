"""Which tests may change the host, and which need something of a list."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from tests.support import needs

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize(
    ("stated", "changes"),
    [((), False), (("binaries",), False), (("root",), True), (("binaries", "node"), True)],
)
def test_who_needs_something_of_the_host_may_change_it(
    stated: tuple[str, ...], *, changes: bool
) -> None:
    assert needs.changes_host(item_needing(*stated)) is changes


def test_tests_are_selected_by_any_need_of_a_list() -> None:
    neither, one, other = [item_needing(*each) for each in ((), ("kvm", "root"), ("cgroup2",))]
    left_out: list[pytest.Item] = []
    options = {"--needing": needs.needs("kvm,io")}

    def deselected(items: list[pytest.Item]) -> None:
        left_out.extend(items)

    hook = SimpleNamespace(pytest_deselected=deselected)
    config = cast("pytest.Config", SimpleNamespace(getoption=options.get, hook=hook))
    items = [neither, one, other]

    needs.pytest_collection_modifyitems(config, items)

    assert items == [one]
    assert {id(each) for each in left_out} == {id(neither), id(other)}


def test_a_need_that_no_test_can_have_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^no such need: cloud, kvmm$"):
        needs.needs("kvmm,root,cloud")


class _Item:
    def __init__(self, stated: tuple[str, ...]) -> None:
        self._stated = stated

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        assert name == "needs"
        yield pytest.mark.needs(*self._stated).mark


def item_needing(*stated: str) -> pytest.Item:
    return cast("pytest.Item", _Item(stated))
