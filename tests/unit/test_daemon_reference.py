"""What `/v1` answers to requests that the reference's clients in this repository do not make."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from forkd.model.ids import SandboxId
from forkd.model.sandbox import SandboxState
from forkd.model.snapshot import SnapshotStatus
from tests.support.daemon import TOKEN, RunningDaemon
from tests.support.fake_service import a_snapshot, some_snapshots

if TYPE_CHECKING:
    from collections.abc import Iterator

IGNORED = "X-Forkd-Ignored"


@pytest.fixture
def http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    daemon.service.stored = some_snapshots("warm", "is-broken")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(
        base_url=f"{daemon.tcp_url}/v1",
        headers=headers,
        verify=False,  # noqa: S501 - no TLS here
        trust_env=False,
    ) as client:
        yield client


def fork(http: httpx.Client, **options: object) -> str:
    (made,) = http.post("/sandboxes", json={"snapshot_tag": "warm", **options}).json()
    return str(made["id"])


def test_members_that_nobody_knows_are_ignored(http: httpx.Client) -> None:
    answer = http.post("/sandboxes", json={"snapshot_tag": "warm", "colour": "red"})

    assert answer.status_code == 201
    assert IGNORED not in answer.headers


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"prewarm": True, "live_fork": True, "hugepages": True}, "prewarm, live_fork, hugepages"),
        ({"prewarm": True, "live_fork": False}, "prewarm"),
    ],
)
def test_options_of_a_fork_without_effect_are_named(
    http: httpx.Client, asked: dict[str, bool], said: str
) -> None:
    answer = http.post("/sandboxes", json={"snapshot_tag": "warm", **asked})

    assert (answer.status_code, answer.headers[IGNORED]) == (201, said)


def test_a_branch_is_201_and_202_if_it_is_still_being_written(http: httpx.Client) -> None:
    branch = f"/sandboxes/{fork(http)}/branch"

    done = http.post(branch, json={"tag": "done", "measure_diff": True})
    assert (done.status_code, done.json()["status"]) == (201, "ready")
    assert done.headers[IGNORED] == "measure_diff"
    later = http.post(branch, json={"tag": "later", "live": True, "wait": False})
    assert (later.status_code, later.json()["status"]) == (202, "writing")


def test_a_branch_needs_no_body(http: httpx.Client) -> None:
    sandbox = fork(http)

    answer = http.post(f"/sandboxes/{sandbox}/branch")

    assert answer.status_code == 201
    assert re.fullmatch(rf"branch-{sandbox}-[0-9]+-[0-9a-f]{{4}}", answer.json()["tag"])


@pytest.mark.parametrize(
    "body",
    [
        {"mode": "diff", "diff": True},
        {"mode": "full", "live": True},
        {"diff": True, "live": True},
        {"live": True, "measure_diff": True},
        {"diff": True, "wait": False},
        {"parent_tag": "warm"},
        {"mode": "diff", "parent_tag": "other"},
        {"mode": "live", "parent_tag": "warm"},
    ],
)
def test_options_of_a_branch_that_exclude_each_other_are_400(
    http: httpx.Client, daemon: RunningDaemon, body: dict[str, Any]
) -> None:
    answer = http.post(f"/sandboxes/{fork(http)}/branch", json={"tag": "new", **body})

    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert "new" not in daemon.service.stored


def test_a_diff_may_name_the_parent_that_it_has(http: httpx.Client) -> None:
    branch = f"/sandboxes/{fork(http)}/branch"
    body = {"tag": "link", "mode": "diff", "parent_tag": "warm"}

    assert http.post(branch, json=body).status_code == 201
    detail = http.get("/snapshots/link/info").json()
    assert (detail["parent_tag"], detail["ancestors"], detail["dependents"]) == (
        "warm", ["warm"], [],
    )  # fmt: skip
    assert http.get("/snapshots/warm/info").json()["dependents"] == ["link"]


def test_a_recipe_is_baked_whatever_kernel_is_named(http: httpx.Client) -> None:
    body = {"tag": "new", "kernel": "/vmlinux", "rootfs": "good", "rw": True, "boot_wait_secs": 30}

    answer = http.post("/snapshots", json=body)

    assert (answer.status_code, answer.json()["tag"]) == (201, "new")
    assert answer.headers[IGNORED] == "kernel, rw, boot_wait_secs"


@pytest.mark.parametrize(
    ("member", "value", "status"),
    [
        ("rootfs", "/var/lib/forkd/rootfs/python.ext4", 400),
        ("rootfs", "/var/lib/forkd/rootfs/python", 400),
        ("rootfs", "nothing", 404),
        ("rootfs", "fails", 500),
        ("tag", "warm", 400),
        ("tag", "../warm", 400),
        ("boot_wait_secs", 61, 400),
        ("kernel", None, 400),
    ],
)
def test_what_cannot_be_baked_is_an_error(
    http: httpx.Client, member: str, value: object, status: int
) -> None:
    body = {"tag": "new", "kernel": "/vmlinux", "rootfs": "good", member: value}

    answer = http.post("/snapshots", json=body)

    assert answer.status_code == status, answer.text
    assert "new" not in [each["tag"] for each in http.get("/snapshots").json()]


def test_a_snapshot_that_failed_is_listed_and_cannot_be_forked(
    http: httpx.Client, daemon: RunningDaemon
) -> None:
    failed = replace(a_snapshot("bad", status=SnapshotStatus.FAILED), error="the disk is full")
    daemon.service.stored[failed.tag] = failed

    (listed,) = [each for each in http.get("/snapshots").json() if each["tag"] == "bad"]
    assert (listed["status"], listed["bootable"], listed["warning"]) == (
        "failed", False, "the disk is full",
    )  # fmt: skip
    assert http.post("/sandboxes", json={"snapshot_tag": "bad"}).status_code == 409


def test_children_that_do_not_become_ready_are_500(http: httpx.Client) -> None:
    answer = http.post("/sandboxes", json={"snapshot_tag": "is-broken", "n": 2})

    assert (answer.status_code, answer.json()["code"]) == (500, "engine")
    assert http.get("/sandboxes").json() == []


def test_compacting_wants_another_tag(http: httpx.Client) -> None:
    assert http.post("/snapshots/warm/compact", json={"to": "flat"}).json()["tag"] == "flat"
    assert http.post("/snapshots/warm/compact", json={"to": "warm"}).status_code == 400


def test_what_stands_on_a_snapshot_can_go_with_it(http: httpx.Client) -> None:
    sandbox = fork(http)
    http.post(f"/sandboxes/{sandbox}/branch", json={"tag": "link"})
    http.delete(f"/sandboxes/{sandbox}")

    assert http.delete("/snapshots/warm").status_code == 409
    assert http.delete("/snapshots/warm?cascade=true&force=true").status_code == 400
    assert http.delete("/snapshots/warm?cascade=true").status_code == 204
    assert [each["tag"] for each in http.get("/snapshots").json()] == ["is-broken"]


def test_a_sandbox_that_has_ended_is_not_there(http: httpx.Client, daemon: RunningDaemon) -> None:
    sandbox = fork(http)
    guest = daemon.service.running[SandboxId(sandbox)]
    guest.sandbox = replace(guest.sandbox, state=SandboxState.EXITED, pid=None)

    assert http.get("/sandboxes").json() == []
    assert http.get(f"/sandboxes/{sandbox}").status_code == 404
    assert http.post(f"/sandboxes/{sandbox}/branch", json={}).status_code == 404
    assert http.delete(f"/sandboxes/{sandbox}").status_code == 204


def test_a_program_that_cannot_be_run_is_a_result(http: httpx.Client) -> None:
    answer = http.post(f"/sandboxes/{fork(http)}/exec", json={"args": ["text"]})

    assert answer.status_code == 200
    assert answer.json() == {
        "stdout": "", "stderr": "text: Exec format error (os error 8)\n", "exit_code": 1,
    }  # fmt: skip


def test_code_without_a_value_gives_null(http: httpx.Client) -> None:
    answer = http.post(f"/sandboxes/{fork(http)}/eval", json={"code": "x = 1"})

    assert answer.json() == {"result": None, "error": None, "exit_code": 0}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("PUT", "/snapshots", 405), ("GET", "/workspaces", 404)],
)
def test_what_is_on_no_route_has_the_same_body(
    http: httpx.Client, method: str, path: str, status: int
) -> None:
    answer = http.request(method, path)

    assert answer.status_code == status
    assert isinstance(answer.json()["error"], str)


def test_a_body_that_is_no_json_is_400(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}

    assert http.post("/sandboxes", content=b"{", headers=headers).status_code == 400
    assert http.post("/sandboxes", content=b"{}", headers={}).status_code == 400


def test_the_document_is_served(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()

    assert set(document["paths"]) == {
        "/snapshots", "/snapshots/{tag}", "/snapshots/{tag}/info", "/snapshots/{tag}/compact",
        "/sandboxes", "/sandboxes/{id}", "/sandboxes/{id}/branch", "/sandboxes/{id}/ping",
        "/sandboxes/{id}/exec", "/sandboxes/{id}/eval",
    }  # fmt: skip
    assert document["servers"] == [{"url": "/v1"}]
