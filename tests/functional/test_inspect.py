"""Inspect AI takes our sandboxes for its own: its published self-check passes."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.docs import ROOT
from tests.support.programs import said_by
from tests.support.real_daemon import daemon_of
from tests.support.real_host import REAL, TAG

if TYPE_CHECKING:
    from tests.support.real_host import RealHost

pytestmark = [
    REAL, pytest.mark.needs("inspect"), pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]  # fmt: skip

CLIENT = ROOT / "build" / "inspect-client"
FOLDER = ROOT / "tests" / "inspect"

CHECK_S = 500.0
"""Time for all of it; the test has a little more."""

CHECKS_MIN = 38
"""Fewer were not all of them."""


@pytest.mark.soak(only=True)
async def test_the_self_check_of_inspect_ai_passes(real_host: RealHost) -> None:
    """What it does not pass is listed there, with reasons."""
    settings = ["-c", str(FOLDER / "pytest.ini"), "--rootdir", str(FOLDER)]
    command = ["-m", "pytest", "-q", "--durations=5", "-p", "no:cacheprovider", *settings]
    command.append(str(FOLDER / "self_check.py"))
    async with daemon_of(real_host) as url:
        path = os.pathsep.join(map(str, (CLIENT, ROOT / "src", ROOT)))
        environ = os.environ | {"FORKD_URL": url, "FORKD_TAG": str(TAG), "PYTHONPATH": path}
        text = await said_by(sys.executable, *command, timeout_s=CHECK_S, cwd=ROOT, env=environ)

    passed = next(int(word) for word in text.splitlines()[-1].split() if word.isdigit())
    assert passed >= CHECKS_MIN, text
