"""Names, labels, lives and pages, as HTTP shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.fake_history import THEN
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemon import RunningDaemon

NOW = int(THEN.timestamp())


@pytest.fixture
def http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    daemon.service.stored = some_snapshots(*(f"s{number}" for number in range(5)))
    transport = httpx.HTTPTransport(uds=daemon.url.removeprefix("unix://"), verify=False)
    with httpx.Client(transport=transport, base_url="http://forkd") as client:
        yield client


def fork(http: httpx.Client, **members: object) -> dict[str, Any]:
    answer = http.post("/v2/sandboxes", json={"snapshot_tag": "s0", **members})
    assert answer.status_code == 201, answer.text
    (made,) = answer.json()
    return dict(made)


def test_a_name_is_taken_wherever_an_id_is(http: httpx.Client) -> None:
    id_ = fork(http, name="web.1", labels={"team": "a"}, env={"SECRET": "x"})["id"]

    found = http.get("/v2/sandboxes/web.1")
    assert (found.json()["id"], found.json()["name"]) == (id_, "web.1")
    assert found.json()["labels"] == {"team": "a"}
    assert "SECRET" not in found.text
    assert http.post("/v2/sandboxes/web.1/ping").status_code == 200
    said = http.post("/v2/sandboxes/web.1/exec", json={"args": ["echo", "hello"]})
    assert said.json()["stdout"] == "hello\n"
    assert http.get("/v2/tree", params={"sandbox_id": "web.1"}).json()["roots"][0]["id"] == id_
    assert http.delete("/v2/sandboxes/web.1").status_code == 204
    gone = http.post("/v2/sandboxes/web.1/ping")
    assert (gone.status_code, gone.json()["error"]) == (404, "no sandbox is named web.1")


def test_a_member_that_is_left_out_stays_and_null_removes(http: httpx.Client) -> None:
    path = f"/v2/sandboxes/{fork(http, name='web', labels={'a': '1'}, ttl_secs=60)['id']}"
    assert http.get(path).json()["expires_at_unix"] == NOW + 60

    changed = http.patch(path, json={"ttl_secs": "default"}).json()
    assert changed["expires_at_unix"] == NOW + 300
    assert (changed["name"], changed["labels"]) == ("web", {"a": "1"})
    changed = http.patch(path, json={"ttl_secs": None, "name": None, "labels": {"b": ""}}).json()
    assert changed["expires_at_unix"] is None
    assert (changed["name"], changed["labels"]) == (None, {"b": ""})
    assert http.get(path).json() == changed


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "name"),
        ({"name": "Web"}, "name"),
        ({"labels": None}, "labels"),
        ({"labels": {"a": 1}}, "labels"),
        ({"labels": {"k" * (64 << 10): "v"}}, "labels"),
        ({"labels": {f"k{number}": "" for number in range(65)}}, "labels"),
        ({"ttl_secs": -5}, "ttl_secs"),
        ({"ttl_secs": True}, "ttl_secs"),
        ({"ttl_secs": "5m"}, "ttl_secs"),
        ({"ttl_secs": 365 * 24 * 3600 + 1}, "ttl_secs"),
        ({"env": {"A": "b"}}, "env"),
    ],
)
def test_a_wrong_change_is_one_short_error_that_names_the_member(
    http: httpx.Client, body: dict[str, object], field: str
) -> None:
    path = f"/v2/sandboxes/{fork(http)['id']}"
    before = http.get(path).json()

    refused = http.patch(path, json=body)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
    assert refused.json()["field"] == field
    assert len(refused.text) < 500
    assert http.get(path).json() == before


def test_two_sandboxes_have_no_common_name(http: httpx.Client) -> None:
    fork(http, name="web")

    taken = http.post("/v2/sandboxes", json={"snapshot_tag": "s0", "name": "web"})
    assert (taken.status_code, taken.json()["field"]) == (409, "name")
    many = http.post("/v2/sandboxes", json={"snapshot_tag": "s0", "name": "db", "n": 2})
    assert (many.status_code, many.json()["field"]) == (400, "name")


def test_a_list_is_filtered_by_all_that_is_asked_for(http: httpx.Client) -> None:
    one = fork(http, labels={"team": "a", "run": "1"})["id"]
    two = fork(http, name="two", labels={"team": "b"})["id"]
    fork(http)

    def ids(*query: tuple[str, str]) -> list[str]:
        answer = http.get("/v2/sandboxes", params=query)
        assert answer.status_code == 200, answer.text
        return [each["id"] for each in answer.json()]

    assert ids(("label", "team")) == [one, two]
    assert ids(("label", "team=a")) == [one]
    assert ids(("label", "team"), ("label", "run=1")) == [one]
    assert ids(("label", "team"), ("name", "two")) == [two]
    assert ids(("status", "exited")) == []
    assert len(ids(("status", "running"))) == 3
    for query in (
        {"label": "=x"},
        {"status": "dead"},
        {"name": "A"},
        {"limit": "0"},
        {"after": "x"},
    ):
        assert http.get("/v2/sandboxes", params=query).status_code == 400


@pytest.mark.parametrize(
    "path", ["/v2/sandboxes", "/v2/snapshots", "/v2/tokens", "/v2/secrets", "/v2/tree"]
)
def test_every_list_comes_in_pages(http: httpx.Client, path: str) -> None:
    for number in range(5):
        fork(http)
        http.post("/v2/tokens", json={"name": f"t{number}", "scopes": ["read"]})
        secret = {"value": "12345678", "hosts": ["example.com"]}
        http.put(f"/v2/secrets/s{number}", json=secret)

    def part(**query: str) -> tuple[list[str], str | None]:
        answer = http.get(path, params=query)
        found = answer.json()
        items = found["roots"] if path == "/v2/tree" else found
        names = [each.get("id") or each.get("tag") or each["name"] for each in items]
        return names, answer.headers.get("Forkd-Next")

    whole, more = part()
    assert (len(whole), more) == (5, None)
    names, more = part(limit="2")
    while more is not None:
        page, more = part(limit="2", after=more)
        names += page
    assert sorted(names) == sorted(whole)
