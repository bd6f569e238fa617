"""What a hostile tenant costs another one: the part `tenants`.

    python -m benchmarks.tenants [--quick]

measures here, over the fake VMM of the tests; `make bench ARGS='--only tenants'` over real ones.
A quiet tenant forks one sandbox after the other over TCP: alone, before and after a hostile one
(`tests/support/hostile_tenant.py`) that does whatever its token lets it; and beside that one, in
turns while it works and while it is stopped with all that it holds.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks import over_fake
from benchmarks.clients import ANSWER_TIMEOUT_S, served
from benchmarks.harness import Json, Stopwatch, summary
from forkd.errors import EngineError
from forkd.host import proc
from tests.support.hostile_tenant import Orders, at_work

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.teller import Teller
    from forkd.model.ids import Tag
    from forkd.service.settings import HostSettings

SCOPES = ["read", "run", "snapshots"]

HOSTILE_S = 3_600.0
"""How long the hostile one works at most; it ends with the measurement."""

WARMUP = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """How many turns of each kind, and how many forks in each."""

    turns: int
    forks: int

    @property
    def steps(self) -> int:
        """How many steps are told."""
        return self.turns + 2


FULL = Plan(turns=20, forks=10)
QUICK = Plan(turns=5, forks=5)


class Tenant:
    """A tenant that asks over TCP."""

    def __init__(self, url: str, token: str, tag: Tag) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        self._tag = tag
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=ANSWER_TIMEOUT_S, trust_env=False
        )

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def forks_ms(self, count: int) -> list[float]:
        """Fork and end so many sandboxes, one after the other; return how long each fork took."""
        taken_ms = []
        for _ in range(count):
            clock = Stopwatch()
            made = self.fork()
            taken_ms.append(clock.ms())
            self.end(made)
        return taken_ms

    def fork(self) -> str:
        """Fork one sandbox; return its id."""
        body = {"snapshot_tag": self._tag}
        (made,) = checked(self._http.post("/v2/sandboxes", json=body)).json()
        return str(made["id"])

    def end(self, sandbox: str) -> None:
        """End a sandbox."""
        checked(self._http.delete(f"/v2/sandboxes/{sandbox}"))


def checked(answer: httpx.Response) -> httpx.Response:
    """Return an answer that is one.

    Raises:
        EngineError: The daemon refused.
    """
    if answer.is_error:
        raise EngineError(f"the daemon answered {answer.status_code}: {answer.text}")
    return answer


def ask_as_root(socket: Path, method: str, path: str, body: Json) -> Any:  # noqa: ANN401 - JSON
    """Ask over the Unix socket, as who may do anything."""
    transport = httpx.HTTPTransport(uds=str(socket), verify=False)
    with httpx.Client(transport=transport, base_url="http://forkd", timeout=60.0) as http:
        return checked(http.request(method, path, json=body)).json()


def token_of(socket: Path, tenant: str) -> str:
    """Return a new token of a tenant."""
    body = {"name": tenant, "tenant": tenant, "scopes": SCOPES}
    return str(ask_as_root(socket, "POST", "/v2/tokens", body)["token"])


async def measure(host: HostSettings, tag: Tag, teller: Teller, *, quick: bool) -> Json:
    """Serve a host on which there is a snapshot, measure, and return the figures.

    Raises:
        EngineError: The daemon did not start, or refused something.
    """
    return await asyncio.to_thread(_measure, host, tag, teller, QUICK if quick else FULL)


def _measure(host: HostSettings, tag: Tag, teller: Teller, plan: Plan) -> Json:
    proc.raise_open_files_limit()
    alone_ms: list[float] = []
    beside_ms: list[float] = []
    held_ms: list[float] = []
    alone_forks = plan.turns * plan.forks // 2
    with served(host) as (_, socket, url):
        ask_as_root(socket, "PUT", f"/v2/snapshots/{tag}/shared", {"shared": True})
        quiet = Tenant(url, token_of(socket, "quiet"), tag)
        kept = quiet.fork()
        orders = Orders(url, token_of(socket, "hostile"), tag, [kept], HOSTILE_S)
        quiet.forks_ms(WARMUP)
        teller.begin("forks of a tenant that is alone")
        alone_ms += quiet.forks_ms(alone_forks)
        with at_work(orders) as hostile:
            for number in range(plan.turns):
                teller.begin(f"forks beside a hostile tenant, turn {number + 1} of {plan.turns}")
                beside_ms += quiet.forks_ms(plan.forks)
                hostile.stand_still()
                held_ms += quiet.forks_ms(plan.forks)
                hostile.go_on()
        teller.begin("forks of a tenant that is alone again")
        alone_ms += quiet.forks_ms(alone_forks)
        quiet.end(kept)
        quiet.close()
    return lay_out(alone_ms, beside_ms, held_ms, hostile.said["answers"])


def lay_out(
    alone_ms: list[float], beside_ms: list[float], held_ms: list[float], answers: Json
) -> Json:
    """Return what is kept of it; `answers` says how the hostile one's deeds were answered."""
    alone, beside = summary(alone_ms), summary(beside_ms)
    return {
        "alone": alone,
        "beside": beside,
        "held": summary(held_ms),
        "p50_ratio": beside["p50_ms"] / alone["p50_ms"],
        "p99_ratio": beside["p99_ms"] / alone["p99_ms"],
        "answers": answers,
    }


if __name__ == "__main__":
    sys.exit(over_fake.main("tenants", __doc__, measure, (FULL.steps, QUICK.steps)))
