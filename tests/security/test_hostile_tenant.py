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
from tests.support import real_host, service_host
from tests.support.fake_daemon import FakeDaemon
from tests.support.hostile_tenant import DEEDS, Orders, at_work
from tests.support.real_daemon import running_daemon
from tests.support.real_host import REAL, RECIPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.bakes import Bakes
    from tests.support.service_host import FakeHost
    from tests.support.soak import Soak

QUIET = 10
"""How many sandboxes the quiet tenant has."""

SLOWED_MAX = 2.0

SCOPES = ["read", "run", "snapshots"]

HOSTILE_S, HOSTILE_SOAK_S = 60.0, 3_600.0
"""How long the hostile one works at most; in a run, it ends as soon as the quiet one was asked."""


@dataclass(frozen=True)
class Plan:
    """How long a run is, and of what.

    Attributes:
        tag: The snapshot that both tenants fork.
        code: Python that is 42 in it.
        turns: How often the quiet one asks each sandbox while the other is stopped, and then while
            it works.
        soak_turns: The same in a soak.
    """

    tag: str
    code: str
    turns: int
    soak_turns: int


FAKES = Plan(service_host.TAG, "answer", turns=12, soak_turns=2_400)
MACHINES = Plan(real_host.TAG, "int(numpy.full(6, 7).sum())", turns=4, soak_turns=400)


@dataclass
class Quiet:
    """The quiet tenant: what it has, and how quickly it is answered."""

    http: httpx.Client
    plan: Plan
    sandboxes: list[str]

    def asked_ms(self, times: int) -> list[float]:
        """Ask each sandbox so often; return how long each answer took."""
        taken_ms = []
        for _ in range(times):
            for each in self.sandboxes:
                began_s = time.perf_counter()
                given = self.http.post(f"/v2/sandboxes/{each}/eval", json={"code": self.plan.code})
                taken_ms.append((time.perf_counter() - began_s) * 1e3)
                assert (given.status_code, given.json()["value"]) == (200, 42), given.text
        return taken_ms

    def still_has_all(self) -> bool:
        """Whether its sandboxes are there and run."""
        listed = {each["id"]: each for each in self.http.get("/v2/sandboxes").json()}
        states = [listed.get(each, {}).get("status") for each in self.sandboxes]
        return states == ["running"] * len(self.sandboxes) and len(listed) == len(states)


def token(admin: httpx.Client, tenant: str) -> str:
    """Return a token of a tenant."""
    body = {"name": tenant, "tenant": tenant, "scopes": SCOPES}
    made = admin.post("/v2/tokens", json=body)
    assert made.status_code == 201, made.text
    secret: str = made.json()["token"]
    return secret


@contextlib.contextmanager
def quiet_of(admin: httpx.Client, url: str, plan: Plan) -> Iterator[Quiet]:
    """The quiet tenant with its sandboxes; they are gone afterwards."""
    headers = {"Authorization": f"Bearer {token(admin, 'quiet')}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60.0, trust_env=False) as http:
        given = http.post("/v2/sandboxes", json={"snapshot_tag": plan.tag, "n": QUIET})
        assert given.status_code == 201, given.text
        secret = {"value": "of the quiet one", "hosts": ["quiet.example.com"]}
        assert http.put("/v2/secrets/quiet-secret", json=secret).is_success
        made = Quiet(http, plan, [each["id"] for each in given.json()])
        try:
            yield made
        finally:
            for each in made.sandboxes:
                http.delete(f"/v2/sandboxes/{each}")


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_nothing_of_another_tenant_is_reached_told_or_slowed(
    fake_host: FakeHost, soak: Soak, tell: Callable[[str], None]
) -> None:
    proc.raise_open_files_limit()
    with FakeDaemon(fake_host, tcp=True) as daemon:
        body = {"tag": FAKES.tag, "recipe": str(fake_host.recipe())}
        assert daemon.http.post("/v2/snapshots", json=body).status_code == 201
        endure(daemon.http, daemon.tcp_url, FAKES, soak, tell)


@REAL
@pytest.mark.soak(only=True)
@pytest.mark.timeout(300)
def test_nothing_of_another_tenants_machines_is_reached_told_or_slowed(
    bakes: Bakes, soak: Soak, tell: Callable[[str], None]
) -> None:
    proc.raise_open_files_limit()
    with running_daemon(bakes.of(RECIPE), tcp=True) as daemon:
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=daemon.url.removeprefix("unix://"), verify=False),
            base_url="http://forkd",
            timeout=60.0,
        ) as admin:
            answers = endure(admin, daemon.tcp_url, MACHINES, soak, tell, network=True)
        assert answers["questions"]["200"] > 0
        assert answers["proxied"]["200"] > 0


def endure(  # noqa: PLR0913 - what makes a run
    admin: httpx.Client,
    url: str,
    plan: Plan,
    soak: Soak,
    tell: Callable[[str], None],
    *,
    network: bool = False,
) -> dict[str, dict[str, int]]:
    """Have a hostile tenant beside the quiet one; return how its deeds were answered."""
    shared = admin.put(f"/v2/snapshots/{plan.tag}/shared", json={"shared": True})
    assert shared.status_code == 200, shared.text
    with quiet_of(admin, url, plan) as quiet:
        others = [*quiet.sandboxes, "quiet-secret", "token:quiet"]
        seconds = HOSTILE_SOAK_S if soak.in_full else HOSTILE_S
        alone_ms: list[float] = []
        beside_ms: list[float] = []
        orders = Orders(url, token(admin, "hostile"), plan.tag, others, seconds, network)
        with at_work(orders) as hostile:
            quiet.asked_ms(2)  # uncounted: first questions begin what goes on
            for _ in range(soak.count(plan.turns, plan.soak_turns)):
                # In turns, so that whatever else this machine does slows both.
                hostile.stand_still()
                alone_ms += quiet.asked_ms(1)
                hostile.go_on()
                beside_ms += quiet.asked_ms(1)
            hostile.until_all_is_done()
        assert quiet.still_has_all()
        alone, beside = statistics.median(alone_ms), statistics.median(beside_ms)
        p99 = [statistics.quantiles(each, n=100)[98] for each in (alone_ms, beside_ms)]
        tell(
            f"eval of {QUIET} quiet ones: {alone:.2f} ms alone, {beside:.2f} ms beside, p99 "
            f"{p99[0]:.2f} and {p99[1]:.2f} ms; {hostile.said['answers']}"
        )

        assert hostile.said["told"] == []
        assert hostile.said["reached"] == []
        answers: dict[str, dict[str, int]] = hostile.said["answers"]
        assert_it_did_what_it_can(answers)
        assert beside <= SLOWED_MAX * alone
    assert admin.get("/v2/sandboxes").json() == []
    return answers


def assert_it_did_what_it_can(answers: dict[str, dict[str, int]]) -> None:
    """Check that each deed that needs no other was tried, and that none crashed the daemon."""
    assert set(answers) >= DEEDS
    crashed = {deed: found for deed, found in answers.items() if "500" in found}
    assert not crashed
    # 408 is for a request that was under way when the tenant was stopped.
    assert set(answers["GET /metrics"]) <= {"403", "408", "503"}
    assert set(answers["GET /v2/tokens"]) <= {"403", "408", "503"}
    assert answers["streams"]["200"] > 0
