"""The TypeScript SDK's own tests, against a whole daemon over the fake VMM."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from forkd.daemon.settings import Bind
from tests.support.served_host import served_host
from tools.node import TYPESCRIPT, environment

if TYPE_CHECKING:
    from tests.support.service_host import FakeHost

VITEST_TIMEOUT_S = 150.0
"""Time for one project: seconds alone, and much more beside all that runs in `make test`."""

pytestmark = [pytest.mark.needs("node"), pytest.mark.timeout(VITEST_TIMEOUT_S + 30)]


async def run_vitest(project: str, **variables: str) -> None:
    """Have vitest run one project of the package; its output is in the error if it fails."""
    process = await asyncio.create_subprocess_exec(
        "node_modules/.bin/vitest",
        "run",
        f"--project={project}",
        cwd=TYPESCRIPT,
        env={**environment(), **variables, "NO_COLOR": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), VITEST_TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, said.decode()


async def test_the_suite_passes_without_a_daemon() -> None:
    await run_vitest("unit")


async def test_the_suite_passes_against_a_daemon(fake_host: FakeHost) -> None:
    async with served_host(fake_host, bind=Bind("127.0.0.1", 0)) as served:
        made = await served.http.post(
            "/v2/tokens", json={"name": "typescript", "scopes": ["read", "run", "snapshots"]}
        )
        assert made.status_code == 201, made.text
        await run_vitest(
            "daemon",
            FORKD_TEST_URL=served.url,
            FORKD_TEST_TCP_URL=served.tcp_url,
            FORKD_TEST_TOKEN=made.json()["token"],
        )
        assert await served.sandboxes() == []
    assert fake_host.left_over() == []
