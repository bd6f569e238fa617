"""The MCP server over standard input and output, driven by the `mcp` package's own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from mcp import Client, StdioServerParameters

from forkd import AsyncClient, limits
from forkd.mcp.output import FOLDER
from forkd.mcp.server import make_server
from forkd.mcp.tools import TOOLS
from tests.support.served_host import served_host
from tests.support.service_host import until
from tests.support.soak import only_in_soak

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mcp.shared.dispatcher import ProgressFnT

    from tests.support.served_host import Served
    from tests.support.service_host import FakeHost

pytestmark = pytest.mark.timeout(120)

OF_THE_REFERENCE = {
    "list_snapshots": set(),
    "create_snapshot": {"tag", "kernel", "rootfs", "rw", "tap", "boot_wait_secs"},
    "spawn_sandboxes": {
        "snapshot_tag", "n", "per_child_netns", "memory_limit_mib", "prewarm", "live_fork",
    },
    "branch_sandbox": {"sandbox_id", "tag", "diff", "measure_diff", "mode", "wait"},
    "list_sandboxes": set(),
    "get_sandbox": {"sandbox_id"},
    "kill_sandbox": {"sandbox_id"},
    "exec_command": {"sandbox_id", "args", "timeout_secs"},
    "eval_code": {"sandbox_id", "code"},
    "ping_sandbox": {"sandbox_id"},
    "wait_for_text": {"sandbox_id", "path", "marker", "timeout_secs", "poll_interval_ms"},
}  # fmt: skip
"""The reference's tools, with their arguments."""


HIDDEN = "import sys; sys.modules['mcp'] = None; from forkd.cli.main import main; main()"
"""The command line, where there is no package `mcp`."""

LOADED = "import sys, forkd.cli.main; forkd.Client, forkd.AsyncClient; print([*sys.modules])"
"""Says what the SDK and the help of the command line load."""


def command(served: Served) -> StdioServerParameters:
    """Return what starts the server."""
    run = {name: text for name, text in os.environ.items() if name == "FORKD_TEST_RUN"}
    return StdioServerParameters(
        command=sys.executable, args=["-m", "forkd", "mcp"], env={**run, "FORKD_URL": served.url}
    )


@contextlib.asynccontextmanager
async def connected(host: FakeHost) -> AsyncIterator[tuple[Client, Served]]:
    """Run a daemon with a snapshot `python`, the server, and a client."""
    async with served_host(host) as served, Client(command(served)) as client:
        yield client, served
        for each in await served.sandboxes():
            await served.http.delete(f"/v2/sandboxes/{each}")
        assert host.left_over() == []


@contextlib.asynccontextmanager
async def beside(host: FakeHost) -> AsyncIterator[tuple[Client, Served]]:
    """Run a daemon with a snapshot `python`, and the server in this process; a client of it."""
    async with served_host(host) as served, AsyncClient(served.url) as daemon:

        @contextlib.asynccontextmanager
        async def opened(_: object) -> AsyncIterator[AsyncClient]:
            yield daemon

        async with Client(make_server("0", opened)) as client:
            yield client, served
        for each in await served.sandboxes():
            await served.http.delete(f"/v2/sandboxes/{each}")
        assert host.left_over() == []


async def call(
    client: Client, tool: str, told: ProgressFnT | None = None, /, **arguments: object
) -> dict[str, Any]:
    """Call a tool; return its answer, which must fit its schema."""
    answer = await client.call_tool(tool, arguments, progress_callback=told)
    assert not answer.is_error, answer.content
    said: dict[str, Any] = answer.structured_content
    assert json.loads(answer.content[0].text) == said  # type: ignore[union-attr]
    TOOLS[tool].result.model_validate_json(json.dumps(said))
    return said


async def refusal(client: Client, tool: str, **arguments: object) -> str:
    """Call a tool that refuses; return what it says."""
    answer = await client.call_tool(tool, arguments)
    assert answer.is_error
    said: str = answer.content[0].text  # type: ignore[union-attr]
    return said


async def spawned(client: Client, **options: object) -> str:
    """Fork a sandbox; return its id."""
    made = await call(client, "spawn_sandboxes", snapshot_tag="python", **options)
    return str(made["sandboxes"][0]["id"])


