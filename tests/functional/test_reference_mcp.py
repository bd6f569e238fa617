"""The reference's published MCP server, unmodified, against our daemon."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd.host.cgroupfs import CGROUP_ROOT
from forkd.model.ids import SandboxId
from forkd.model.sandbox import ForkOptions
from tests.support.callers import CALLER
from tests.support.reference import McpClient, Refused, mcp_client, served_reference
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.service_host import FakeHost

pytestmark = [pytest.mark.needs("reference"), pytest.mark.timeout(120)]

TOOLS = {
    "list_snapshots", "create_snapshot", "spawn_sandboxes", "branch_sandbox", "list_sandboxes",
    "get_sandbox", "kill_sandbox", "exec_command", "eval_code", "ping_sandbox", "wait_for_text",
}  # fmt: skip


@contextlib.asynccontextmanager
async def running(host: FakeHost) -> AsyncIterator[tuple[McpClient, str]]:
    """Run a daemon with one sandbox, and the server; returns the sandbox's id."""
    async with served_reference(host) as served, mcp_client(served) as client:
        forked = await served.service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())
        yield client, forked.sandboxes[0].id
        for each in await client("list_sandboxes"):
            await served.service.sandboxes.delete(CALLER, SandboxId(each["id"]))
        assert host.left_over() == []


async def test_its_tools_do_what_they_say(fake_host: FakeHost) -> None:
    async with running(fake_host) as (client, sandbox):
        assert {each["name"] for each in (await client.ask("tools/list", {}))["tools"]} == TOOLS
        assert [each["tag"] for each in await client("list_snapshots")] == ["python"]
        assert [each["id"] for each in await client("list_sandboxes")] == [sandbox]
        assert (await client("get_sandbox", sandbox_id=sandbox))["id"] == sandbox
        assert (await client("ping_sandbox", sandbox_id=sandbox))["pong"] is True
        ran = await client("exec_command", sandbox_id=sandbox, args=["hello"])
        assert ran == {"stdout": "", "stderr": "hello", "exit_code": 0}
        assert (await client("eval_code", sandbox_id=sandbox, code="answer"))["result"] == "42"
        missed = await client(
            "wait_for_text", sandbox_id=sandbox, path="/log", marker="READY", timeout_secs=0.01
        )
        assert missed["found"] is False

        branch = await client("branch_sandbox", sandbox_id=sandbox, mode="live", tag="mcp")
        assert (branch["tag"], branch["branched_from"]) == ("mcp", sandbox)

        assert await client("kill_sandbox", sandbox_id=sandbox) == {"id": sandbox, "killed": True}
        assert await client("list_sandboxes") == []


async def test_a_snapshot_is_baked_of_a_recipe_by_name(fake_host: FakeHost) -> None:
    async with running(fake_host) as (client, _):
        made = await client("create_snapshot", tag="baked", kernel="/vmlinux", rootfs="fake")
        assert (made["tag"], made["status"]) == ("baked", "ready")

        with pytest.raises(Refused) as again:
            await client("create_snapshot", tag="baked", kernel="/vmlinux", rootfs="fake")
        assert again.value.status == 400
        with pytest.raises(Refused) as image:
            await client("create_snapshot", tag="x", kernel="/vmlinux", rootfs="/r/python.ext4")
        assert image.value.status == 400


async def test_a_fork_without_room_for_its_limit_is_refused(fake_host: FakeHost) -> None:
    """It always asks for a memory limit, which this host cannot set: its cgroup is none."""
    async with running(fake_host) as (client, sandbox):
        with pytest.raises(Refused) as caught:
            await client("spawn_sandboxes", snapshot_tag="python")
        assert caught.value.status == 500
        assert [each["id"] for each in await client("list_sandboxes")] == [sandbox]


@pytest.mark.soak(only=True)
@pytest.mark.needs("root", "cgroup2")
async def test_it_forks_with_the_limit_that_it_always_sends(fake_host: FakeHost) -> None:
    root = CGROUP_ROOT / "forkd-reference"
    limited = replace(fake_host, settings=replace(fake_host.settings, cgroup_root=root))
    async with running(limited) as (client, _):
        made = await client("spawn_sandboxes", snapshot_tag="python", n=2, live_fork=True)

        assert [each["memory_limit_mib"] for each in made] == [256, 256]
