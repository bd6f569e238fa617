"""Inspect AI's published self-check, in a sandbox of the daemon that FORKD_URL names.

`tests/functional/test_inspect.py` runs this in a process of its own, with build/inspect-client
first on the path.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - that is how it is to be used

from forkd import AsyncClient
from tests.inspect.sandbox import WORK, ForkdEnvironment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

AS_ROOT = "the agent reads and writes files as root, whom permissions do not stop"

TOO_LARGE = "the arguments of a program, as JSON, have at most 1 MiB; longer input goes by stdin"

EXPECTED_FAILURES = {
    "test_exec_large_command": TOO_LARGE,
    "test_read_file_not_allowed": AS_ROOT,
    "test_write_text_file_without_permissions": AS_ROOT,
    "test_write_binary_file_without_permissions": AS_ROOT,
}
"""Checks that our sandboxes do not pass, each with the reason."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def forked() -> AsyncIterator[ForkdEnvironment]:
    async with (
        AsyncClient() as client,
        (await client.fork(os.environ["FORKD_TAG"], 1))[0] as sandbox,
    ):
        await sandbox.files.make_dir(WORK, parents=True)
        yield ForkdEnvironment(sandbox)


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox_env(forked: ForkdEnvironment, request: pytest.FixtureRequest) -> ForkdEnvironment:
    reason = EXPECTED_FAILURES.get(request.node.originalname)
    if reason is not None:
        request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    return forked
