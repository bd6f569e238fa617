"""The Python of the documentation does on real machines what its pages say."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.docs import ROOT, page_id, run_python
from tests.support.real_daemon import daemon_of
from tests.support.real_host import REAL, TAG

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.real_host import RealHost

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

PAGES = [
    ROOT / "README.md",
    ROOT / "docs/tutorial/first-forks.md",
    ROOT / "docs/howto/use-the-sdk.md",
    ROOT / "docs/howto/move-from-forkd.md",
]

REPLACED = {'"numpy"': f'"{TAG}"', ", 100)": ", 10)"}
"""The snapshot that is baked here; and fewer children, since a hundred are the demo's business."""


@pytest.mark.parametrize("page", PAGES, ids=page_id)
async def test_the_python_of_a_page_runs_on_real_machines(
    page: Path, real_host: RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon_of(real_host) as url:
        monkeypatch.setenv("FORKD_URL", url)
        await asyncio.to_thread(run_python, page, replaced=REPLACED)
