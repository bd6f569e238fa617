"""A daemon in this process over the fake VMM, with real sockets, for clients that misbehave."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from forkd.daemon.app import create_app
from forkd.daemon.clients import TCP, UNIX, ClientLimits
from forkd.daemon.server import listening
from forkd.daemon.settings import Bind, Settings
from tests.support.raw_http import RawClient
from tests.support.service_host import FakeHost, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fastapi import FastAPI

    from forkd.daemon.auditing import Auditor
    from forkd.service.host import Host

AT_ONCE = replace(TCP, login_delay_s=0.0)

REQUEST = "{method} {path} HTTP/1.1\r\nHost: forkd\r\nContent-Type: application/json\r\n{more}"


@dataclass(frozen=True, slots=True)
class Served:
    """A daemon, its host, and a client that does as it should; `tcp_url` is empty without TCP."""

    url: str
    tcp_url: str
    app: FastAPI
    service: Host
    host: FakeHost
    http: httpx.AsyncClient

    async def sandboxes(self) -> list[str]:
        """Return the ids of all sandboxes."""
        return [each["id"] for each in (await self.http.get("/v2/sandboxes")).json()]

    async def fork(self, count: int = 1) -> list[str]:
        """Fork sandboxes; return their ids."""
        body = {"snapshot_tag": "python", "n": count}
        answer = await self.http.post("/v2/sandboxes", json=body)
        assert answer.status_code == 201, answer.text
        return [each["id"] for each in answer.json()]

    def console(self, sandbox: str) -> str:
        """Return what a fake guest said; empty if it is gone."""
        path = self.host.settings.sandboxes_dir / sandbox / "console.log"
        return path.read_text() if path.exists() else ""

    async def leave(  # noqa: PLR0913 - all that a request has
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        missing: int = 0,
        begun: Callable[[], bool],
        more: str = "",
    ) -> None:
        """Send a request, wait until it has begun, and go away.

        Args:
            method: The request's.
            path: The request's.
            body: As much of its body as is sent.
            missing: How much of it is not.
            begun: Whether it has; asked again and again.
            more: More lines of its header.
        """
        more += f"Content-Length: {len(body) + missing}\r\n\r\n"
        async with RawClient(self.url) as client:
            client.say(REQUEST.format(method=method, path=path, more=more).encode() + body)
            await until(begun)


def descriptors() -> int:
    """Return how many files this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - its own descriptor is one, too


@contextlib.asynccontextmanager
async def served_host(  # noqa: PLR0913 - how a daemon can be
    host: FakeHost,
    *,
    limits: ClientLimits = UNIX,
    knobs: str = "",
    bind: Bind | None = None,
    baked: bool = False,
    auditor: Auditor | None = None,
) -> AsyncIterator[Served]:
    """Serve a host with a snapshot `python`, baked with `knobs`; it has nothing else then.

    One that is `baked` was served before.  With `bind` it is served on TCP too, where failed
    log-ins are answered at once.  With an `auditor` requests are written down.
    """
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as folder:
        socket, state_dir = Path(folder) / "forkd.sock", host.settings.state_dir
        settings = Settings(socket=socket, bind=bind, state_dir=state_dir)
        async with host.service() as service:
            if not baked:
                await host.bake(service, host.recipe(knobs=knobs))
            app = create_app(service, lambda: service.tasks.failure)
            if auditor is not None:
                auditor.name_by(app.routes)
            async with listening(
                app, settings, service.tokens, unix=limits, tcp=AT_ONCE, auditor=auditor
            ) as urls:
                transport = httpx.AsyncHTTPTransport(uds=str(socket), verify=False)
                async with httpx.AsyncClient(
                    transport=transport, base_url="http://forkd", timeout=60.0
                ) as http:
                    url, tcp_url = (*urls, "")[:2]
                    yield Served(url, tcp_url, app, service, host, http)
