"""The MCP server in the daemon, over HTTP, with tokens of ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import httpx
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from forkd import limits
from forkd.daemon.auditing import Auditor
from forkd.daemon.auth import TOKEN_FILE
from forkd.daemon.settings import Bind
from forkd.telemetry.audit import AuditLog
from tests.functional.test_mcp import call, refusal, spawned
from tests.support.served_host import served_host
from tests.support.service_host import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mcp.client.client import ConnectMode

    from tests.support.served_host import Served
    from tests.support.service_host import FakeHost

pytestmark = pytest.mark.timeout(120)

ADDRESS = Bind("127.0.0.1", 0)

PREFIX = "io.modelcontextprotocol"
"""Begins the names of what requests say of themselves."""


@contextlib.asynccontextmanager
async def served(host: FakeHost) -> AsyncIterator[Served]:
    """Run a daemon on TCP; at the end nothing may be left of its sandboxes."""
    async with served_host(host, bind=ADDRESS) as daemon:
        yield daemon
        for each in await daemon.sandboxes():
            await daemon.http.delete(f"/v2/sandboxes/{each}")
        assert host.left_over() == []


async def token(daemon: Served, *scopes: str, tenant: str = "default") -> str:
    """Make a token; return its secret."""
    body = {"name": f"{tenant}-{len(scopes)}", "scopes": scopes, "tenant": tenant}
    answer = await daemon.http.post("/v2/tokens", json=body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["token"])


@contextlib.asynccontextmanager
async def connected(
    daemon: Served, secret: str | None = None, *, mode: ConnectMode = "auto"
) -> AsyncIterator[Client]:
    """Connect a client with a token; the operator's, unless another is given."""
    if secret is None:
        secret = (daemon.host.settings.state_dir / TOKEN_FILE).read_text()
    headers = {"Authorization": f"Bearer {secret}"}
    async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
        transport = streamable_http_client(f"{daemon.tcp_url}/mcp", http_client=http)
        async with Client(transport, mode=mode) as client:
            yield client


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_sandbox_lives_its_life_over_http(fake_host: FakeHost, mode: ConnectMode) -> None:
    """Clients of protocols before 2026 shake hands, later ones do not."""
    async with served(fake_host) as daemon, connected(daemon, mode=mode) as client:
        box = await spawned(client)
        assert (await call(client, "eval_code", sandbox_id=box, code="answer"))["result"] == "42"
        ran = await call(client, "exec_command", sandbox_id=box, args=["cat"], stdin="in")
        assert ran["stdout"] == "in"
        assert (await call(client, "write_file", sandbox_id=box, path="/a", content="x"))["bytes"]
        assert (await call(client, "read_file", sandbox_id=box, path="/a"))["content"] == "x"
        (copy,) = (await call(client, "branch_sandbox", sandbox_id=box, n=1))["sandboxes"]
        assert (await call(client, "promote_sandbox", sandbox_id=copy["id"]))["ended"]
        said = await refusal(client, "exec_command", sandbox_id=box, args=["missing"])
        assert said == "missing: no such program [not_found]"
        assert (await call(client, "kill_sandbox", sandbox_id=box))["killed"] is True


async def test_consoles_files_and_prompts_are_offered(fake_host: FakeHost) -> None:
    async with served(fake_host) as daemon, connected(daemon) as client:
        box = await spawned(client)
        await call(client, "write_file", sandbox_id=box, path="/note", content="ä")
        (console,) = (await client.list_resources()).resources
        (text,) = (await client.read_resource(f"forkd://sandboxes/{box}/files/note")).contents
        (log,) = (await client.read_resource(console.uri)).contents
        (message,) = (await client.get_prompt("run_in_sandbox", {"job": "sort"})).messages

    assert getattr(text, "text", None) == "ä"
    assert log.uri == f"forkd://sandboxes/{box}/console"
    assert "Do this job in a forkd sandbox, and nowhere else: sort" in str(message.content)


async def test_a_token_may_do_what_its_scopes_say(fake_host: FakeHost) -> None:
    async with served(fake_host) as daemon:
        async with connected(daemon, await token(daemon, "read")) as reader:
            assert (await call(reader, "list_sandboxes"))["sandboxes"] == []
            said = await refusal(reader, "spawn_sandboxes", snapshot_tag="python")
            assert said.endswith("[forbidden]")
        async with connected(daemon) as operator:
            box = await spawned(operator)
        other = await token(daemon, "read", "run", tenant="other")
        async with connected(daemon, other) as stranger:
            assert (await call(stranger, "list_sandboxes"))["sandboxes"] == []
            assert "[not_found]" in await refusal(stranger, "get_sandbox", sandbox_id=box)


