"""The reference's own clients, from the package index, against a daemon over the fake VMM.

`make test-setup` puts them into `build/reference-client`.  They run in processes of their own, with
that folder first on the path, because the Python client's name is that of our package.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkd.daemon.app import create_app
from forkd.daemon.server import listening
from forkd.daemon.settings import Bind, Settings
from tests.support.daemon import TOKEN
from tests.support.daemon_program import bare_environment
from tests.support.service_host import ROOT, FakeHost

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator

    from forkd.service.host import Host

CLIENTS = ROOT / "build" / "reference-client"

LINE_BYTES_MAX = 32 * 1024 * 1024
"""Longest answer of a client: two outputs of an exec, as JSON."""

STATUS = re.compile(r"'([0-9]{3}) ")
"""The status in what httpx says of an answer that is an error."""

DRIVER = """
import json, sys
from importlib.metadata import version
import forkd
print(json.dumps({"file": forkd.__file__, "version": version("forkd")}), flush=True)
client = forkd.Controller()
for line in sys.stdin:
    name, args, options = json.loads(line)
    try:
        said = {"result": getattr(client, name)(*args, **options)}
    except forkd.ControllerError as error:
        said = {"status": error.status, "body": error.body, "url": error.url}
    print(json.dumps(said), flush=True)
"""
"""Has the Python client do what lines on stdin say, and prints what came of each."""


class Refused(Exception):
    """The client raised its `ControllerError`."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True)
class ServedReference:
    """A daemon at a TCP address, as the reference's clients want one.

    Attributes:
        url: Its base URL.
        service: Its host, which has a snapshot `python`.
        host: Where that is.
        token: What clients show.
    """

    url: str
    service: Host
    host: FakeHost
    token: str = TOKEN

    @property
    def environment(self) -> dict[str, str]:
        """What tells a client where the daemon is."""
        marks = {name: text for name, text in os.environ.items() if name == "FORKD_TEST_RUN"}
        return {
            **marks,
            **bare_environment(),
            "PYTHONPATH": str(CLIENTS),
            "FORKD_URL": self.url,
            "FORKD_TOKEN": self.token,
        }


@contextlib.asynccontextmanager
async def served_reference(host: FakeHost, *, knobs: str = "") -> AsyncIterator[ServedReference]:
    """Serve a host with a snapshot `python`, baked with `knobs`, on TCP."""
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as folder:
        token = Path(folder) / "token"
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        settings = Settings(socket=None, bind=Bind("127.0.0.1", 0), token_file=token)
        async with host.service() as service:
            await host.bake(service, host.recipe(knobs=knobs))
            app = create_app(service, lambda: service.tasks.failure)
            async with listening(app, settings, service.tokens) as (url,):
                yield ServedReference(url, service, host)


class PythonClient:
    """The reference's Python client, driven through pipes."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def __call__(self, name: str, *args: object, **options: object) -> Any:  # noqa: ANN401 - JSON
        """Call a method of its `Controller`.

        Raises:
            Refused: It raised `ControllerError`.
        """
        said = await _asked(self._process, [name, args, options])
        if "status" in said:
            raise Refused(said["status"], said["body"])
        return said["result"]


@contextlib.asynccontextmanager
async def python_client(served: ServedReference) -> AsyncIterator[PythonClient]:
    """Run the Python client; it sees the standard library, its own folder, and nothing else."""
    command = [sys.executable, "-S", "-P", "-c", DRIVER]
    async with _running(command, served.environment) as process:
        said = await _answer(process)
        assert Path(said["file"]).is_relative_to(CLIENTS), said
        assert said["version"] == "0.5.3", said
        yield PythonClient(process)


class McpClient:
    """Speaks with the reference's MCP server: JSON-RPC, one message a line."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._id = 0

    async def ask(self, method: str, params: object) -> Any:  # noqa: ANN401 - JSON
        """Return the result of a request."""
        self._id += 1
        said = await _asked(
            self._process, {"jsonrpc": "2.0", "id": self._id, "method": method, "params": params}
        )
        assert said["id"] == self._id, said
        return said["result"]

    async def start(self) -> None:
        """Shake hands."""
        about = {"name": "tests", "version": "1"}
        version = {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": about}
        await self.ask("initialize", version)
        _send(self._process, {"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def __call__(self, tool: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        """Call a tool; return what it gave.

        Raises:
            Refused: The tool failed; its words, which name the status, are the body.
        """
        result = await self.ask("tools/call", {"name": tool, "arguments": arguments})
        if result.get("isError"):
            said = result["content"][0]["text"]
            raise Refused(int(STATUS.findall(said)[0]), {"error": said})
        structured = result.get("structuredContent") or {}
        return structured["result"] if structured.keys() == {"result"} else structured


@contextlib.asynccontextmanager
async def mcp_client(served: ServedReference) -> AsyncIterator[McpClient]:
    """Run the MCP server; it finds in this environment what is not in its own folder."""
    command = [sys.executable, "-P", "-c", "from forkd_mcp.server import main; main()"]
    async with _running(command, served.environment) as process:
        client = McpClient(process)
        await client.start()
        yield client


@contextlib.asynccontextmanager
async def _running(command: list[str], environment: dict[str, str]) -> AsyncIterator[Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, env=environment, limit=LINE_BYTES_MAX
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def _asked(process: Process, message: object) -> dict[str, Any]:
    _send(process, message)
    return await _answer(process)


def _send(process: Process, message: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")


async def _answer(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line, "the client ended; its standard error says why"
    said: dict[str, Any] = json.loads(line)
    return said
