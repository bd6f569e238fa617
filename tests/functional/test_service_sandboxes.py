"""Forked sandboxes are ready or failed, live until they end, and leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.engine.configs import ChildConfig, Identity, NetworkConfig, members
from forkd.engine.frames import Kind, encode_json
from forkd.engine.watch import NO_REASON
from forkd.errors import (
    Conflict,
    EngineError,
    EngineExited,
    HostError,
    InvalidRequest,
    NotFound,
)
from forkd.host.spawn import Process
from forkd.limits import FORK_COUNT_MAX
from forkd.model.caller import Scope, Tenant
from forkd.model.filters import SandboxFilter
from forkd.model.ids import new_sandbox_id, parse_tag
from forkd.model.sandbox import ForkOptions, NewLimits, SandboxState
from forkd.service.sandboxes.forking import REQUEST_CHILDREN_MAX
from forkd.service.settings import TOPS_PATH_BYTES_MAX
from tests.support.callers import CALLER
from tests.support.service_host import TAG, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.ids import SandboxId
    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

OPTIONS = ForkOptions()
DEADLINE_S = 20.0


@pytest.fixture
async def service(fake_host: FakeHost) -> AsyncIterator[Host]:
    """A service with one snapshot; its sandboxes are deleted afterwards."""
    async with fake_host.service() as made:
        await fake_host.bake(made, fake_host.recipe())
        yield made
        await delete_all(made)
        assert fake_host.left_over() == []


async def delete_all(service: Host) -> None:
    """Delete every sandbox; one that somebody else deletes meanwhile is fine."""
    for sandbox in await service.sandboxes.list(CALLER):
        with contextlib.suppress(NotFound):
            await service.sandboxes.delete(CALLER, sandbox.id)


async def kill(pid: int) -> None:
    """Kill a process and return when it has ended."""
    process = Process.open(pid)
    assert process is not None
    with process:
        process.kill()
        assert await process.wait(DEADLINE_S)


async def exited(service: Host, sandbox: SandboxId) -> None:
    """Return when a sandbox has ended; its console log ends then."""
    async with asyncio.timeout(DEADLINE_S):
        async for _ in service.sandboxes.follow_console_log(CALLER, sandbox):
            pass


async def test_every_child_is_ready_has_what_was_warmed_and_an_identity_of_its_own(
    service: Host,
) -> None:
    result = await service.sandboxes.fork(CALLER, TAG, 20, OPTIONS)

    assert (len(result.sandboxes), result.failures) == (20, ())
    assert {sandbox.state for sandbox in result.sandboxes} == {SandboxState.RUNNING}
    answers = [
        await service.guests.eval(CALLER, sandbox.id, "answer") for sandbox in result.sandboxes
    ]
    assert [answer.value for answer in answers] == [42] * 20
    for name in ("hostname", "machine_id", "boot_id"):
        code = f"identity['{name}']"
        values = {(await service.guests.eval(CALLER, s.id, code)).repr for s in result.sandboxes}
        assert len(values) == 20


async def test_sandboxes_are_listed_oldest_first_and_by_tag(service: Host) -> None:
    first = (await service.sandboxes.fork(CALLER, TAG, 1, OPTIONS)).sandboxes
    second = (await service.sandboxes.fork(CALLER, TAG, 1, OPTIONS)).sandboxes

    assert await service.sandboxes.list(CALLER) == first + second
    assert await service.sandboxes.list(CALLER, SandboxFilter(tag=TAG)) == first + second
    assert await service.sandboxes.list(CALLER, SandboxFilter(tag=parse_tag("other"))) == ()
    assert await service.sandboxes.get(CALLER, first[0].id) == first[0]


@pytest.mark.parametrize("count", [0, FORK_COUNT_MAX + 1])
async def test_a_count_out_of_range_is_refused(service: Host, count: int) -> None:
    with pytest.raises(InvalidRequest):
        await service.sandboxes.fork(CALLER, TAG, count, OPTIONS)


async def test_a_sandbox_is_found_by_a_beginning_that_no_other_has(service: Host) -> None:
    made = (await service.sandboxes.fork(CALLER, TAG, 3, ForkOptions())).sandboxes
    wanted = made[1]

    assert (await service.sandboxes.find(CALLER, wanted.id)).id == wanted.id
    assert (await service.sandboxes.find(CALLER, wanted.id[:-1])).id == wanted.id
    assert (await service.sandboxes.find(CALLER, wanted.id[3:-1])).id == wanted.id
    stranger = replace(CALLER, tenant=Tenant("other"), scopes=frozenset({Scope.READ}))
    for start in (wanted.id, wanted.id[:-1]):
        with pytest.raises(NotFound):
            await service.sandboxes.find(stranger, start)


async def test_an_unknown_snapshot_and_an_unknown_sandbox_are_not_found(
    service: Host,
) -> None:
    with pytest.raises(NotFound):
        await service.sandboxes.fork(CALLER, parse_tag("nowhere"), 1, OPTIONS)
    with pytest.raises(NotFound):
        await service.sandboxes.get(CALLER, new_sandbox_id())
    with pytest.raises(NotFound):
        await service.sandboxes.delete(CALLER, new_sandbox_id())


async def test_a_deleted_sandbox_is_gone_with_its_process_and_folder(
    service: Host, fake_host: FakeHost
) -> None:
    (sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, OPTIONS)).sandboxes
    assert sandbox.pid in fake_host.vmm_processes()

    await service.sandboxes.delete(CALLER, sandbox.id)

    assert sandbox.pid not in fake_host.vmm_processes()
    assert fake_host.left_over() == []
    with pytest.raises(NotFound):
        await service.sandboxes.get(CALLER, sandbox.id)


async def test_deleting_a_sandbox_twice_at_once_ends_well_for_both(service: Host) -> None:
    (sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, OPTIONS)).sandboxes

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(service.sandboxes.delete(CALLER, sandbox.id))

    assert await service.sandboxes.list(CALLER) == ()


async def test_a_sandbox_whose_machine_dies_is_exited_and_keeps_only_its_console(
    service: Host, fake_host: FakeHost
) -> None:
    dying, other = (await service.sandboxes.fork(CALLER, TAG, 2, OPTIONS)).sandboxes
    with pytest.raises(EngineExited):
        await service.guests.eval(CALLER, dying.id, "die")
    await exited(service, dying.id)

    found = await service.sandboxes.get(CALLER, dying.id)
    assert (found.state, found.pid) == (SandboxState.EXITED, None)
    assert found.exit_reason == NO_REASON
    assert b"hello" in await service.sandboxes.console_log(CALLER, dying.id)
    with pytest.raises(Conflict, match=f"exited: {NO_REASON}"):
        await service.guests.eval(CALLER, dying.id, "1")
    assert (await service.guests.eval(CALLER, other.id, "answer")).value == 42

    await service.sandboxes.delete(CALLER, dying.id)
    await service.sandboxes.delete(CALLER, other.id)
    assert fake_host.left_over() == []


async def test_a_child_that_fails_is_reported_and_the_others_live(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs="fork=fail:3"))

        result = await service.sandboxes.fork(CALLER, TAG, 7, OPTIONS)

        assert (len(result.sandboxes), len(result.failures)) == (5, 2)
        assert {(f.stage, f.code) for f in result.failures} == {("agent", "guest")}
        assert all("reseed_failed" in failure.message for failure in result.failures)
        assert len(fake_host.left_over()) == 5
        for sandbox in result.sandboxes:
            await service.sandboxes.delete(CALLER, sandbox.id)


async def test_all_or_nothing_leaves_nothing_when_one_fails(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs="fork=fail:3"))

        with pytest.raises(EngineError, match="2 of 7 children failed, the first at agent"):
            await service.sandboxes.fork(CALLER, TAG, 7, ForkOptions(all_or_nothing=True))

        assert await service.sandboxes.list(CALLER) == ()
        assert fake_host.left_over() == []
        assert (
            len(
                (
                    await service.sandboxes.fork(CALLER, TAG, 2, ForkOptions(all_or_nothing=True))
                ).sandboxes
            )
            == 2
        )
        for sandbox in await service.sandboxes.list(CALLER):
            await service.sandboxes.delete(CALLER, sandbox.id)


async def test_a_limit_that_cannot_be_set_fails_the_child(
    service: Host, fake_host: FakeHost
) -> None:
    result = await service.sandboxes.fork(CALLER, TAG, 2, ForkOptions(memory_limit_mib=64))

    assert result.sandboxes == ()
    assert [failure.stage for failure in result.failures] == ["prepare", "prepare"]
    assert fake_host.left_over() == []


async def test_a_fork_whose_io_cannot_be_limited_is_refused_before_anything_is_made(
    service: Host, fake_host: FakeHost
) -> None:
    for options in (ForkOptions(io_limit_mib_s=1), ForkOptions(io_limit_ops=100)):
        with pytest.raises(HostError, match="which this host lacks: ask for none"):
            await service.sandboxes.fork(CALLER, TAG, 2, options)

    assert await service.sandboxes.list(CALLER) == ()
    assert fake_host.left_over() == []


async def test_a_sandbox_without_a_cgroup_has_no_limits_to_change(service: Host) -> None:
    (made,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes

    with pytest.raises(Conflict, match="forked without limits, and has no cgroup"):
        await service.sandboxes.set_limits(CALLER, made.id, NewLimits(cpu_limit=1.0))

    assert (await service.sandboxes.get(CALLER, made.id)).cpu_limit is None
    await service.sandboxes.delete(CALLER, made.id)


async def test_a_zygote_that_dies_in_a_fork_is_an_error_and_leaves_no_child(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs="fork=die"))

        with pytest.raises(EngineExited):
            await service.sandboxes.fork(CALLER, TAG, 3, OPTIONS)

        assert await service.sandboxes.list(CALLER) == ()
        assert fake_host.left_over() == []


async def test_a_zygote_that_dies_takes_no_child_and_the_next_fork_has_another(
    service: Host, fake_host: FakeHost
) -> None:
    (sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, OPTIONS)).sandboxes
    (zygote,) = set(fake_host.vmm_processes()) - {sandbox.pid}
    await kill(zygote)

    assert (await service.guests.eval(CALLER, sandbox.id, "answer")).value == 42
    assert len((await service.sandboxes.fork(CALLER, TAG, 1, OPTIONS)).sandboxes) == 1


async def test_a_zygote_is_shared_by_forks_at_once(service: Host, fake_host: FakeHost) -> None:
    async with asyncio.TaskGroup() as group:
        forks = [
            group.create_task(service.sandboxes.fork(CALLER, TAG, 3, OPTIONS)) for _ in range(4)
        ]

    ids = {sandbox.id for fork in forks for sandbox in fork.result().sandboxes}
    assert len(ids) == 12
    assert len(fake_host.vmm_processes()) == 12 + 1


async def test_a_client_that_goes_away_in_a_fork_leaves_no_sandbox(
    service: Host, fake_host: FakeHost
) -> None:
    fork = asyncio.ensure_future(service.sandboxes.fork(CALLER, TAG, 30, OPTIONS))
    await until(lambda: fake_host.left_over() != [])

    fork.cancel()

    await until(lambda: fake_host.left_over() == [] and len(fake_host.vmm_processes()) == 1)
    await delete_all(service)  # waits for the deletions under way
    assert await service.sandboxes.list(CALLER) == ()


async def test_more_children_than_fit_into_one_request_are_forked(
    service: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkd.service.sandboxes.forking.REQUEST_CHILDREN_MAX", 4)

    assert len((await service.sandboxes.fork(CALLER, TAG, 9, OPTIONS)).sandboxes) == 9


@pytest.mark.parametrize(("asked_mib", "limit_mib"), [(None, 10_240), (7, 7)])
async def test_a_private_disk_has_a_limit_a_folder_and_a_reserve(
    service: Host, fake_host: FakeHost, asked_mib: int | None, limit_mib: int
) -> None:
    options = replace(OPTIONS, disk_limit_mib=asked_mib)

    (sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, options)).sandboxes

    code = "[identity['top_' + name] for name in ('limit_bytes', 'directory', 'reserve_bytes')]"
    told = (await service.guests.eval(CALLER, sandbox.id, code)).value
    tops = fake_host.settings.state_dir / "tops"
    assert told == [limit_mib << 20, str(tops), 1 << 30]
    assert tops.is_dir()
    assert sandbox.disk_limit_mib == limit_mib


def test_a_full_request_fits_into_a_frame() -> None:
    child = ChildConfig(
        id=new_sandbox_id(),
        directory=Path("/" + "d" * 200),
        identity=Identity(
            hostname=new_sandbox_id(),
            machine_id="0" * 32,
            boot_id="0" * 36,
            network=NetworkConfig("fk0000", "02:66:6b:00:00:00", "10.200.255.254/30"),
        ),
        cgroup=Path("/" + "c" * 200),
        top_limit_bytes=1 << 44,
        top_directory=Path("/" + "t" * (TOPS_PATH_BYTES_MAX - 1)),
        top_reserve_bytes=1 << 44,
    )
    children = [members(child)] * REQUEST_CHILDREN_MAX

    encode_json(Kind.REQUEST, {"op": "fork", "children": children, "deadline_s": 3600.0})
