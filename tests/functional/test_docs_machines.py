"""The Python of the documentation does on real machines what its pages say."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from forkd.daemon.app import create_app
from forkd.daemon.server import listening
from forkd.daemon.settings import Settings
from tests.support.callers import CALLER
from tests.support.docs import ROOT, page_id, run_python
from tests.support.real_host import REAL, TAG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
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


@contextlib.asynccontextmanager
async def daemon_of(host: RealHost) -> AsyncIterator[str]:
    """Serve a host at a socket of its own, and delete what was forked meanwhile."""
    settings = Settings(socket=host.settings.run_dir / "forkd.sock")
    try:
        async with listening(create_app(host.service), settings, host.service.tokens) as (url,):
            yield url
    finally:
        for sandbox in await host.service.sandboxes.list(CALLER):
            await host.service.sandboxes.delete(CALLER, sandbox.id)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
async def test_the_python_of_a_page_runs_on_real_machines(
    page: Path, real_host: RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon_of(real_host) as url:
        monkeypatch.setenv("FORKD_URL", url)
        await asyncio.to_thread(run_python, page, replaced=REPLACED)
