"""Which tests may change the host."""

from __future__ import annotations

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
    def iter_markers(name: str) -> Iterator[pytest.Mark]:
        assert name == "needs"
        yield pytest.mark.needs(*stated).mark

    item = cast("pytest.Item", SimpleNamespace(iter_markers=iter_markers))

    assert needs.changes_host(item) is changes
