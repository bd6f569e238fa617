"""One tenant does all that it can: nothing of another's is reached, told, or slowed beyond twice.

The hostile one is a process of its own (`tests/support/hostile_tenant.py`) with every scope that is
about one tenant, at the daemon's TCP port.  The quiet one has ten sandboxes and asks each of them.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest

from forkd.host import proc
from tests.support.fake_daemon import FakeDaemon
from tests.support.hostile_tenant import Orders, at_work
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.service_host import FakeHost
    from tests.support.soak import Soak

QUIET = 10
"""How many sandboxes the quiet tenant has."""

TURNS = 12
"""How often it asks each of them while the other is idle, and while it works."""

SLOWED_MAX = 2.0

SCOPES = ["read", "run", "snapshots"]

HOSTILE_S, HOSTILE_SOAK_S = 60.0, 3_600.0
"""How long the hostile one works at most; in a run, it ends as soon as the quiet one was asked."""


@dataclass
class Quiet:
    """The quiet tenant: what it has, and how quickly it is answered."""

    http: httpx.Client
    sandboxes: list[str]

    def asked_ms(self, times: int) -> list[float]:
        """Ask each sandbox so often; return how long each answer took."""
        taken_ms = []
        for _ in range(times):
            for each in self.sandboxes:
                began_s = time.perf_counter()
                given = self.http.post(f"/v2/sandboxes/{each}/eval", json={"code": "answer"})
                taken_ms.append((time.perf_counter() - began_s) * 1e3)
                assert (given.status_code, given.json()["value"]) == (200, 42), given.text
        return taken_ms

    def still_has_all(self) -> bool:
        """Whether its sandboxes are there and run."""
        listed = {each["id"]: each for each in self.http.get("/v2/sandboxes").json()}
        states = [listed.get(each, {}).get("status") for each in self.sandboxes]
        return states == ["running"] * len(self.sandboxes) and len(listed) == len(states)


def token(daemon: FakeDaemon, tenant: str) -> str:
    """Return a token of a tenant."""
    body = {"name": tenant, "tenant": tenant, "scopes": SCOPES}
    made = daemon.http.post("/v2/tokens", json=body)
    assert made.status_code == 201, made.text
    secret: str = made.json()["token"]
    return secret


@contextlib.contextmanager
def quiet_of(daemon: FakeDaemon, tag: str) -> Iterator[Quiet]:
    headers = {"Authorization": f"Bearer {token(daemon, 'quiet')}"}
    with httpx.Client(
        base_url=daemon.tcp_url, headers=headers, timeout=60.0, trust_env=False
    ) as http:
        given = http.post("/v2/sandboxes", json={"snapshot_tag": tag, "n": QUIET})
        assert given.status_code == 201, given.text
        secret = {"value": "of the quiet one", "hosts": ["quiet.example.com"]}
        assert http.put("/v2/secrets/quiet-secret", json=secret).is_success
        made = Quiet(http, [each["id"] for each in given.json()])
        try:
            yield made
        finally:
            for each in made.sandboxes:
                http.delete(f"/v2/sandboxes/{each}")


@pytest.fixture
def daemon(fake_host: FakeHost) -> Iterator[FakeDaemon]:
    """A daemon with a snapshot that all tenants may fork, and which has been forked."""
    proc.raise_open_files_limit()
    with FakeDaemon(fake_host, tcp=True) as made:
        body = {"tag": TAG, "recipe": str(fake_host.recipe())}
        assert made.http.post("/v2/snapshots", json=body).status_code == 201
        shared = made.http.put(f"/v2/snapshots/{TAG}/shared", json={"shared": True})
        assert shared.status_code == 200
        yield made


@pytest.mark.soak(
    only=True
)  # each promise alone: test_rights.py, test_daemon_pacing.py, test_model_shares.py
@pytest.mark.timeout(180)
def test_nothing_of_another_tenant_is_reached_told_or_slowed(
    daemon: FakeDaemon, soak: Soak, tell: Callable[[str], None]
) -> None:
    with quiet_of(daemon, TAG) as quiet:
        others = [*quiet.sandboxes, "quiet-secret", "token:quiet"]
        seconds = HOSTILE_SOAK_S if soak.in_full else HOSTILE_S
        alone_ms: list[float] = []
        beside_ms: list[float] = []
        orders = Orders(daemon.tcp_url, token(daemon, "hostile"), TAG, others, seconds)
        with at_work(orders) as hostile:
            quiet.asked_ms(2)  # uncounted: first questions begin what goes on
            for _ in range(soak.count(TURNS, 200 * TURNS)):
                # In turns, so that whatever else this machine does slows both.
                hostile.stand_still()
                alone_ms += quiet.asked_ms(1)
                hostile.go_on()
                beside_ms += quiet.asked_ms(1)
        assert quiet.still_has_all()
        alone, beside = statistics.median(alone_ms), statistics.median(beside_ms)
        p99 = [statistics.quantiles(each, n=100)[98] for each in (alone_ms, beside_ms)]
        tell(
            f"eval of {QUIET} quiet ones: {alone:.2f} ms alone, {beside:.2f} ms beside, p99 "
            f"{p99[0]:.2f} and {p99[1]:.2f} ms; {hostile.said['answers']}"
        )

        assert hostile.said["told"] == []
        assert hostile.said["reached"] == []
        assert_it_did_what_it_can(hostile.said["answers"])
        assert beside <= SLOWED_MAX * alone
    assert daemon.http.get("/v2/sandboxes").json() == []


def assert_it_did_what_it_can(answers: dict[str, dict[str, int]]) -> None:
    """Check that each deed that needs no other was tried, and that none crashed the daemon."""
    deeds = {"streams", "sockets", "bodies", "uploads", "secrets", "branches", "packs"}
    assert deeds | {"snoop"} <= set(answers)
    crashed = {deed: found for deed, found in answers.items() if "500" in found}
    assert not crashed
    assert set(answers["GET /metrics"]) <= {"403", "503"}
    assert set(answers["GET /v2/tokens"]) <= {"403", "503"}
    assert answers["streams"]["200"] > 0
