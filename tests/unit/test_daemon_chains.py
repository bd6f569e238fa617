"""Chains through the API and the command: what is asked for, answered, shown and refused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from forkd.limits import LINK_EXEC_CHARS_MAX
from forkd.model.ids import Tag
from forkd.model.snapshot import SnapshotStatus
from tests.support.fake_service import a_snapshot, some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]

WARM, LINK = Tag("warm"), Tag("link")


@pytest.fixture(autouse=True)
def snapshots(daemon: RunningDaemon) -> dict[Tag, Any]:
    daemon.service.stored = some_snapshots("warm")
    return daemon.service.stored


@pytest.fixture
def http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(uds=daemon.url.removeprefix("unix://"), verify=False)
    with httpx.Client(transport=transport, base_url="http://forkd") as client:
        yield client


@pytest.fixture
def sandbox(forkd: Forkd) -> str:
    return forkd("fork", "warm").out.strip()


def test_a_snapshot_of_a_sandbox_is_answered_ready_or_being_written_as_asked(
    http: httpx.Client, sandbox: str
) -> None:
    ready = http.post("/v2/snapshots", json={"tag": "a", "source": sandbox})
    later = http.post("/v2/snapshots", json={"tag": "b", "source": sandbox, "wait": False})

    assert (ready.status_code, ready.json()["status"]) == (201, "ready")
    assert (later.status_code, later.json()["status"]) == (202, "writing")
    assert (ready.json()["parent_tag"], ready.json()["chain_depth"]) == ("warm", 1)
    assert (ready.json()["source_id"], ready.json()["pause_ms"]) == (sandbox, 1.25)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tag": "a"}, "source"),
        ({"tag": "a", "recipe": "/r", "source": "warm"}, "source"),
        ({"tag": "a", "recipe": "/r", "exec": "true"}, "exec"),
        ({"tag": "a", "recipe": "/r", "wait": False}, "exec"),
        ({"tag": "a", "recipe": "/r", "network": True}, "exec"),
        ({"tag": "a", "source": "sb-" + "a" * 26, "network": True}, "network"),
        ({"tag": "a", "source": "warm"}, "exec"),
        ({"tag": "a", "source": "sb-" + "a" * 26, "exec": "true"}, "exec"),
        ({"tag": "a", "source": "a..b", "exec": "true"}, "source"),
        ({"tag": "a", "source": "warm", "exec": ""}, "exec"),
        ({"tag": "a", "source": "warm", "exec": "x" * (LINK_EXEC_CHARS_MAX + 1)}, "exec"),
        ({"tag": "a", "source": "warm", "exec": "true", "exec_timeout_secs": 0}, "exec_timeout"),
    ],
)
def test_a_snapshot_of_nothing_or_of_two_things_is_refused(
    http: httpx.Client, body: dict[str, Any], field: str
) -> None:
    answer = http.post("/v2/snapshots", json=body)

    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert answer.json()["field"].startswith(field)


def test_the_longest_command_between_two_links_is_taken(http: httpx.Client) -> None:
    body = {"tag": "a", "source": "warm", "exec": "x" * LINK_EXEC_CHARS_MAX}
    assert http.post("/v2/snapshots", json=body).status_code == 201


def test_a_description_says_what_is_shared(forkd: Forkd, snapshots: dict[Tag, Any]) -> None:
    link = a_snapshot("link")
    snapshots[LINK] = replace(link, parent=WARM, depth=1, chain_bytes=4 * link.stored_bytes)

    info = forkd("snapshot", "info", "link", "--json").document
    assert (info["ancestors"], info["parent_tag"], info["chain_depth"]) == (["warm"], "warm", 1)
    assert (info["chain_bytes"], info["shared_fraction"]) == (4 * link.stored_bytes, 0.75)
    assert "75%" in forkd("snapshot", "info", "link").out
    assert forkd("snapshot", "info", "warm", "--json").document["dependents"] == ["link"]
    assert "PARENT" in forkd("snapshot", "ls").out


def test_a_parent_is_removed_only_as_asked(
    forkd: Forkd, http: httpx.Client, snapshots: dict[Tag, Any]
) -> None:
    snapshots[LINK] = replace(a_snapshot("link"), parent=WARM)

    refused = forkd("snapshot", "rm", "warm")
    assert (refused.code, "warm is the parent of link" in refused.err) == (4, True)
    both = http.delete("/v2/snapshots/warm", params={"cascade": "true", "force": "true"})
    assert (both.status_code, both.json()["field"]) == (400, "force")
    assert forkd("snapshot", "rm", "--cascade", "warm").code == 0
    assert snapshots == {}


def test_force_leaves_what_stood_on_it(forkd: Forkd, snapshots: dict[Tag, Any]) -> None:
    snapshots[LINK] = replace(a_snapshot("link"), parent=WARM)

    assert forkd("snapshot", "rm", "warm", "--force").code == 0
    assert list(snapshots) == [LINK]


@pytest.mark.parametrize("option", ["--from", "--from-sandbox"])
def test_the_command_writes_a_sandbox_down(forkd: Forkd, sandbox: str, option: str) -> None:
    ended = forkd("snapshot", "create", "link", option, sandbox)

    assert ended.code == 0
    assert "snapshot link over warm: 100 MiB, its source was paused for 1.2 ms" in ended.err


def test_the_command_need_not_wait(forkd: Forkd, sandbox: str) -> None:
    ended = forkd("snapshot", "create", "link", "--from", sandbox, "--no-wait", "--json")
    assert ended.document["status"] == "writing"
    again = forkd("snapshot", "create", "other", "--from", sandbox, "--no-wait")
    assert "snapshot other over warm: being written" in again.err


def test_a_fork_of_what_is_being_written_waits_or_is_refused_as_asked(
    forkd: Forkd, http: httpx.Client, sandbox: str
) -> None:
    forkd("snapshot", "create", "link", "--from", sandbox, "--no-wait")

    refused = forkd("fork", "link", "--no-wait")
    assert (refused.code, "link is still being written" in refused.err) == (4, True)
    answer = http.post("/v2/sandboxes", json={"snapshot_tag": "link", "wait": False})
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert forkd("fork", "link").code == 0


def test_the_command_builds_a_link_in_one_go(forkd: Forkd) -> None:
    ended = forkd("snapshot", "create", "link", "--from", "warm", "--exec", "pip install pandas")

    assert ended.code == 0
    assert "pip install pandas" in ended.err
    assert forkd("ls", "-q").out == ""


def test_a_command_that_fails_is_said_and_makes_nothing(
    forkd: Forkd, snapshots: dict[Tag, Any]
) -> None:
    ended = forkd("snapshot", "create", "link", "--from", "warm", "--exec", "false")

    assert (ended.code, "the command exited with 1" in ended.err) == (1, True)
    assert list(snapshots) == [WARM]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--recipe", "r", "--from", "warm"],
        ["--from", "warm", "--from-sandbox", "sb-x"],
        ["--recipe", "r", "--exec", "true"],
        ["--recipe", "r", "--no-wait"],
        ["--from", "warm"],
    ],
)
def test_a_command_line_that_says_nothing_or_too_much_is_wrong_usage(
    forkd: Forkd, options: list[str]
) -> None:
    assert forkd("snapshot", "create", "link", *options).code == 2


def test_a_snapshot_is_compacted_in_its_place_or_to_another_name(
    forkd: Forkd, http: httpx.Client, snapshots: dict[Tag, Any]
) -> None:
    snapshots[LINK] = replace(a_snapshot("link"), parent=WARM, depth=1)

    assert forkd("snapshot", "compact", "link", "--to", "flat", "--json").document["tag"] == "flat"
    assert snapshots[LINK].depth == 1
    assert "snapshot link: 100 MiB, depends on no other" in forkd("snapshot", "compact", "link").err
    assert snapshots[LINK].depth == 0
    assert http.post("/v2/snapshots/link/compact").status_code == 200
    wrong = http.post("/v2/snapshots/link/compact", json={"to": "a..b"})
    assert (wrong.status_code, wrong.json()["field"]) == (400, "to")


def test_tidying_says_what_goes_and_how_much_that_frees(
    forkd: Forkd, http: httpx.Client, snapshots: dict[Tag, Any]
) -> None:
    snapshots[LINK] = a_snapshot("link", status=SnapshotStatus.FAILED)

    planned = forkd("snapshot", "gc", "--dry-run")
    assert ("link" in planned.out, "1 MiB would be freed" in planned.err) == (True, True)
    assert LINK in snapshots
    assert forkd("snapshot", "gc", "--json").document == {
        "removed": [{"kind": "failed", "name": "link", "bytes": 1 << 20}],
        "bytes": 1 << 20,
    }
    assert http.post("/v2/snapshots:gc").json() == {"removed": [], "bytes": 0}
    assert "0 B freed" in forkd("snapshot", "gc").err
