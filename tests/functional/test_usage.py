"""What sandboxes use of the host is measured, for those who may know, at a bounded cost."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict, NotFound
from forkd.host import proc
from forkd.model.caller import Caller, Scope
from forkd.model.sandbox import ForkOptions
from forkd.model.tenant import parse_tenant
from forkd.service import usage as usages
from tests.functional.test_service_sandboxes import delete_all, exited, kill
from tests.support.callers import CALLER
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

OPTIONS = ForkOptions()
OTHERS = Caller("o", parse_tenant("others"), frozenset({Scope.READ, Scope.RUN}), "r")
MIB = 1 << 20
BUSY = "globals().update(ballast=b'x' * (64 << 20)) or sum(range(10_000_000))"


@pytest.fixture
async def host(fake_host: FakeHost) -> AsyncIterator[Host]:
    async with fake_host.service() as made:
        await fake_host.bake(made, fake_host.recipe())
        await made.snapshots.share(CALLER, TAG, shared=True)
        yield made
        await delete_all(made)


async def test_a_sandbox_uses_what_its_process_does(host: Host) -> None:
    (made,) = (await host.sandboxes.fork(CALLER, TAG, 1, OPTIONS)).sandboxes
    before = await host.usage.get(CALLER, made.id)
    await host.guests.eval(CALLER, made.id, BUSY)
    after = await host.usage.get(CALLER, made.id)

    assert after.sandbox.id == made.id
    assert after.cpu_s > before.cpu_s
    assert after.private_exact
    assert after.private_bytes - before.private_bytes > 60 * MIB
    assert (after.traffic, after.cgroup_bytes, after.disk_bytes) == (None, None, 0)
    assert after.io is None


async def test_all_that_a_caller_may_see_are_measured_together(host: Host) -> None:
    mine = (await host.sandboxes.fork(CALLER, TAG, 3, OPTIONS)).sandboxes
    (theirs,) = (await host.sandboxes.fork(OTHERS, TAG, 1, OPTIONS)).sandboxes

    everybody = await host.usage.list(CALLER)
    assert [each.sandbox.id for each in everybody] == [*(each.id for each in mine), theirs.id]
    assert all(each.private_bytes > 0 and each.private_exact for each in everybody)
    assert [each.sandbox.id for each in await host.usage.list(OTHERS)] == [theirs.id]
    with pytest.raises(NotFound):
        await host.usage.get(OTHERS, mine[0].id)


async def test_many_who_ask_at_once_share_one_measurement(host: Host) -> None:
    await host.sandboxes.fork(CALLER, TAG, 2, OPTIONS)

    answers = await asyncio.gather(*(host.usage.list(CALLER) for _ in range(50)))

    assert len({each[0].at for each in answers}) == 1


async def test_what_there_is_no_time_to_count_is_an_upper_bound_and_comes_first_next_time(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    await host.sandboxes.fork(CALLER, TAG, 3, OPTIONS)
    monkeypatch.setattr(usages, "FRESH_S", 0.0)
    monkeypatch.setattr(usages, "COUNTING_S_MAX", -1.0)
    guessed = await host.usage.list(CALLER)
    assert [each.private_exact for each in guessed] == [False] * 3

    monkeypatch.setattr(usages, "COUNTING_S_MAX", 10.0)
    counted = await host.usage.list(CALLER)
    assert [each.private_exact for each in counted] == [True] * 3
    monkeypatch.setattr(usages, "COUNTING_S_MAX", -1.0)
    remembered = await host.usage.list(CALLER)
    assert [each.private_bytes for each in remembered] == [each.private_bytes for each in counted]


async def test_a_sandbox_that_has_ended_uses_nothing(host: Host) -> None:
    made = (await host.sandboxes.fork(CALLER, TAG, 2, OPTIONS)).sandboxes
    assert made[0].pid is not None
    await kill(made[0].pid)
    await exited(host, made[0].id)

    assert [each.sandbox.id for each in await host.usage.list(CALLER)] == [made[1].id]
    with pytest.raises(Conflict):
        await host.usage.get(CALLER, made[0].id)


async def test_files_without_a_name_are_a_process_disk(tmp_path: Path) -> None:
    others = tmp_path / "others"
    tops = tmp_path / "tops"
    for folder in (tops, others):
        folder.mkdir()
    assert proc.nameless_bytes(os.getpid(), tops) == 0
    with tempfile.TemporaryFile(dir=tops) as top, tempfile.TemporaryFile(dir=others) as other:
        for file in (top, other):
            file.write(b"x" * MIB)
            file.truncate(1 << 40)  # what is not written takes nothing
            file.flush()
        os.fsync(top.fileno())

        assert MIB <= proc.nameless_bytes(os.getpid(), tops) < 2 * MIB
    assert proc.nameless_bytes(1 << 22, tops) == 0


def test_links_have_counters_of_bytes() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    before, _ = proc.traffic()["lo"]
    with listening, socket.create_connection(listening.getsockname()) as sending:
        receiving, _ = listening.accept()
        with receiving:
            sending.sendall(b"x" * MIB)
            while len(receiving.recv(MIB, socket.MSG_PEEK)) == 0:
                pass
    received, sent = proc.traffic()["lo"]

    assert received == sent
    assert received > before
