"""What is asked of a VMM process is what the contract says, and so is what its answer becomes."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from forkd.engine.channel import Channel
from forkd.engine.configs import (
    BranchConfig,
    ChildConfig,
    DeriveConfig,
    DiskConfig,
    Identity,
    LinkConfig,
    members,
)
from forkd.engine.control import Control
from forkd.engine.frames import Kind
from forkd.engine.replies import Branched, SavedFile
from forkd.errors import CapacityError, EngineError, ForkdError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from forkd.model.json import JsonObject

FOLDER = Path("/run/x")
DIGEST = "d" * 64
LIMITED = Identity("sb-1", "0" * 32, "uuid", guest_memory_bytes=1 << 28)

T = TypeVar("T")


def ask(
    what: Callable[[Control], Awaitable[T]], answer: JsonObject, kind: Kind = Kind.REPLY
) -> tuple[JsonObject, T]:
    """Return the request that `what` sends, and what it makes of `answer`."""
    (request,), result = ask_again(what, (kind, answer))
    return request, result


def ask_again(
    what: Callable[[Control], Awaitable[T]], *answers: tuple[Kind, JsonObject]
) -> tuple[list[JsonObject], T]:
    """Return the requests that `what` sends, and what it makes of one answer to each."""

    async def both() -> tuple[list[JsonObject], T]:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.settimeout(0)
        async with Channel(theirs) as vmm, Control(Channel(ours)) as control:

            async def serve() -> list[JsonObject]:
                requests = []
                for kind, answer in answers:
                    requests.append((await vmm.receive()).members())
                    await vmm.send_json(kind, answer)
                return requests

            served = asyncio.ensure_future(serve())
            try:
                result = await what(control)
            finally:
                requests = await served
            return requests, result

    return asyncio.run(both())


async def fork_limited(control: Control) -> None:
    child = ChildConfig("sb-1", FOLDER, LIMITED)
    await control.fork([child], deadline_s=5, on_outcome=lambda _: None)


def test_a_branch_is_asked_for_and_says_who_and_for_how_long() -> None:
    request, branched = ask(
        lambda control: control.branch(BranchConfig(FOLDER)), {"pid": 7, "pause_ms": 1.5}
    )

    assert request == {"op": "branch", "directory": "/run/x"}
    assert branched == Branched(pid=7, pause_ms=1.5)


def test_a_link_names_its_parents_files() -> None:
    config = LinkConfig(FOLDER, (Path("/a"), Path("/b")), 2)
    answer: JsonObject = {"files": [{"name": "memory", "bytes": 9, "digest": DIGEST}]}

    request, files = ask(lambda control: control.save_link(config), answer)

    expected = {"op": "save", "directory": "/run/x", "memory": ["/a", "/b"], "disk_layers": 2}
    assert request == expected
    assert files == (SavedFile(name="memory", bytes=9, digest=DIGEST),)


def test_a_delta_is_derived_from_its_files() -> None:
    disk = DiskConfig((Path("/image"), Path("/layer")), 4096)
    config = DeriveConfig(FOLDER, Path("/state"), Path("/memory"), disk)

    request, pid = ask(lambda control: control.derive(config), {"pid": 8})

    assert pid == 8
    assert request["memory"] == "/memory"
    assert request["disk"] == {"layers": ["/image", "/layer"], "size_bytes": 4096}


def test_a_reset_says_who_the_machine_is_from_now_on() -> None:
    config = Identity("sb-1", "0" * 32, "uuid")

    request, spent_ms = ask(lambda control: control.reset(config, deadline_s=5), {"ms": 3})

    assert spent_ms == 3.0
    assert (request["op"], request["hostname"], request["deadline_s"]) == ("reset", "sb-1", 5)


@pytest.mark.parametrize(
    ("ask_for", "answer"),
    [
        (lambda control: control.reset(LIMITED, deadline_s=5), {"ms": 3}),
        (lambda control: control.identify("sb-1", LIMITED, deadline_s=5), {"ms": 3}),
        (fork_limited, {"ready": 1, "failed": 0, "wall_ms": 3}),
    ],
    ids=["reset", "identify", "fork"],
)
def test_a_process_of_before_memory_limits_is_asked_again_without(
    ask_for: Callable[[Control], Awaitable[float | None]], answer: JsonObject
) -> None:
    refusal: JsonObject = {"code": "invalid_request", "message": "unknown field"}

    (first, second), _ = ask_again(ask_for, (Kind.ERROR, refusal), (Kind.REPLY, answer))

    member = f'"guest_memory_bytes": {1 << 28}'
    assert member in json.dumps(first)
    assert json.loads(json.dumps(first).replace(f", {member}", "")) == second


@pytest.mark.parametrize(
    ("identity", "code"),
    [(LIMITED, "state"), (replace(LIMITED, guest_memory_bytes=None), "invalid_request")],
)
def test_a_process_that_refuses_anything_else_is_not_asked_again(
    identity: Identity, code: str
) -> None:
    refusal: JsonObject = {"code": code, "message": "no"}

    with pytest.raises(ForkdError, match="no"):
        ask(lambda control: control.reset(identity, deadline_s=5), refusal, Kind.ERROR)


def test_a_full_disk_may_have_room_later() -> None:
    answer: JsonObject = {"code": "io", "message": "no space left on device"}

    with pytest.raises(CapacityError, match="no space"):
        ask(lambda control: control.save_link(LinkConfig(FOLDER)), answer, Kind.ERROR)


def test_a_childs_identity_is_its_own_members() -> None:
    child = ChildConfig("sb-1", FOLDER, Identity("h", "m", "b"))

    assert members(child) == {
        "id": "sb-1",
        "directory": "/run/x",
        "hostname": "h",
        "machine_id": "m",
        "boot_id": "b",
    }


def test_an_answer_that_says_nothing_is_an_engine_error() -> None:
    for what in (
        lambda control: control.branch(BranchConfig(FOLDER)),
        lambda control: control.derive(DeriveConfig(FOLDER, FOLDER, FOLDER)),
        lambda control: control.reset(Identity("h", "m", "b"), deadline_s=1),
        lambda control: control.save_link(LinkConfig(FOLDER)),
    ):
        with pytest.raises(EngineError):
            ask(what, {})
