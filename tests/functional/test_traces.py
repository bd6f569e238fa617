"""A request is seen through all layers by whoever collects traces, and costs nothing otherwise."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from forkd.errors import InvalidRequest
from forkd.telemetry import exporting, tracing
from tests.support.collector import Collector, SeenSpan
from tests.support.served_host import Served, served_host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.service_host import FakeHost

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}

FORK = [
    "POST /v2/sandboxes",
    "  service fork",
    "    fork prepare",
    "      store put",
    "    store put",
    "    vmm fork",
]


@contextlib.asynccontextmanager
async def traced(host: FakeHost) -> AsyncIterator[tuple[Served, Collector]]:
    """Serve a host; what was traced has arrived after the block."""
    with Collector().running() as collector:
        async with exporting.exported(collector.url), served_host(host) as served:
            yield served, collector


def spans(collector: Collector, name: str) -> list[SeenSpan]:
    return [each for each in collector.spans if each.name == name]


async def test_a_fork_is_a_tree_of_spans_below_its_client(fake_host: FakeHost) -> None:
    async with traced(fake_host) as (served, collector):
        body = {"snapshot_tag": "python", "n": 2}
        answer = await served.http.post("/v2/sandboxes", json=body, headers=PARENT)
        for each in answer.json():
            await served.http.delete(f"/v2/sandboxes/{each['id']}")

    assert collector.tree(TRACE) == FORK
    (root,) = spans(collector, "POST /v2/sandboxes")
    assert root.parent == CLIENT
    assert root.attributes == {
        "forkd.request_id": answer.headers["X-Request-Id"],
        "http.request.method": "POST",
        "http.response.status_code": 201,
        "http.route": "/v2/sandboxes",
        "url.path": "/v2/sandboxes",
    }
    (fork,) = spans(collector, "vmm fork")
    assert fork.attributes == {"children": 2}


async def test_what_an_owner_does_belongs_to_the_request_that_asks(fake_host: FakeHost) -> None:
    async with traced(fake_host) as (served, collector):
        (sandbox,) = await served.fork()
        await served.http.delete(f"/v2/sandboxes/{sandbox}", headers=PARENT)

    assert collector.tree(TRACE) == [
        "DELETE /v2/sandboxes/{id}",
        "  service delete_sandbox",
        "    store put",
        "    store remove",
        "    vmm stop",
    ]


async def test_what_an_agent_is_asked_is_below_its_use_case(fake_host: FakeHost) -> None:
    async with traced(fake_host) as (served, collector):
        (sandbox,) = await served.fork()
        path, body = f"/v2/sandboxes/{sandbox}/eval", {"code": "answer"}
        await served.http.post(path, json=body, headers=PARENT)
        await served.http.delete(f"/v2/sandboxes/{sandbox}")

    assert collector.tree(TRACE) == [
        "POST /v2/sandboxes/{id}/eval",
        "  service eval",
        "    agent eval",
    ]


async def test_an_error_is_named_and_a_trace_of_no_client_is_its_own(fake_host: FakeHost) -> None:
    async with traced(fake_host) as (served, collector):
        nothing = {"snapshot_tag": "nothing"}
        for headers in ({}, {"traceparent": "nonsense"}):
            await served.http.post("/v2/sandboxes", json=nothing, headers=headers)

    failed = spans(collector, "service fork")
    assert [(each.failed, each.attributes) for each in failed] == [
        (True, {"error.type": "not_found"})
    ] * 2
    roots = spans(collector, "POST /v2/sandboxes")
    assert {each.parent for each in roots} == {""}
    assert len({each.trace for each in roots}) == 2
    assert {each.attributes["http.response.status_code"] for each in roots} == {404}


async def test_a_stream_that_its_client_leaves_is_ended(fake_host: FakeHost) -> None:
    async with traced(fake_host) as (served, collector):
        (sandbox,) = await served.fork()
        path = f"/v2/sandboxes/{sandbox}/logs?follow=true"
        async with served.http.stream("GET", path, headers=PARENT):
            pass
        await served.http.delete(f"/v2/sandboxes/{sandbox}")

    assert collector.tree(TRACE) == [
        "GET /v2/sandboxes/{id}/logs",
        "  service follow_console_log",
        "  service get_sandbox",
    ]


async def test_nothing_is_traced_that_no_request_is_about(fake_host: FakeHost) -> None:
    async with traced(fake_host) as (_, collector):
        pass  # a host was opened, and a snapshot baked

    assert collector.spans == []


async def test_without_a_tracer_a_span_is_the_same_nothing_each_time() -> None:
    nothing = tracing.span("one", children=3)

    assert nothing is tracing.span("two") is tracing.request("GET", {}) is tracing.within(None)
    assert tracing.here() is None


def test_a_daemon_that_exports_nothing_has_not_loaded_what_would() -> None:
    """FastAPI loads OpenTelemetry's API where it is installed, which exports nothing by itself."""
    code = "import sys, forkd.daemon.main; print(*sys.modules)"
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    loaded = set(done.stdout.split())
    assert "forkd.telemetry.tracing" in loaded
    assert (
        loaded & {"forkd.telemetry.export", "opentelemetry.sdk", "opentelemetry.exporter"} == set()
    )


async def test_an_endpoint_without_the_extra_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "forkd.telemetry.export", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'forkd-vm\[tracing\]'"):
        async with exporting.exported("http://127.0.0.1:1"):
            pass


async def test_a_collector_that_is_gone_holds_nobody_up(fake_host: FakeHost) -> None:
    async with exporting.exported("http://127.0.0.1:1"), served_host(fake_host) as served:
        (sandbox,) = await served.fork()
        assert (await served.http.delete(f"/v2/sandboxes/{sandbox}")).status_code < 300
