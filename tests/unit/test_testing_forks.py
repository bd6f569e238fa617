"""Which pytest a sandbox needs for `pytest --forkd`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from forkd.errors import Conflict
from forkd.testing import _forks, plugin


def here(code: str) -> SimpleNamespace:
    """Evaluate code in this process, as a sandbox with our packages does."""
    return SimpleNamespace(value=eval(code))  # noqa: S307 - the plugin's own


SANDBOX: Any = SimpleNamespace(tag="old", eval=here)


def test_the_pytest_of_a_snapshot_is_used_if_it_is_ours() -> None:
    assert _forks.has_our_pytest(SANDBOX)


def test_a_sandbox_is_not_told_of_our_plugin_and_our_options() -> None:
    given = {
        "forkd": "tag",
        "forkd_fresh": True,
        "plugins": ["x", plugin.__name__],
        "tbstyle": "no",
    }
    config: Any = SimpleNamespace(option=SimpleNamespace(**given, file=sys.stdout))

    assert _forks.options_of(config) == {"plugins": ["x"], "tbstyle": "no"}


def test_a_snapshot_without_pytest_is_sent_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pytest")
    monkeypatch.setattr(_forks, "_INSTALLED", "None")  # as of an expression that raises

    assert not _forks.has_our_pytest(SANDBOX)


def test_a_snapshot_that_has_imported_another_pytest_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pytest", SimpleNamespace(__version__="7.2.1"))

    with pytest.raises(Conflict, match=r"snapshot old has imported pytest 7\.2\.1, and this is"):
        _forks.has_our_pytest(SANDBOX)
