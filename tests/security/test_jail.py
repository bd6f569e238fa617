"""What is left to the processes of machines, as the kernel shows it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.limits import UIDS_DEFAULT
from forkd.model.network import HOST
from forkd.model.sandbox import BranchOptions, ForkOptions
from forkd.service.jail import UidRange
from tests.support.callers import CALLER
from tests.support.real_host import EVAL_TIMEOUT_S, REAL, real_host, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.sandbox import Sandbox
    from tests.support.real_host import RealHost

__all__ = ["real_host"]

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

UIDS = UidRange.parse(UIDS_DEFAULT)
NAMESPACES = ("mnt", "net", "ipc", "uts")
SIBLINGS = BranchOptions(all_or_nothing=True, deadline_s=EVAL_TIMEOUT_S)


@pytest_asyncio.fixture(loop_scope="module")
async def pair(real_host: RealHost) -> AsyncIterator[tuple[Sandbox, ...]]:
    options = ForkOptions(memory_limit_mib=1024, network=HOST)
    async with real_host.forked(2, options) as forked:
        yield forked


def status(pid: int, name: str) -> list[str]:
    """Return the words of a line of a process's status."""
    lines = read(pid, "status")
    return next(line.split()[1:] for line in lines if line.startswith(f"{name}:"))


def read(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/{name}").read_text().splitlines()


def below_root(pid: int) -> set[str]:
    return {each.name for each in Path(f"/proc/{pid}/root").iterdir()}


def threads(pid: int) -> list[int]:
    return [int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()]


def namespace(pid: int | str, kind: str) -> str:
    return str(Path(f"/proc/{pid}/ns/{kind}").readlink())


def pid_of(sandbox: Sandbox) -> int:
    assert sandbox.pid is not None
    return sandbox.pid


async def test_a_machine_is_a_user_of_its_own_without_any_right(pair: tuple[Sandbox, ...]) -> None:
    users = set()
    for sandbox in pair:
        for thread in threads(pid_of(sandbox)):
            (uid,) = set(status(thread, "Uid"))
            assert int(uid) in UIDS
            assert set(status(thread, "Gid")) == {uid}
            assert status(thread, "Groups") == [str(UIDS.first)]
            for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
                assert int(status(thread, kind)[0], 16) == 0, kind
            assert status(thread, "NoNewPrivs") == ["1"]
            users.add(uid)
    assert len(users) == len(pair)


async def test_a_machine_sees_its_folders_and_no_network(
    real_host: RealHost, pair: tuple[Sandbox, ...]
) -> None:
    one = pid_of(pair[0])
    for kind in NAMESPACES:
        assert namespace(one, kind) != namespace("self", kind), kind
    mounts = [line.split() for line in read(one, "mountinfo")]
    mounted = {words[4] for words in mounts}
    writable = {str(each) for each in real_host.settings.jail_dirs}
    assert mounted == {"/proc"} | writable
    for words in mounts:
        options = set(words[5].split(","))
        assert {"nosuid", "nodev", "noexec"} <= options, words
        assert ("rw" in options) == (words[4] in {"/proc"} | writable), words
    assert [line.split(":")[0].strip() for line in read(one, "net/dev")[2:]] == ["lo"]
    above = below_root(one)
    assert above == {"proc"} | {Path(each).parts[1] for each in writable}


async def test_the_zygote_keeps_few_rights_and_none_for_good(
    real_host: RealHost, pair: tuple[Sandbox, ...]
) -> None:
    machines = {pid_of(sandbox) for sandbox in pair}
    zygotes = real_host.vmm_processes() - machines
    assert zygotes
    few = 1 << 1 | 1 << 5 | 1 << 6 | 1 << 7  # DAC_OVERRIDE, KILL, SETGID, SETUID
    users = set()
    for zygote in zygotes:
        assert int(status(zygote, "CapPrm")[0], 16) == few
        assert namespace(zygote, "user") != namespace("self", "user"), "it has them over the host"
        maps = [tuple(map(int, line.split())) for line in read(zygote, "uid_map")]
        assert all(inside == outside for inside, outside, _ in maps)
        (uid,) = set(status(zygote, "Uid"))
        for each in (uid, *(uid for pid in machines for uid in status(pid, "Uid"))):
            assert any(first <= int(each) < first + count for first, _, count in maps)
        assert sum(count for _, _, count in maps) * 16 < UIDS.count
        assert all(first in UIDS and first + count - 1 in UIDS for first, _, count in maps)
        users.add(uid)
        assert int(status(zygote, "CapBnd")[0], 16) == 0
        assert status(zygote, "NoNewPrivs") == ["1"]
        assert namespace(zygote, "net") != namespace("self", "net")
    assert users.isdisjoint(uid for pid in machines for uid in status(pid, "Uid"))


async def test_siblings_are_users_of_their_own_and_can_be_reset(
    real_host: RealHost, pair: tuple[Sandbox, ...]
) -> None:
    source = pair[0]
    await value(real_host, source.id, "x = 7")
    branches = real_host.service.branches
    result = await branches.branch(CALLER, source.id, 2, SIBLINGS)
    try:
        users = set(status(pid_of(source), "Uid"))
        for sibling in result.fork.sandboxes:
            pid = pid_of(sibling)
            (uid,) = set(status(pid, "Uid"))
            assert int(uid) >= UIDS.siblings_first
            assert set(status(pid, "Gid")) == {uid}
            assert status(pid, "Groups") == [str(UIDS.first)]
            folder = real_host.settings.sandboxes_dir / sibling.id
            assert folder.stat().st_uid == int(uid)
            users.add(uid)
            assert int(status(pid, "CapPrm")[0], 16) == 0
            assert namespace(pid, "net") == namespace(pid_of(source), "net")
            assert read(pid, "cgroup")[0].endswith(f"/{sibling.id}")
            assert await value(real_host, sibling.id, "x") == 7
        assert len(users) == 3
        for thread in threads(pid_of(source)):
            policy = os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK
            assert policy == os.SCHED_OTHER, "it stays urgent, and will be killed for that"
        one = result.fork.sandboxes[0]
        await value(real_host, one.id, "x = 8")
        await real_host.service.sandboxes.reset(CALLER, one.id, deadline_s=EVAL_TIMEOUT_S)
        assert await value(real_host, one.id, "x") == 7
    finally:
        for sibling in result.fork.sandboxes:
            await real_host.service.sandboxes.delete(CALLER, sibling.id)


async def test_folders_of_sandboxes_are_their_users_alone(
    real_host: RealHost, pair: tuple[Sandbox, ...]
) -> None:
    for sandbox in pair:
        folder = real_host.settings.sandboxes_dir / sandbox.id
        found = folder.stat()
        assert found.st_mode & 0o777 == 0o700
        assert [str(found.st_uid)] == sorted(set(status(pid_of(sandbox), "Uid")))