async def test_the_references_tools_take_the_references_arguments(fake_host: FakeHost) -> None:
    async with beside(fake_host) as (client, _):
        listed = {each.name: each for each in (await client.list_tools()).tools}
        for name, arguments in OF_THE_REFERENCE.items():
            assert arguments <= listed[name].input_schema["properties"].keys()

        box = await spawned(client, n=1, per_child_netns=False, prewarm=False, live_fork=True)
        made = await call(client, "branch_sandbox", sandbox_id=box, mode="live", tag="mcp")
        assert (made["tag"], made["sandboxes"]) == ("mcp", [])
        baked = await call(client, "create_snapshot", tag="b", kernel="/vmlinux", rootfs="fake")
        assert baked["tag"] == "b"
        assert await call(client, "kill_sandbox", sandbox_id=box) == {"id": box, "killed": True}


async def test_tools_say_whether_they_change_or_destroy_anything(fake_host: FakeHost) -> None:
    async with beside(fake_host) as (client, _):
        hints = {
            each.name: (each.annotations.read_only_hint, each.annotations.destructive_hint)
            for each in (await client.list_tools()).tools
            if each.annotations is not None
        }

    assert {name for name, (reads, _) in hints.items() if reads} == {
        "list_sandboxes", "get_sandbox", "ping_sandbox", "wait_for_text", "read_file",
        "list_files", "diff_sandboxes", "show_tree", "list_snapshots",
    }  # fmt: skip
    assert {name for name, (_, destroys) in hints.items() if destroys} == {
        "kill_sandbox", "exec_command", "eval_code", "write_file", "reset_sandbox",
        "promote_sandbox", "delete_snapshot",
    }  # fmt: skip
    assert len(hints) == len(TOOLS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sandbox_id": "sb"}, "eval_code: code: Field required. It takes sandbox_id, code, timeo"),
        ({"sandbox_id": "sb", "code": 1}, "code: Input should be a valid string"),
        ({"sandbox_id": "sb", "code": "1", "lang": "r"}, "lang: Extra inputs are not permitted"),
        ({"sandbox_id": "s" * 65, "code": "1"}, "sandbox_id: String should have at most 64 char"),
        ({"sandbox_id": "sb", "code": "1", "timeout_secs": 0}, "timeout_secs: Input should be gr"),
        ({"sandbox_id": "sb", "code": "1"}, "[not_found]"),
    ],
)
async def test_arguments_that_do_not_fit_are_named(
    fake_host: FakeHost, arguments: dict[str, object], said: str
) -> None:
    async with beside(fake_host) as (client, _):
        assert said in await refusal(client, "eval_code", **arguments)


async def test_what_the_daemon_refuses_is_an_answer_with_its_code(fake_host: FakeHost) -> None:
    async with beside(fake_host) as (client, _):
        box = await spawned(client)

        said = await refusal(client, "exec_command", sandbox_id=box, args=["missing"])
        assert said == "missing: no such program [not_found]"
        assert "[not_found]" in await refusal(client, "read_file", sandbox_id=box, path="/none")
        assert "give a snapshot_tag or an image" in await refusal(client, "spawn_sandboxes")
        both = await refusal(client, "spawn_sandboxes", snapshot_tag="a", n=2, name="x")
        assert both.startswith("name: only one sandbox can have it, not 2")
        none = await refusal(client, "create_snapshot", tag="x")
        assert "give one of image, recipe and rootfs, not none of them" in none
        assert "is no base64" in await refusal(
            client, "write_file", sandbox_id=box, path="/x", content="?", encoding="base64"
        )
        assert "[conflict]" in await refusal(client, "promote_sandbox", sandbox_id=box)


@pytest.mark.parametrize("size_mib", [8, only_in_soak(100)])
async def test_long_output_is_head_and_tail_and_the_rest_can_be_read(
    fake_host: FakeHost, size_mib: int
) -> None:
    lines = size_mib * 1024 * 1024 // 16
    async with connected(fake_host) as (client, _):
        box = await spawned(client)
        reports: list[str | None] = []

        async def told(progress: float, total: float | None, message: str | None) -> None:  # noqa: ARG001 - the client's
            reports.append(message)

        arguments = {"sandbox_id": box, "args": ["lines", str(lines)], "timeout_secs": 100}
        answer = await client.call_tool("exec_command", arguments, progress_callback=told)
        said = answer.structured_content

        assert said["stdout_bytes"] == lines * 16
        assert said["stdout"].startswith(f"{0:015d}\n{1:015d}\n")
        assert said["stdout"].endswith(f"{lines - 1:015d}\n")
        left_out = lines * 16 - limits.MCP_OUTPUT_BYTES_MAX
        assert f"[... {left_out} of {lines * 16} bytes are left out" in said["stdout"]
        assert len(said["stdout"]) < limits.MCP_OUTPUT_BYTES_MAX + 1000
        path = said["stdout_file"]
        assert path.startswith(FOLDER)
        middle = lines // 2 * 16
        part = await call(client, "read_file", sandbox_id=box, path=path, offset=middle, length=16)
        assert part["content"] == f"{lines // 2:015d}\n"
        assert (part["size_bytes"], part["next_offset"]) == (lines * 16, middle + 16)
        assert reports or size_mib == 8
        assert all(str(each).startswith("the program has written") for each in reports)