async def test_what_a_tool_does_is_written_down_as_its_callers(fake_host: FakeHost) -> None:
    log = fake_host.folder / "audit.log"
    with contextlib.closing(AuditLog(log)) as audit:
        async with served_host(fake_host, bind=ADDRESS, auditor=Auditor(audit)) as daemon:
            secret = await token(daemon, "read", "run")
            async with connected(daemon, secret) as client:
                box = await spawned(client)
                await call(client, "kill_sandbox", sandbox_id=box)
    written = [json.loads(line) for line in log.read_text().splitlines()]

    done = [each["action"] for each in written if each["principal"] == "token:default-2"]
    assert {*done} == {"mcp", "fork", "get_sandbox", "delete_sandbox"}


async def test_who_has_no_token_is_told_how_to_be_let_in(fake_host: FakeHost) -> None:
    async with served(fake_host) as daemon, httpx.AsyncClient(base_url=daemon.tcp_url) as http:
        refused = await http.post("/mcp", json={})
        where = f"{daemon.tcp_url}/.well-known/oauth-protected-resource/mcp"
        assert refused.status_code == 401
        assert refused.headers["WWW-Authenticate"] == f'Bearer resource_metadata="{where}"'

        found = await http.get(where)
        assert found.json() == {
            "resource": f"{daemon.tcp_url}/mcp",
            "resource_name": "forkd",
            "bearer_methods_supported": ["header"],
            "scopes_supported": ["read", "run", "snapshots"],
        }
        assert (await http.get("/.well-known/oauth-protected-resource")).json() == found.json()
        page = await http.get(where, headers={"Host": "evil.example"})
        assert page.status_code == 403


@pytest.mark.parametrize("tool", ["spawn_sandboxes", "create_snapshot"])
@pytest.mark.parametrize("argument", ["image", "recipe"])
async def test_no_file_of_the_daemons_host_is_read(
    fake_host: FakeHost, tool: str, argument: str
) -> None:
    """Over HTTP a path would be one of the daemon's: it is a name that is not found, and no more.

    The same recipe is uploaded by a client on this host, which may read it.
    """
    secret = fake_host.folder / "private"
    secret.mkdir()
    recipe = fake_host.recipe(name="private").rename(secret / "recipe")
    given: dict[str, Any] = {argument: str(recipe)}
    if tool == "create_snapshot":
        given["tag"] = "stolen"
    elif argument == "recipe":
        given = {"image": str(recipe / "recipe.toml")}
    async with served(fake_host) as daemon, connected(daemon) as client:
        said = await refusal(client, tool, **given)

        assert "[not_found]" in said or "[invalid_request]" in said
        assert not list(fake_host.settings.state_dir.glob("recipes/*"))
        assert (await call(client, "list_snapshots"))["snapshots"][0]["tag"] == "python"


async def test_a_daemon_without_the_package_says_how_to_install_it(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(fake_host) as daemon:
        monkeypatch.setitem(sys.modules, "mcp", None)
        answer = await daemon.http.post("/mcp", json={})
        monkeypatch.undo()

    assert answer.status_code == 404
    assert "pip install 'forkd-vm[mcp]'" in answer.json()["error"]


async def test_long_output_is_kept_over_http_too(fake_host: FakeHost) -> None:
    lines = 4 * 1024 * 1024 // 16
    async with served(fake_host) as daemon, connected(daemon) as client:
        box = await spawned(client)

        ran = await call(client, "exec_command", sandbox_id=box, args=["lines", str(lines)])

        assert len(ran["stdout"]) < limits.MCP_OUTPUT_BYTES_MAX + 1000
        path = ran["stdout_file"]
        part = await call(client, "read_file", sandbox_id=box, path=path, offset=16, length=16)
        assert (part["content"], part["size_bytes"]) == (f"{1:015d}\n", lines * 16)


async def test_a_client_that_goes_away_ends_its_program(fake_host: FakeHost) -> None:
    async with served(fake_host) as daemon, connected(daemon) as client:
        box = await spawned(client)
        arguments = {"sandbox_id": box, "args": ["forever"], "timeout_secs": 1000}
        calling = asyncio.create_task(client.call_tool("exec_command", arguments))
        await until(lambda: "forever began" in daemon.console(box))

        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

        await until(lambda: "forever ended" in daemon.console(box))


async def test_a_body_has_a_limit_and_an_unknown_version_is_refused(fake_host: FakeHost) -> None:
    async with served(fake_host) as daemon:
        long = {"jsonrpc": "2.0", "id": 1, "method": "x" * limits.BODY_BYTES_MAX}
        answer = await daemon.http.post("/mcp", json=long)
        assert answer.status_code == 413

        about = {f"{PREFIX}/protocolVersion": "1999-01-01", f"{PREFIX}/clientCapabilities": {}}
        listed = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": about}}
        headers = {
            "Accept": "application/json, text/event-stream",
            "MCP-Protocol-Version": "1999-01-01",
            "MCP-Method": "tools/list",
        }
        answer = await daemon.http.post("/mcp", json=listed, headers=headers)
        assert answer.status_code == 400
        assert "1999-01-01" in json.dumps(answer.json())
