"""The reference's published Python client, unmodified, against our daemon."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from forkd.host.cgroupfs import CGROUP_ROOT
from tests.support.reference import PythonClient, Refused, python_client, served_reference

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.reference import ServedReference
    from tests.support.service_host import FakeHost

pytestmark = [pytest.mark.needs("reference"), pytest.mark.timeout(120)]

FOREIGN = "sb-67a1b3-0000"
"""An id as the reference makes them; ours are others."""

SANDBOX = {
    "id", "snapshot_tag", "netns", "guest_addr", "created_at_unix", "pid", "memory_limit_mib",
    "has_branched", "last_branch_memory_path", "branch_count",
}  # fmt: skip

SNAPSHOT = {"tag", "dir", "created_at_unix", "status", "bootable"}

BRANCH = SNAPSHOT | {"branched_from", "pause_ms", "diff_physical_bytes", "diff_logical_bytes"}


@contextlib.asynccontextmanager
async def running(
    host: FakeHost, *, knobs: str = ""
) -> AsyncIterator[tuple[PythonClient, ServedReference]]:
    """Run a daemon and the client; what the client has forked is gone afterwards."""
    async with served_reference(host, knobs=knobs) as served, python_client(served) as client:
        yield client, served
        for each in await client("list_sandboxes"):
            await client("kill_sandbox", each["id"])
        assert host.left_over() == []


async def refused(client: PythonClient, name: str, *args: object, **options: object) -> Refused:
    with pytest.raises(Refused) as caught:
        await client(name, *args, **options)
    assert isinstance(caught.value.body["error"], str)
    return caught.value


async def test_snapshots_are_listed_and_deleted(fake_host: FakeHost) -> None:
    async with running(fake_host) as (client, _):
        (listed,) = await client("list_snapshots")
        assert set(listed) == SNAPSHOT
        assert (listed["tag"], listed["status"], listed["bootable"]) == ("python", "ready", True)

        assert await client("delete_snapshot", "python") is None
        assert await client("list_snapshots") == []


async def test_a_fork_answers_the_bare_list(fake_host: FakeHost) -> None:
    async with running(fake_host) as (client, _):
        (one,) = await client("spawn_sandboxes", "python")
        assert set(one) == SANDBOX
        assert one["snapshot_tag"] == "python"
        assert one["pid"] in fake_host.vmm_processes()
        assert (one["netns"], one["guest_addr"], one["memory_limit_mib"]) == (None, "", None)
        assert (one["has_branched"], one["branch_count"]) == (False, 0)

        others = await client(
            "spawn_sandboxes", "python", n=3, prewarm=True, live_fork=True, hugepages=True
        )
        listed = await client("list_sandboxes")
        assert {each["id"] for each in listed} == {one["id"], *(each["id"] for each in others)}
        assert await client("get_sandbox", one["id"]) == one

        assert await client("kill_sandbox", one["id"]) is None
        assert (await refused(client, "get_sandbox", one["id"])).status == 404


@pytest.mark.needs("root", "tun")
async def test_per_child_netns_gives_each_an_address(fake_host: FakeHost) -> None:
    async with running(fake_host) as (client, _):
        made = await client("spawn_sandboxes", "python", n=2, per_child_netns=True)

        addresses = {each["guest_addr"] for each in made}
        assert len(addresses) == 2
        assert all(re.fullmatch(r"10\.[0-9.]+:8888", each) for each in addresses)


@pytest.mark.needs("root", "cgroup2")
async def test_memory_limits_hold(fake_host: FakeHost) -> None:
    root = CGROUP_ROOT / "forkd-reference"
    limited = replace(fake_host, settings=replace(fake_host.settings, cgroup_root=root))
    async with running(limited) as (client, _):
        (made,) = await client("spawn_sandboxes", "python", memory_limit_mib=256)

        assert made["memory_limit_mib"] == 256
        assert (root / made["id"] / "memory.max").read_text().strip() == str(256 << 20)


async def test_programs_and_code_answer_as_the_reference_does(fake_host: FakeHost) -> None:
    async with running(fake_host) as (client, _):
        (made,) = await client("spawn_sandboxes", "python")
        sandbox = made["id"]

        pong = await client("ping_sandbox", sandbox)
        assert set(pong) == {"pong", "numpy_version", "pid", "agent_lang", "warmup_ready"}
        assert (pong["pong"], pong["agent_lang"], pong["warmup_ready"]) == (True, "python", True)

        assert await client("eval_code", sandbox, "answer + 1") == {
            "result": "43", "error": None, "exit_code": 0,
        }  # fmt: skip
        assert await client("eval_code", sandbox, "1 / 0") == {
            "result": None, "error": "ZeroDivisionError: division by zero", "exit_code": 1,
        }  # fmt: skip

        ran = await client("exec_command", sandbox, ["hello"], timeout_secs=5)
        assert ran == {"stdout": "", "stderr": "hello", "exit_code": 0}
        failed = await client("exec_command", sandbox, ["sh", "-c", "fail 3 words"])
        assert failed == {"stdout": "", "stderr": "sh\nwords", "exit_code": 3}


@pytest.mark.parametrize(
    ("program", "exit_code", "stderr"),
    [
        ("missing", 1, "missing: no such program\n"),
        ("late", 1, "late\ntimed out after 5 s\n"),
        ("killed", -9, "killed"),
    ],
)
async def test_how_a_program_failed_is_a_result(
    fake_host: FakeHost, program: str, exit_code: int, stderr: str
) -> None:
    async with running(fake_host) as (client, _):
        (made,) = await client("spawn_sandboxes", "python")

        ran = await client("exec_command", made["id"], [program], timeout_secs=5)

        assert ran == {"stdout": "", "stderr": stderr, "exit_code": exit_code}


async def test_every_kind_of_branch_makes_a_snapshot_and_no_sandbox(fake_host: FakeHost) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"tag": "named"},
        {"mode": "full", "measure_diff": True},
        {"mode": "diff", "tag": "diff"},
        {"diff": True},
        {"measure_diff": True},
        {"mode": "live", "tag": "live"},
        {"mode": "live", "wait": True},
    ]
    async with running(fake_host) as (client, _):
        (source,) = await client("spawn_sandboxes", "python", live_fork=True)
        sandbox = source["id"]
        for kind in kinds:
            made = await client("branch_sandbox", sandbox, **kind)

            assert set(made) == BRANCH
            assert (made["status"], made["bootable"]) == ("ready", True)
            assert made["branched_from"] == sandbox
            generated = rf"branch-{sandbox}-[0-9]+-[0-9a-f]{{4}}"
            assert re.fullmatch(kind.get("tag", generated), made["tag"])
            assert made["pause_ms"] > 0

        (listed,) = await client("list_sandboxes")
        assert (listed["has_branched"], listed["branch_count"]) == (True, len(kinds))
        assert len(await client("list_snapshots")) == len(kinds) + 1


async def test_grandchildren_have_what_their_branch_had(fake_host: FakeHost) -> None:
    async with running(fake_host) as (client, _):
        (source,) = await client("spawn_sandboxes", "python")
        await client("eval_code", source["id"], "globals().update(answer=7)")
        branch = await client("branch_sandbox", source["id"], "checkpoint-1")
        await client("kill_sandbox", source["id"])

        for each in await client("spawn_sandboxes", branch["tag"], n=2):
            assert each["snapshot_tag"] == "checkpoint-1"
            assert (await client("eval_code", each["id"], "answer"))["result"] == "7"


async def test_a_live_branch_may_be_answered_while_it_is_written(fake_host: FakeHost) -> None:
    async with running(fake_host, knobs="link=wait") as (client, _):
        (source,) = await client("spawn_sandboxes", "python", live_fork=True)

        made = await client("branch_sandbox", source["id"], "later", mode="live", wait=False)

        assert (made["status"], made["bootable"]) == ("writing", False)
        said = await refused(client, "spawn_sandboxes", "later")
        assert said.status == 409
        assert "written" in said.body["error"]
        (fake_host.settings.state_dir / "go").touch()
        while (await status_of(client, "later")) == "writing":
            pass  # each turn asks the daemon, which is about to know
        assert await status_of(client, "later") == "ready"
        assert len(await client("spawn_sandboxes", "later")) == 1


async def status_of(client: PythonClient, tag: str) -> str:
    (found,) = [each for each in await client("list_snapshots") if each["tag"] == tag]
    return str(found["status"])


async def test_every_error_has_its_status(fake_host: FakeHost) -> None:
    async with running(fake_host) as (client, _):
        (made,) = await client("spawn_sandboxes", "python")
        sandbox = made["id"]
        await client("branch_sandbox", sandbox, "taken")
        wrong: list[tuple[int, str, tuple[object, ...], dict[str, Any]]] = [
            (400, "spawn_sandboxes", ("python",), {"n": 0}),
            (400, "spawn_sandboxes", ("python",), {"n": 1001}),
            (400, "spawn_sandboxes", ("../python",), {}),
            (400, "spawn_sandboxes", ("python",), {"memory_limit_mib": -1}),
            (404, "spawn_sandboxes", ("nothing",), {}),
            (404, "get_sandbox", (FOREIGN,), {}),
            (404, "kill_sandbox", (FOREIGN,), {}),
            (404, "ping_sandbox", (FOREIGN,), {}),
            (404, "exec_command", (FOREIGN, ["ls"]), {}),
            (404, "eval_code", (FOREIGN, "1"), {}),
            (404, "branch_sandbox", (FOREIGN,), {}),
            (400, "branch_sandbox", (sandbox, "a/b"), {}),
            (400, "branch_sandbox", (sandbox,), {"mode": "half"}),
            (400, "branch_sandbox", (sandbox,), {"diff": True, "measure_diff": True}),
            (400, "branch_sandbox", (sandbox,), {"mode": "diff", "measure_diff": True}),
            (400, "branch_sandbox", (sandbox,), {"mode": "full", "wait": False}),
            (400, "branch_sandbox", (sandbox,), {"wait": False}),
            (409, "branch_sandbox", (sandbox, "taken"), {}),
            (400, "exec_command", (sandbox, []), {}),
            (400, "exec_command", (sandbox, ["ls"]), {"timeout_secs": -1}),
            (404, "delete_snapshot", ("nothing",), {}),
            (409, "delete_snapshot", ("python",), {}),
        ]
        before = await client("list_snapshots")
        for status, name, args, options in wrong:
            said = await refused(client, name, *args, **options)
            assert said.status == status, (name, args, options, said)
        assert await client("list_snapshots") == before
        assert len(await client("list_sandboxes")) == 1


async def test_a_sandbox_that_ended_by_itself_is_not_there(fake_host: FakeHost) -> None:
    async with running(fake_host) as (client, _):
        (made,) = await client("spawn_sandboxes", "python")
        said = await refused(client, "eval_code", made["id"], "die")
        assert said.status == 500

        while await client("list_sandboxes"):
            pass  # each turn asks the daemon, which is about to notice
        assert (await refused(client, "get_sandbox", made["id"])).status == 404
        assert await client("kill_sandbox", made["id"]) is None


async def test_a_wrong_token_is_401(fake_host: FakeHost) -> None:
    async with served_reference(fake_host) as served:
        stranger = replace(served, token=served.token[::-1])
        async with python_client(stranger) as client:
            assert (await refused(client, "list_snapshots")).status == 401
