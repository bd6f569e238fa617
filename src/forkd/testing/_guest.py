"""Hold a session of pytest in a guest, and run its tests when asked.

`forkd.testing._forks` sends the source of this module to a sandbox, where it is the module
`_forkd_pytest`.  The session is collected once, before the sandbox is branched, so that each branch
begins with every module of the tests imported.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.config import get_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ERRORS_CHARS_MAX = 8_000
"""How much is told of what could not be collected."""


class Held:
    """A session that has been collected.

    Args:
        options: Options of pytest, by name.
        args: What to collect: files, folders, ids of tests.
        folder: Where pytest was called.
    """

    def __init__(self, options: Mapping[str, Any], args: Sequence[str], folder: str) -> None:
        os.chdir(folder)
        self._reports: list[Any] = []
        self._errors: list[str] = []
        with contextlib.redirect_stdout(io.StringIO()):  # the terminal's: it is not ours
            config = get_config(list(args))
            config.pluginmanager.register(self, "forkd-guest")
            config.option.__dict__.update(options)
            config.parse(list(args), addopts=False)
            for each in options.get("plugins", ()):
                if not each.startswith("no:"):
                    config.pluginmanager.import_plugin(each)
            config._do_configure()  # noqa: SLF001 - as pytest's own loop does
            self._config = config
            self._session = pytest.Session.from_config(config)
            config.hook.pytest_sessionstart(session=self._session)
            config.hook.pytest_collection(session=self._session)
        if self._errors:
            raise RuntimeError("\n".join(self._errors)[:ERRORS_CHARS_MAX])
        self._items = {each.nodeid: each for each in self._session.items}

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        """Know the settings of the plugin, which may not be here."""
        with contextlib.suppress(ValueError):
            parser.addini("forkd_tag", "not used here", default="")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what cannot be collected."""
        if report.failed:
            self._errors.append(f"{report.nodeid}: {report.longreprtext}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a part of a test ended."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(json.loads(json.dumps(data, default=str)))

    def run(self, ids: Sequence[str]) -> list[list[Any] | None]:
        """Run tests; return the reports of each, None for one that is not there."""
        present = [self._items[each] for each in ids if each in self._items]
        following = dict(zip(present, [*present[1:], self._other(present)], strict=True))
        found: dict[str, list[Any]] = {}
        with contextlib.redirect_stdout(sys.stdout):  # which is put back, whatever a test did
            if present:
                self._session._setupstate.teardown_exact(present[0])  # noqa: SLF001 - as pytest does
            for item, after in following.items():
                self._reports = found[item.nodeid] = []
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        return [found.get(each) for each in ids]

    def _other(self, items: Sequence[pytest.Item]) -> pytest.Item | None:
        """Return a test of another module, so that only what is the session's stays set up."""
        last = items[-1].path if items else None
        return next((each for each in self._session.items if each.path != last), None)
