"""The page about setting up a host has every setting that the doctor looks at, and its value."""

from __future__ import annotations

import pytest

from forkd.host.tuning import SETTINGS, Setting
from tests.support.docs import ROOT

ROWS = [
    line
    for line in (ROOT / "docs/howto/set-up-a-host.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each.short_name)
def test_each_setting_is_on_the_page_with_what_is_advised(setting: Setting) -> None:
    (row,) = [line for line in ROWS if f"`{setting.name}`" in line.split("|")[1]]

    assert f"`{setting.wanted}`" in row.split("|")[2]
