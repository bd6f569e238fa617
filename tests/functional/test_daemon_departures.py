"""A client that goes away ends what it asked for; what must not be half-done goes on to its end.

Each test speaks to a real daemon over a real socket, waits until its request has begun, and closes
the socket.  The host is the fake VMM's, which is processes and sockets as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.host import files
from tests.support.served_host import Served, descriptors, served_host
from tests.support.service_host import TAG, UNTIL_DEADLINE_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.service_host import FakeHost

pytestmark = pytest.mark.timeout(120)

FORK_COUNT = 150
SIBLINGS = 20


@contextlib.asynccontextmanager
async def daemon(fake_host: FakeHost, knobs: str = "") -> AsyncIterator[Served]:
    """Serve; whatever a test has left is ended, and then nothing is left of anything."""
    async with served_host(fake_host, knobs=knobs) as served:
        await served.fork()  # its zygote stays
        before = descriptors()
        yield served
        for each in await served.sandboxes():
            await served.http.delete(f"/v2/sandboxes/{each}")
        await until(lambda: fake_host.left_over() == [] and len(fake_host.vmm_processes()) <= 1)
        await until(lambda: descriptors() <= before)


def body(**members: object) -> bytes:
    return json.dumps(members).encode()


def tasks(kind: str) -> list[str]:
    """Return the tasks of the service of one kind."""
    names = [each.get_name() for each in asyncio.all_tasks()]
    return [name for name in names if name.startswith(f"{kind} ")]


async def test_a_fork_leaves_no_sandbox(fake_host: FakeHost) -> None:
    async with daemon(fake_host) as served:
        kept = await served.sandboxes()

        await served.leave(
            "POST",
            "/v2/sandboxes",
            body(snapshot_tag=TAG, n=FORK_COUNT),
            begun=lambda: len(fake_host.left_over()) > len(kept) + 1,
        )

        await until(lambda: len(fake_host.left_over()) == 1 and not tasks("delete"))
        assert await served.sandboxes() == kept
        assert len(fake_host.vmm_processes()) == 2


async def test_a_branch_leaves_no_sibling_and_its_source_goes_on(fake_host: FakeHost) -> None:
    async with daemon(fake_host) as served:
        (source,) = await served.sandboxes()

        await served.leave(
            "POST",
            f"/v2/sandboxes/{source}/branch",
            body(n=SIBLINGS),
            begun=lambda: len(fake_host.left_over()) > 2,
        )

        await until(lambda: len(fake_host.left_over()) == 1 and not tasks("delete"))
        assert await served.sandboxes() == [source]
        assert await answer_of(served, source) == 42


@pytest.mark.parametrize("program", ["forever", "spew"])
async def test_a_program_is_ended_in_the_guest(fake_host: FakeHost, program: str) -> None:
    async with daemon(fake_host) as served:
        (sandbox,) = await served.sandboxes()

        await served.leave(
            "POST",
            f"/v2/sandboxes/{sandbox}/exec",
            body(args=[program]),
            begun=lambda: f"{program} began" in served.console(sandbox),
        )

        await until(lambda: f"{program} ended" in served.console(sandbox))


async def test_an_evaluation_is_let_go_of(fake_host: FakeHost, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = f"open('{begun}', 'w').close() or __import__('threading').Event().wait()"
    async with daemon(fake_host) as served:
        (sandbox,) = await served.sandboxes()
        before = descriptors()

        await served.leave(
            "POST", f"/v2/sandboxes/{sandbox}/eval", body(code=code), begun=begun.exists
        )

        await until(lambda: descriptors() <= before)


@pytest.mark.parametrize("stream", ["", "Accept: application/x-ndjson\r\n"])
async def test_a_bake_leaves_nothing(fake_host: FakeHost, stream: str) -> None:
    async with daemon(fake_host) as served:
        recipe = fake_host.recipe(code="hang", name="hanging")

        await served.leave(
            "POST",
            "/v2/snapshots",
            body(tag="hanging", recipe=str(recipe)),
            begun=lambda: any(fake_host.settings.bakes_dir.glob("*/vsock.sock")),
            more=stream,
        )

        await until(lambda: not any(fake_host.settings.bakes_dir.iterdir()) and not tasks("bake"))
        snapshots = (await served.http.get("/v2/snapshots")).json()
        assert [each["tag"] for each in snapshots] == [TAG]


@pytest.mark.parametrize("stream", ["", "Accept: application/x-ndjson\r\n"])
async def test_a_build_is_ended(fake_host: FakeHost, stream: str) -> None:
    async with daemon(fake_host) as served:
        cache = fake_host.settings.cache_dir
        with contextlib.ExitStack() as others:  # who build the same
            for lock in (cache / "locks").iterdir():
                others.enter_context(files.lock(lock))

            await served.leave(
                "POST",
                "/v2/images",
                body(recipe=str(fake_host.recipe(name="other"))),
                begun=lambda: tasks("build") != [],
                more=stream,
            )

            await until(lambda: tasks("build") == [])


async def test_a_comparison_is_ended_and_leaves_no_copy(fake_host: FakeHost) -> None:
    async with daemon(fake_host) as served:
        (first,) = await served.sandboxes()
        (second,) = await served.fork()
        put = f"/v2/sandboxes/{second}/files?path=/forever"
        assert (await served.http.put(put, content=b"x")).status_code == 200

        await served.leave(
            "POST", "/v2/diff", body(a=first, b=second), begun=lambda: comparing(fake_host) != []
        )

        await until(lambda: comparing(fake_host) == [] and len(fake_host.left_over()) == 2)
        assert sorted(await served.sandboxes()) == sorted([first, second])


def comparing(host: FakeHost) -> list[str]:
    return [each for each in children() if f"{host.settings.vmm} compare" in each]


def children() -> list[str]:
    """Return the command lines of this process's children."""
    pid = os.getpid()
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = []
    for each in pids:
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
            found.append(b" ".join(words).decode())
    return found


