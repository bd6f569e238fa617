"""What others test MCP servers with, from npm: the inspector and the official conformance suite."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import socketserver
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from forkd.daemon.auth import TOKEN_FILE
from forkd.mcp.prompts import PROMPTS
from forkd.mcp.tools import TOOLS
from tests.functional.test_mcp import command
from tests.functional.test_mcp_http import served
from tests.support.npm_project import colourless
from tests.support.programs import outcome_of
from tools.node import RUNTIMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.served_host import Served
    from tests.support.service_host import FakeHost

pytestmark = [
    pytest.mark.needs("node", "mcp-testers"),
    pytest.mark.soak(only=True),
    pytest.mark.timeout(300),
]

RUN_TIMEOUT_S = 200.0

UNKNOWN_TOOL = 5
"""Exit status of the inspector."""

PASSED = {
    "dns-rebinding-protection",
    "ping",
    "prompts-list",
    "resources-list",
    "server-initialize",
    "server-sse-multiple-streams",
    "tools-list",
}
"""Scenarios of the suite that fit any server.

The others call tools, prompts and resources of a server that is made for the suite, such as
`test_simple_text`, or need what this server does not offer: log levels, completion, subscriptions,
sampling and elicitation.
"""


async def run(*words: object) -> tuple[int, str]:
    """Run a program; return its exit status and what it says."""
    return await outcome_of(*words, timeout_s=RUN_TIMEOUT_S, env=colourless())


def secret_of(daemon: Served) -> str:
    return (daemon.host.settings.state_dir / TOKEN_FILE).read_text().strip()


class Inspector:
    """The inspector, on the server of a daemon."""

    def __init__(self, transport: str, daemon: Served) -> None:
        self._words: list[object] = [RUNTIMES / ".bin/mcp-inspector", "--cli"]
        if transport == "http":
            field = f"Authorization: Bearer {secret_of(daemon)}"
            self._words += [f"{daemon.tcp_url}/mcp", "--transport", "http", "--header", field]
        else:
            for name, value in (command(daemon).env or {}).items():
                self._words += ["-e", f"{name}={value}"]
            self._words += [Path(sys.executable).parent / "forkd", "mcp", "serve"]

    async def ask(self, method: str, *words: str, status: int = 0) -> dict[str, Any]:
        """Return the answer to a request."""
        code, said = await run(*self._words, "--method", method, *words)
        assert code == status, said
        found: dict[str, Any] = json.loads(said[said.index("{") :])
        return found


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_the_inspector_is_satisfied(fake_host: FakeHost, transport: str) -> None:
    async with served(fake_host) as daemon:
        inspector = Inspector(transport, daemon)

        listed = (await inspector.ask("tools/list", "--strict"))["tools"]
        assert [each["name"] for each in listed] == [*TOOLS]
        assert [each["name"] for each in (await inspector.ask("prompts/list"))["prompts"]] == [
            *PROMPTS
        ]
        tool = ("--tool-name", "spawn_sandboxes", "--tool-arg")
        made = await inspector.ask("tools/call", *tool, "snapshot_tag=python")
        box = made["structuredContent"]["sandboxes"][0]["id"]
        (console,) = (await inspector.ask("resources/list"))["resources"]
        assert console["uri"] == f"forkd://sandboxes/{box}/console"
        assert (await inspector.ask("resources/read", "--uri", console["uri"]))["contents"]
        no_tool = ("--tool-name", "rm_rf")
        refused = await inspector.ask("tools/call", *no_tool, status=UNKNOWN_TOOL)
        assert refused["error"]["code"] == "tool_not_found"


@contextlib.contextmanager
def authorized(port: int, secret: str) -> Iterator[int]:
    """Listen on a port that leads to another, with a token in each request: the suite has none."""
    field = rb"\1Authorization: Bearer " + secret.encode() + b"\r\n"

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(re.sub(rb"^([A-Z]+ \S+ HTTP/1.1\r\n)", field, data))
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", port)) as daemon:
                back = threading.Thread(target=copy, args=(daemon, self.request))
                back.start()
                copy(self.request, daemon)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            serving.join()


async def test_the_conformance_suite_passes_where_it_fits(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    async with served(fake_host) as daemon:
        port = int(daemon.tcp_url.rpartition(":")[2])
        with authorized(port, secret_of(daemon)) as relayed:
            _, said = await run(
                RUNTIMES / ".bin/conformance",
                *("server", "--url", f"http://127.0.0.1:{relayed}/mcp", "--output-dir", tmp_path),
            )

    results = dict(re.findall(r"^. ([\w-]+): \d+ passed, (\d+) failed$", said, re.MULTILINE))
    assert {name for name, failed in results.items() if failed == "0"} == PASSED, said
