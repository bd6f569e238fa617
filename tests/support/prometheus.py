"""Prometheus' server, as Debian has it, with the configuration that we ship."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
from typing import TYPE_CHECKING, Any

import httpx

from tests.support.docs import ROOT
from tests.support.service_host import UNTIL_DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

SHIPPED = ROOT / "packaging/prometheus"

ADDRESS = re.compile(r'"Listening on" address=([0-9.:]+)')

END_TIMEOUT_S = 30.0

BY_FILE = """
  - job_name: by-file
    bearer_token_file: {token}
    static_configs:
      - targets: ["{target}"]
"""
"""Another job, which names its token as older configurations do."""


def configuration(folder: Path, target: str, token: str) -> Path:
    """Write the shipped configuration for a daemon, with scrapes that follow fast; return where."""
    (token_file := folder / "forkd.token").write_text(token)
    (folder / "forkd.rules.yml").write_bytes((SHIPPED / "forkd.rules.yml").read_bytes())
    text = (SHIPPED / "prometheus.yml").read_text(encoding="utf-8")
    for shipped, ours in {
        "interval: 15s": "interval: 1s",
        "/etc/prometheus/forkd.token": str(token_file),
        "127.0.0.1:8889": target,
    }.items():
        assert shipped in text
        text = text.replace(shipped, ours)
    (path := folder / "prometheus.yml").write_text(
        text + BY_FILE.format(token=token_file, target=target)
    )
    return path


def promtool(*args: str | Path) -> str:
    """Run `promtool`, which must be content; return what it says."""
    done = subprocess.run(  # noqa: S603 - Debian's
        ["promtool", *args],  # noqa: S607 - likewise
        capture_output=True,
        text=True,
        check=False,
        timeout=END_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.asynccontextmanager
async def running(config: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Run the server for the block, which gets a client of its API."""
    server = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={config.parent / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        stderr=asyncio.subprocess.PIPE,
    )
    assert server.stderr is not None
    try:
        said = ""
        async with asyncio.timeout(END_TIMEOUT_S):
            while (found := ADDRESS.search(said)) is None:
                line = await server.stderr.readline()
                assert line, said
                said += line.decode()
        rest = asyncio.create_task(server.stderr.read())  # or it would wait for a reader
        async with httpx.AsyncClient(
            base_url=f"http://{found[1]}/api/v1", trust_env=False
        ) as client:
            yield client
    finally:
        server.terminate()
        await asyncio.wait_for(server.wait(), END_TIMEOUT_S)
    await rest


async def until_answer(
    client: httpx.AsyncClient, path: str, good: Callable[[Any], bool]
) -> dict[str, Any]:
    """Return the first answer that is good; Prometheus tells nobody when it has scraped.

    It listens before it has opened its storage, and says 503 in plain text until then.
    """
    async with asyncio.timeout(UNTIL_DEADLINE_S):
        while True:
            answer = await client.get(path)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                data: dict[str, Any] = answer.raise_for_status().json()["data"]
                if good(data):
                    return data
            await asyncio.sleep(0)
