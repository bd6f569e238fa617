"""What clients of earlier versions send is taken, and what they read is still there.

`protocol/rest/published.json` is the API as it was published once: entries are added to it, never
removed or changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemon import RunningDaemon

FOLDER = Path(__file__).parents[2] / "protocol/rest"
PUBLISHED: dict[str, Any] = json.loads((FOLDER / "published.json").read_text(encoding="utf-8"))
NOW: dict[str, Any] = json.loads((FOLDER / "openapi-v2.json").read_text(encoding="utf-8"))
SCHEMAS = NOW["components"]["schemas"]
ANSWERS = [each for each in PUBLISHED["schemas"] if each not in PUBLISHED["requests"]]

SENT: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/v2/sandboxes", {"snapshot_tag": "warm", "n": 2}),
    (
        "POST",
        "/v2/sandboxes",
        {
            "snapshot_tag": "warm",
            "n": 1,
            "memory_limit_mib": 256,
            "disk_limit_mib": 1024,
            "cpu_limit": 1.5,
            "network": ["example.com:443"],
            "hold_egress": True,
            "all_or_nothing": True,
            "deadline_secs": 60.0,
            "ttl_secs": 600.0,
            "wait": True,
        },
    ),
    ("POST", "/v2/sandboxes", {"snapshot_tag": "warm", "ttl_secs": None, "secrets": []}),
    ("GET", "/v2/sandboxes?snapshot_tag=warm", None),
    ("GET", "/v2/sandboxes/{id}", None),
    ("PATCH", "/v2/sandboxes/{id}/limits", {"cpu_limit": 2.0}),
    ("POST", "/v2/sandboxes/{id}/ping", None),
    ("POST", "/v2/sandboxes/{id}/exec", {"args": ["echo", "hello"], "timeout_secs": 30.0}),
    ("POST", "/v2/sandboxes/{id}/eval", {"code": "6 * 7", "timeout_secs": 30.0}),
    ("POST", "/v2/sandboxes/{id}/reset", {"deadline_secs": 60.0}),
    (
        "POST",
        "/v2/sandboxes/{id}/branch",
        {"n": 1, "all_or_nothing": True, "deadline_secs": 60.0, "ttl_secs": 60.0, "wait": True},
    ),
    ("GET", "/v2/tree", None),
    ("GET", "/v2/usage", None),
    ("POST", "/v2/snapshots", {"tag": "made", "recipe": "good"}),
    ("GET", "/v2/snapshots", None),
    ("GET", "/v2/snapshots/warm/info", None),
    ("POST", "/v2/tokens", {"name": "ci", "scopes": ["read"], "tenant": "default"}),
    ("GET", "/v2/tokens", None),
    ("GET", "/v2/tenants", None),
    ("GET", "/v2/secrets", None),
    ("DELETE", "/v2/sandboxes/{id}", None),
)
"""Requests as the SDK has sent them before sandboxes had names."""


@pytest.fixture
def http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    daemon.service.stored = some_snapshots("warm")
    transport = httpx.HTTPTransport(uds=daemon.url.removeprefix("unix://"), verify=False)
    with httpx.Client(transport=transport, base_url="http://forkd") as client:
        yield client


def test_every_published_operation_is_there_with_its_parameters() -> None:
    for operation in PUBLISHED["operations"]:
        method, path = operation.split()
        found = NOW["paths"][path][method.lower()]
        names = {each["name"] for each in found.get("parameters", [])}
        assert names >= set(PUBLISHED["parameters"].get(operation, [])), operation
        required = {each["name"] for each in found.get("parameters", []) if each.get("required")}
        assert required <= set(PUBLISHED["parameters"].get(operation, [])), operation


@pytest.mark.parametrize("name", PUBLISHED["requests"])
def test_a_request_takes_the_members_that_it_took_and_needs_no_other(name: str) -> None:
    published = PUBLISHED["schemas"][name]

    assert set(SCHEMAS[name].get("properties", {})) >= set(published["properties"])
    assert set(SCHEMAS[name].get("required", [])) <= set(published["required"])


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_the_members_that_it_had(name: str) -> None:
    published = PUBLISHED["schemas"][name]

    assert set(SCHEMAS[name].get("properties", {})) >= set(published["properties"])
    assert set(SCHEMAS[name].get("required", [])) >= set(published["required"])


def test_what_was_sent_before_is_done(http: httpx.Client) -> None:
    (made,) = http.post("/v2/sandboxes", json={"snapshot_tag": "warm", "cpu_limit": 1.0}).json()
    assert set(made) >= set(PUBLISHED["schemas"]["SandboxInfo"]["properties"])
    for method, path, body in SENT:
        answer = http.request(method, path.replace("{id}", made["id"]), json=body)
        assert answer.is_success, (method, path, answer.text)
        for each in answer.json() if path.startswith("/v2/sandboxes") and method == "GET" else ():
            if isinstance(each, dict):
                assert set(each) >= set(PUBLISHED["schemas"]["SandboxInfo"]["properties"])


@pytest.mark.parametrize(
    ("schema", "statuses"),
    [
        ("SandboxInfo", {"starting", "running", "stopping", "exited"}),
        ("TreeNode", {"starting", "running", "stopping", "exited", "gone"}),
    ],
)
def test_a_sandbox_has_no_status_that_published_clients_refuse(
    schema: str, statuses: set[str]
) -> None:
    said = SCHEMAS[schema]["properties"]["status"]
    choices = said.get("anyOf", [said])
    named = {name for each in choices for name in each.get("enum", [each.get("const")])}

    assert named == statuses
