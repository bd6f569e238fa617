"""What buffered execs and evals keep of outputs is bounded for all of them together."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from forkd.limits import OUTPUTS_BYTES_MAX
from forkd.model.output import PIECE_BYTES, OutputBudget
from tests.support.callers import CALLER
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemon import RunningDaemon

BUDGET = 10


@pytest.fixture
def budget(daemon: RunningDaemon) -> Iterator[OutputBudget]:
    """A budget of ten bytes for all; whatever a test does they are free again afterwards."""
    before = daemon.app.state.outputs
    assert before.free_bytes == OUTPUTS_BYTES_MAX
    made = daemon.app.state.outputs = OutputBudget(BUDGET)
    yield made
    daemon.app.state.outputs = before
    assert (made.free_bytes, before.free_bytes) == (BUDGET, OUTPUTS_BYTES_MAX)


@pytest.fixture
def http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    daemon.service.stored = some_snapshots("warm")
    transport = httpx.HTTPTransport(uds=daemon.url.removeprefix("unix://"), verify=False)
    with httpx.Client(transport=transport, base_url="http://forkd") as client:
        id_ = client.post("/v2/sandboxes", json={"snapshot_tag": "warm"}).json()[0]["id"]
        client.base_url = client.base_url.join(f"/v2/sandboxes/{id_}/")
        yield client


def exec_(http: httpx.Client, *args: str, **members: object) -> dict[str, Any]:
    answer = http.post("exec", json={"args": args, **members}, timeout=30)
    assert answer.headers["content-type"] == "application/json"
    http.get("/healthz")  # an output is released just after its answer, so before this one
    said: dict[str, Any] = answer.raise_for_status().json()
    return said


def test_output_that_finds_no_room_is_dropped_and_said_to_be(
    http: httpx.Client, budget: OutputBudget
) -> None:
    fits = exec_(http, "spew", str(BUDGET))
    beyond = exec_(http, "spew", str(BUDGET + 1))

    assert (fits["stdout"], fits["truncated"]) == ("x" * BUDGET, False)
    assert (beyond["stdout"], beyond["truncated"]) == ("x" * BUDGET, True)
    assert budget.free_bytes == BUDGET


def test_evals_take_from_the_same_budget(http: httpx.Client, budget: OutputBudget) -> None:
    said = http.post("eval", json={"code": f"print('x' * {BUDGET})"}).json()
    http.get("/healthz")

    assert said["stdout"] == "x" * BUDGET
    assert budget.free_bytes == BUDGET


def test_what_one_keeps_another_does_not_have_until_it_was_answered(
    http: httpx.Client, budget: OutputBudget
) -> None:
    with holding(budget, BUDGET - 3):
        program = exec_(http, "spew", "5")
        code = http.post("eval", json={"code": "print('yyyyyy')"}).json()
        http.get("/healthz")
    again = exec_(http, "spew", "5")

    assert (program["stdout"], program["truncated"]) == ("xxx", True)
    assert (code["stdout"], code["truncated"]) == ("yyy", True)
    assert (again["stdout"], again["truncated"]) == ("xxxxx", False)


@contextlib.contextmanager
def holding(budget: OutputBudget, length: int) -> Iterator[None]:
    with budget.keep(CALLER, length) as kept:
        kept.add(bytes(length))
        yield


def test_a_long_answer_is_the_same_as_a_short_one(http: httpx.Client) -> None:
    """Beyond a piece it is encoded while it is sent: quotes, line ends, several bytes a letter."""
    text = 'a "quoted" line\n\x00\\ é€😀 ' * (3 * PIECE_BYTES // 20)

    said = exec_(http, "cat", stdin=text)

    assert said == exec_(http, "cat", stdin="short") | {"stdout": text}
