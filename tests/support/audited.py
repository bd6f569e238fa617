"""A daemon in this process, over a fake service, that writes down what it is asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import httpx

from forkd.daemon.app import create_app
from forkd.daemon.auditing import Auditor
from forkd.daemon.clients import TCP
from forkd.daemon.reloading import Reloads
from forkd.daemon.server import listening
from forkd.daemon.settings import Bind, Settings
from forkd.model.caller import DEFAULT_TENANT, Scope
from forkd.model.token import NewToken, TokenRequest
from forkd.telemetry.audit import AuditLog
from tests.support.callers import CALLER
from tests.support.fake_service import FakeService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import datetime
    from pathlib import Path

    from forkd.model.caller import Tenant

DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Audited:
    """A daemon with its audit log.

    Attributes:
        unix_url: Its Unix socket.
        url: Its TCP address.
        secret: The token of its file.
    """

    unix_url: str
    url: str
    service: FakeService
    folder: Path
    log: AuditLog
    reloads: Reloads

    @property
    def secret(self) -> str:
        return (self.folder / "token").read_text()

    def http(self, secret: str | None = None) -> httpx.AsyncClient:
        """Return a client of TCP, with a token; None for that of the file."""
        headers = {"Authorization": f"Bearer {self.secret if secret is None else secret}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, verify=False)  # noqa: S501 - plain

    def unix(self) -> httpx.AsyncClient:
        """Return a client of the Unix socket."""
        path = self.unix_url.removeprefix("unix://")
        transport = httpx.AsyncHTTPTransport(uds=path, verify=False)
        return httpx.AsyncClient(transport=transport, base_url="http://forkd")

    async def token(
        self,
        *scopes: Scope,
        name: str = "ci",
        tenant: Tenant = DEFAULT_TENANT,
        expires_at: datetime | None = None,
    ) -> NewToken:
        """Make a token."""
        request = TokenRequest(name, tenant, frozenset(scopes), expires_at)
        return await self.service.tokens.create(CALLER, request)

    async def lines(self, count: int) -> list[dict[str, Any]]:
        """Return the lines of the log, as soon as there are so many."""
        async with asyncio.timeout(DEADLINE_S):
            while len(found := lines_of(self.log.path)) < count:  # noqa: ASYNC110 - of another thread
                await asyncio.sleep(0.001)
        assert len(found) == count, found[count:]
        return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of an audit log."""
    return [json.loads(each) for each in path.read_text().splitlines()]


@contextlib.asynccontextmanager
async def audited(
    folder: Path,
    *,
    login_delay_s: float = 0.0,
    **settings: Any,  # noqa: ANN401 - of `Settings`
) -> AsyncIterator[Audited]:
    """Serve a fake service on a Unix socket and on TCP."""
    given = Settings(
        socket=folder / "forkd.sock",
        bind=Bind("127.0.0.1", 0),
        state_dir=folder,
        **settings,
    )
    service = FakeService()
    app = create_app(service)
    assert given.audit_path is not None
    with contextlib.closing(AuditLog(given.audit_path, given.audit_full)) as log:
        auditor = Auditor(log)
        auditor.name_by(app.routes)
        reloads = Reloads(auditor, given)
        reloads.add("audit_log", auditor.reopen)
        tcp = replace(TCP, login_delay_s=login_delay_s)
        async with listening(
            app, given, service.tokens, tcp=tcp, auditor=auditor, reloads=reloads
        ) as (unix_url, url):
            yield Audited(unix_url, url, service, folder, log, reloads)