async def test_output_at_the_limit_is_whole_and_old_outputs_are_removed(
    fake_host: FakeHost,
) -> None:
    fits = limits.MCP_OUTPUT_BYTES_MAX // 16
    async with beside(fake_host) as (client, _):
        box = await spawned(client)

        whole = await call(client, "exec_command", sandbox_id=box, args=["lines", str(fits)])
        assert (len(whole["stdout"]), whole["stdout_file"]) == (fits * 16, None)
        one = ["lines", str(fits + 1)]
        files = [
            (await call(client, "exec_command", sandbox_id=box, args=one))["stdout_file"]
            for _ in range(limits.MCP_OUTPUT_FILES_MAX + 2)
        ]
        listed = await call(client, "list_files", sandbox_id=box, path=FOLDER)
        assert [f"{FOLDER}/{each['name']}" for each in listed["entries"]] == files[2:]


async def test_output_that_cannot_be_kept_does_not_stop_the_program(fake_host: FakeHost) -> None:
    async with beside(fake_host) as (client, _):
        box = await spawned(client)
        await call(client, "write_file", sandbox_id=box, path=FOLDER, content="in the way")

        ran = await call(client, "exec_command", sandbox_id=box, args=["lines", "65536"])

        assert (ran["exit_code"], ran["stdout_file"]) == (0, None)
        assert ran["stdout_bytes"] == 65536 * 16
        assert "it was not kept: " in ran["stdout"]


async def test_a_client_that_goes_away_leaves_no_program_behind(fake_host: FakeHost) -> None:
    async with served_host(fake_host) as served:
        (box,) = await served.fork()
        server = await asyncio.create_subprocess_exec(
            *[command(served).command, *command(served).args],
            env=command(served).env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert server.stdin is not None
        assert server.stdout is not None
        arguments = {"sandbox_id": box, "args": ["forever"], "timeout_secs": 1000}
        for line in (
            initialize("2025-11-25"),
            {"jsonrpc": "2.0", "method": "notifications/initialized"},
            {"jsonrpc": "2.0", "id": 2, "method": "tools/call",
             "params": {"name": "exec_command", "arguments": arguments}},
        ):  # fmt: skip
            server.stdin.write(json.dumps(line).encode() + b"\n")
        await until(lambda: "forever began" in served.console(box))

        server.stdin.close()

        await until(lambda: "forever ended" in served.console(box))
        assert await asyncio.wait_for(server.wait(), 30) == 0
        await served.http.delete(f"/v2/sandboxes/{box}")
        assert fake_host.left_over() == []


def initialize(version: str) -> dict[str, Any]:
    """Return the message that shakes hands."""
    about = {"name": "tests", "version": "1"}
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": about}
    return {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}


async def test_a_client_of_an_unknown_version_is_told_which_one_we_speak(
    fake_host: FakeHost,
) -> None:
    """It is up to the client then: the protocol has it leave, if it does not speak that."""
    async with served_host(fake_host) as served:
        server = await asyncio.create_subprocess_exec(
            *[command(served).command, *command(served).args],
            env=command(served).env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await server.communicate(json.dumps(initialize("1999-01-01")).encode() + b"\n")

    result = json.loads(said)["result"]
    assert result["protocolVersion"] == "2025-11-25"
    assert result["serverInfo"]["name"] == "forkd"


def test_without_the_package_the_command_says_how_to_install_it() -> None:
    ran = subprocess.run(  # noqa: S603 - our own
        [sys.executable, "-c", HIDDEN, "mcp"], capture_output=True, text=True, check=False
    )

    assert (ran.returncode, ran.stdout) == (1, "")
    said = "the package `mcp` is not installed: `pip install 'forkd-vm[mcp]'` installs it"
    assert said in ran.stderr


def test_the_sdk_and_the_command_line_load_nothing_of_it() -> None:
    ran = subprocess.run(  # noqa: S603 - our own
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True
    )

    assert "'forkd.sdk'" in ran.stdout
    assert [each for each in ("'mcp'", "'forkd.mcp'", "'mcp_types'") if each in ran.stdout] == []
