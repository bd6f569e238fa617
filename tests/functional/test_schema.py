"""Requests made from our own OpenAPI documents: none crashes the daemon, hangs, or leaves anything.

`schemathesis` makes requests that the document allows, from it alone; half of them are sent by
whoever may do anything, the others with a token that may only look.  Failed log-ins are slowed
down, so only some have no token.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from schemathesis.core.result import Ok

from forkd.daemon.auth import TOKEN_FILE
from forkd.daemon.logins import FREE
from tests.support.fake_daemon import FakeDaemon
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.service_host import FakeHost
    from tests.support.soak import Soak

pytestmark = [pytest.mark.soak, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = {"/v1": "openapi-v1.json", "": "openapi-v2.json"}

REQUESTS, REQUESTS_IN_FULL = 300, 100_000

ANSWER_TIMEOUT_S = 20.0
"""A request that is not answered by then hangs."""

ENDLESS = ("text/event-stream", "text/plain")
"""Answers that may go on for ever, of which the beginning is enough."""

QUOTAS = {"sandboxes": 20, "snapshot_mib": 2_000}
"""What all requests together may have; a fork may ask for ten thousand."""

SERVER_ERROR = 500


@schemathesis.serializer("application/x-tar")
def as_it_is(_: Any, value: Any) -> bytes:  # noqa: ANN401 - not typed
    """Send something as an archive that is none, most of the time."""
    return value if isinstance(value, bytes) else str(value).encode(errors="replace")


def operations() -> Iterator[tuple[str, Any]]:
    """Yield each operation of both documents, with what comes before its path."""
    for prefix, name in DOCUMENTS.items():
        document = json.loads((ROOT / "protocol/rest" / name).read_text(encoding="utf-8"))
        for each in schemathesis.openapi.from_dict(document).get_all_operations():
            assert isinstance(each, Ok), each
            yield prefix, each.ok()


def requests_of(operation: Any, base_url: str, count: int, number: int) -> list[dict[str, Any]]:  # noqa: ANN401 - not typed
    """Return up to so many requests that an operation allows; the same for the same number."""
    made: list[dict[str, Any]] = []

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def make(case: Any) -> None:  # noqa: ANN401 - not typed
        made.append(case.as_transport_kwargs(base_url=base_url))

    make()
    return made


def callers(daemon: FakeDaemon) -> dict[str, dict[str, str]]:
    """Return what callers show, by what they may."""
    scopes = {"name": "looks", "scopes": ["read"]}
    looks = daemon.http.post("/v2/tokens", json=scopes).json()["token"]
    anything = (daemon.host.settings.state_dir / TOKEN_FILE).read_text().strip()
    tokens = {"anything": anything, "looks": looks}
    return {name: {"Authorization": f"Bearer {token}"} for name, token in tokens.items()}


def send(http: httpx.Client, request: dict[str, Any], headers: dict[str, str]) -> int | None:
    """Send a request; return the status, None if it could not be sent as it is."""
    try:
        data = request.pop("data", None)
        content = {"content": data} if isinstance(data, bytes | str) else {"data": data}
        made = http.build_request(**request, **content)
        made.headers.update(headers)
        with contextlib.closing(http.send(made, stream=True)) as answer:
            if not answer.headers.get("content-type", "").startswith(ENDLESS):
                answer.read()
            return answer.status_code
    except (httpx.InvalidURL, httpx.LocalProtocolError, UnicodeError, TypeError):
        return None


def test_whatever_the_documents_allow_is_answered_and_leaves_nothing(
    fake_host: FakeHost, soak: Soak, tell: Callable[[str], None]
) -> None:
    wanted = soak.count(REQUESTS, REQUESTS_IN_FULL)
    every = list(operations())
    statuses: Counter[int | None] = Counter()
    failed: list[str] = []
    dice = soak.dice()
    with FakeDaemon(fake_host, tcp=True) as daemon:
        body = {"tag": TAG, "recipe": str(fake_host.recipe())}
        assert daemon.http.post("/v2/snapshots", json=body).status_code == 201
        assert daemon.http.put("/v2/tenants/default/quotas", json=QUOTAS).status_code == 200
        turns = cycle(callers(daemon).items())
        left = every
        with httpx.Client(timeout=ANSWER_TIMEOUT_S) as http:
            while left and (missing := wanted - sum(statuses.values())) > 0:
                each_count, full = -(-missing // len(left)), []
                for prefix, operation in left:
                    url, number = daemon.tcp_url + prefix, dice.randrange(1 << 32)
                    requests = requests_of(operation, url, each_count, number)
                    if len(requests) == each_count:
                        full.append((prefix, operation))
                    for request in requests:
                        who, headers = next(turns) if statuses[401] >= FREE else ("none", {})
                        status = send(http, request, headers)
                        statuses[status] += 1
                        if status is not None and status >= SERVER_ERROR:
                            failed.append(f"{who}: {operation.label}: {status}: {request}")
                # Of what has no more different requests than that, others make up for it.
                left = full
        tell(f"{sum(statuses.values())} requests of {len(every)} operations: {dict(statuses)}")
        assert sum(statuses.values()) >= wanted
        assert failed == []
        assert daemon.http.get("/readyz").json() == {"ready": True}
        for each in daemon.http.get("/v2/sandboxes").json():
            assert daemon.http.delete(f"/v2/sandboxes/{each['id']}").status_code == 204
    assert "crashed" not in daemon.log.read_text()
    assert fake_host.vmm_processes() == []