def packing() -> list[str]:
    return [each for each in children() if "forkd.packs" in each]


async def test_a_pack_that_is_sent_is_no_longer_written(fake_host: FakeHost) -> None:
    async with daemon(fake_host) as served:
        big = fake_host.recipe(name="big")
        with (big / "rootfs.ext4").open("ab") as rootfs:
            rootfs.write(os.urandom(8 << 20))
        answer = await served.http.post("/v2/snapshots", json={"tag": "big", "recipe": str(big)})
        assert answer.status_code == 201

        await served.leave("GET", "/v2/snapshots/big/pack", begun=lambda: packing() != [])

        await until(lambda: packing() == [])


async def test_a_pack_that_is_received_leaves_nothing(fake_host: FakeHost) -> None:
    async with daemon(fake_host) as served:
        pack = (await served.http.get(f"/v2/snapshots/{TAG}/pack")).content

        await served.leave(
            "PUT",
            "/v2/snapshots/copy/pack",
            pack[: len(pack) // 2],
            missing=len(pack),
            begun=lambda: packing() != [],
        )

        await until(lambda: packing() == [] and staged(fake_host) == [])
        snapshots = (await served.http.get("/v2/snapshots")).json()
        assert [each["tag"] for each in snapshots] == [TAG]


def staged(host: FakeHost) -> list[Path]:
    return list((host.settings.state_dir / "staging").iterdir())


async def test_a_file_that_is_received_is_not_there(fake_host: FakeHost) -> None:
    async with daemon(fake_host) as served:
        (sandbox,) = await served.sandboxes()
        before, path = descriptors(), f"/v2/sandboxes/{sandbox}/files?path=/half"

        await served.leave(
            "PUT", path, bytes(100_000), missing=1, begun=lambda: descriptors() > before + 2
        )

        await until(lambda: descriptors() <= before)
        assert (await served.http.get(path)).status_code == 404


@pytest.mark.parametrize(
    ("op", "method", "path"),
    [("stop", "DELETE", ""), ("reset", "POST", "/reset"), ("rename", "POST", "/promote")],
)
async def test_what_must_not_be_half_done_goes_on_to_its_end(
    fake_host: FakeHost, op: str, method: str, path: str
) -> None:
    go = fake_host.settings.state_dir / "go"
    async with daemon(fake_host, knobs=f"{op}=wait") as served:
        (source,) = await served.sandboxes()
        sandbox = source
        if op == "rename":
            answer = await served.http.post(f"/v2/sandboxes/{source}/branch", json={"n": 1})
            sandbox = answer.json()["sandboxes"][0]["id"]
        await served.http.post(f"/v2/sandboxes/{sandbox}/eval", json={"code": SET})

        await served.leave(
            method,
            f"/v2/sandboxes/{sandbox}{path}",
            begun=lambda: f"{op} waits" in served.console(sandbox),
        )
        go.touch()

        if op == "stop":
            await until(lambda: fake_host.left_over() == [])
            async with asyncio.timeout(UNTIL_DEADLINE_S):
                while await served.sandboxes() != []:  # it is forgotten after its folder is gone
                    pass
        else:
            wanted = {"reset": 42, "rename": 7}[op]
            async with asyncio.timeout(UNTIL_DEADLINE_S):
                while await answer_of(served, source) != wanted:  # its owner does one thing at once
                    pass


async def answer_of(served: Served, sandbox: str) -> object:
    answer = await served.http.post(f"/v2/sandboxes/{sandbox}/eval", json={"code": "answer"})
    return answer.json().get("value")


SET = "globals().update(answer=7)"
