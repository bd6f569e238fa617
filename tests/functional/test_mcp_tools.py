"""Every tool of the MCP server over standard input and output, and over HTTP: the same answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mcp.shared.exceptions import MCPError

from forkd import limits
from forkd.mcp.tools import TOOLS
from tests.functional import test_mcp as over_stdio
from tests.functional import test_mcp_http as over_http
from tests.functional.test_mcp import call, refusal, spawned
from tests.support.served_host import descriptors
from tests.support.service_host import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from mcp import Client
    from mcp.shared.dispatcher import ProgressFnT

    from tests.support.served_host import Served
    from tests.support.service_host import FakeHost

    Do = Callable[..., Awaitable[dict[str, Any]]]

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.parametrize("transport", ["stdio", "http"]),
]

AT_ONCE = 100

OUTPUT_BYTES = 100 << 20

NOT_FOUND = 404


@contextlib.asynccontextmanager
async def connected(transport: str, host: FakeHost) -> AsyncIterator[tuple[Client, Served]]:
    """Run a daemon with a snapshot `python`, the server, and a client; leaves nothing."""
    if transport == "stdio":
        async with over_stdio.connected(host) as (client, daemon):
            yield client, daemon
        return
    async with over_http.served(host) as daemon, over_http.connected(daemon) as client:
        yield client, daemon


async def test_every_tool_does_what_it_says(fake_host: FakeHost, transport: str) -> None:
    done: set[str] = set()

    reports: list[str | None] = []

    async def told(progress: float, total: float | None, message: str | None) -> None:  # noqa: ARG001 - the client's
        reports.append(message)

    async def do(
        tool: str, progress_callback: ProgressFnT | None = None, **arguments: object
    ) -> dict[str, Any]:
        done.add(tool)
        return await call(client, tool, progress_callback, **arguments)

    async with connected(transport, fake_host) as (client, _):
        assert [each["tag"] for each in (await do("list_snapshots"))["snapshots"]] == ["python"]
        (made,) = (await do("spawn_sandboxes", snapshot_tag="python"))["sandboxes"]
        box = made["id"]
        lives_s = made["expires_at_unix"] - made["created_at_unix"]
        assert abs(lives_s - limits.MCP_TTL_S_DEFAULT) <= 1
        assert [each["id"] for each in (await do("list_sandboxes"))["sandboxes"]] == [box]

        changed = await do("update_sandbox", sandbox_id=box, ttl_secs=None, name="mine")
        assert (changed["name"], changed["expires_at_unix"]) == ("mine", None)
        assert (await do("update_sandbox", sandbox_id=box, paused=True))["status"] == "paused"
        assert (await do("update_sandbox", sandbox_id=box, paused=False))["status"] == "running"
        assert (await do("get_sandbox", sandbox_id="mine"))["id"] == box
        assert (await do("ping_sandbox", sandbox_id=box))["pong"] is True

        await use(do, box)
        await branch(do, box)
        stored = await do("branch_sandbox", sandbox_id=box)
        assert stored["snapshot"]["source_id"] == box
        await do("kill_sandbox", sandbox_id=box)
        await do("delete_snapshot", tag=stored["tag"])
        baked = await do("create_snapshot", tag="new", recipe="fake", progress_callback=told)
        assert baked["status"] == "ready"
        assert reports
        tags = [each["tag"] for each in (await do("list_snapshots"))["snapshots"]]
        assert tags == ["new", "python"]
        refused = await refusal(client, "network_policy", sandbox_id=made["id"])
    assert set(TOOLS) - done == {"network_policy"}  # a fake guest has no network
    assert "[not_found]" in refused


async def use(do: Do, box: str) -> None:
    """Run programs and code in a sandbox, and move files."""
    ran = await do("exec_command", sandbox_id=box, args=["hello"])
    assert (ran["exit_code"], ran["stdout"], ran["stderr"]) == (0, "", "hello")
    assert (await do("exec_command", sandbox_id=box, args="exit 3"))["exit_code"] == 3
    fed = await do("exec_command", sandbox_id=box, args=["cat"], stdin="wörd")
    assert fed["stdout"] == "wörd"
    valued = await do("eval_code", sandbox_id=box, code="print('hi')\nanswer")
    assert (valued["result"], valued["stdout"], valued["error"]) == ("42", "hi\n", None)
    raised = await do("eval_code", sandbox_id=box, code="1/0")
    assert (raised["exit_code"], raised["error"]) == (1, "ZeroDivisionError: division by zero")

    assert (await do("write_file", sandbox_id=box, path="/a/b", content="äx"))["bytes"] == 3
    read = await do("read_file", sandbox_id=box, path="/a/b")
    assert (read["content"], read["next_offset"]) == ("äx", None)
    (listed,) = (await do("list_files", sandbox_id=box, path="/a"))["entries"]
    assert (listed["name"], listed["kind"], listed["size_bytes"]) == ("b", "file", 3)
    found = await do("wait_for_text", sandbox_id=box, path="/a/b", marker="x")
    assert found["found"] is True


async def branch(do: Do, box: str) -> None:
    """Copy a sandbox, compare, take back and put one in the place of another."""
    (copy,) = (await do("branch_sandbox", sandbox_id=box, n=1))["sandboxes"]
    assert copy["parent_id"] == box
    nodes = (await do("show_tree", sandbox_id=box))["nodes"]
    assert [(each["id"], each["parent_id"]) for each in nodes] == [
        (box, None), (copy["id"], box)
    ]  # fmt: skip
    assert (await do("diff_sandboxes", before=box, after=copy["id"]))["more"] == 0
    assert (await do("reset_sandbox", sandbox_id=copy["id"]))["id"] == copy["id"]
    promoted = await do("promote_sandbox", sandbox_id=copy["id"])
    assert promoted["sandbox"]["id"] == box


async def test_every_tool_names_an_argument_that_it_does_not_have(
    fake_host: FakeHost, transport: str
) -> None:
    async with connected(transport, fake_host) as (client, _):
        said = {tool: await refusal(client, tool, colour="red") for tool in TOOLS}
        with pytest.raises(MCPError, match="Unknown tool: rm_rf; tools/list has every tool"):
            await client.call_tool("rm_rf", {})

    for tool, words in said.items():
        assert words.startswith(f"{tool}: ")
        assert "colour: Extra inputs are not permitted" in words
        assert ". It takes " in words


async def test_a_hundred_calls_at_once_are_all_answered(
    fake_host: FakeHost, transport: str
) -> None:
    async with connected(transport, fake_host) as (client, _):
        box = await spawned(client)
        before = descriptors()

        said = await asyncio.gather(
            *[
                call(client, "exec_command", sandbox_id=box, args=["cat"], stdin=f"call {number}")
                for number in range(AT_ONCE)
            ]
        )

        assert [each["stdout"] for each in said] == [f"call {number}" for number in range(AT_ONCE)]
        assert descriptors() <= before + 250  # connections that the client keeps


async def test_cancelled_calls_end_their_programs(fake_host: FakeHost, transport: str) -> None:
    async with connected(transport, fake_host) as (client, daemon):
        box = await spawned(client)
        arguments = {"sandbox_id": box, "args": ["forever"], "timeout_secs": 1000}
        calls = [
            asyncio.create_task(client.call_tool("exec_command", arguments)) for _ in range(20)
        ]
        await until(lambda: daemon.console(box).count("forever began") == len(calls))

        for each in calls:
            each.cancel()
        await asyncio.wait(calls)

        await until(lambda: daemon.console(box).count("forever ended") == len(calls))
        assert (await call(client, "ping_sandbox", sandbox_id=box))["pong"] is True


async def test_a_cancelled_bake_is_undone(fake_host: FakeHost, transport: str) -> None:
    fake_host.recipe(knobs="boot=never", name="never")
    began = asyncio.Event()

    async def told(progress: float, total: float | None, message: str | None) -> None:  # noqa: ARG001 - the client's
        began.set()

    async with connected(transport, fake_host) as (client, daemon):
        arguments = {"tag": "new", "recipe": "never"}
        baking = asyncio.create_task(
            client.call_tool("create_snapshot", arguments, progress_callback=told)
        )
        await began.wait()

        baking.cancel()
        await asyncio.wait([baking])

        await untold(daemon, "new")
        tags = [each["tag"] for each in (await call(client, "list_snapshots"))["snapshots"]]
        assert tags == ["python"]


async def untold(daemon: Served, tag: str) -> None:
    """Wait until a daemon has nothing of a snapshot that was being baked."""
    async with asyncio.timeout(30):
        while (await daemon.http.get(f"/v2/snapshots/{tag}/info")).status_code != NOT_FOUND:
            pass


@pytest.mark.soak(only=True)
async def test_a_hundred_mib_of_output_take_little_memory(
    fake_host: FakeHost, transport: str
) -> None:
    lines = OUTPUT_BYTES // 16
    async with connected(transport, fake_host) as (client, _):
        box = await spawned(client)
        server = os.getpid() if transport == "http" else child("forkd mcp")
        before = begun_peak_bytes(server)

        ran = await call(
            client, "exec_command", sandbox_id=box, args=["lines", str(lines)], timeout_secs=100
        )

        assert (ran["stdout_bytes"], ran["exit_code"]) == (OUTPUT_BYTES, 0)
        assert len(ran["stdout"]) < limits.MCP_OUTPUT_BYTES_MAX + 1000
        assert peak_bytes(server) - before < OUTPUT_BYTES // 2
        path, last = ran["stdout_file"], OUTPUT_BYTES - 16
        end = await call(client, "read_file", sandbox_id=box, path=path, offset=last)
        assert (end["content"], end["next_offset"]) == (f"{lines - 1:015d}\n", None)


def begun_peak_bytes(pid: int) -> int:
    """Have the kernel measure the peak of a process from now on; return its size."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_bytes(pid)


def peak_bytes(pid: int) -> int:
    """Return how much memory a process had at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def child(words: str) -> int:
    """Return the child of this process whose command line has some words."""
    listed = Path("/proc/self/task").glob("*/children")
    pids = [int(each) for path in listed for each in path.read_text().split()]
    (found,) = [
        pid for pid in pids if words in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    ]
    return found
