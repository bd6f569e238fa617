"""Forked sandboxes are ready or failed, live until they end, and leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.engine.configs import ChildConfig, Identity, NetworkConfig, members
from forkd.engine.frames import Kind, encode_json
from forkd.errors import (
    Conflict,
    EngineError,
    EngineExited,
    InvalidRequest,
    NotFound,
)
from forkd.host.spawn import Process
from forkd.limits import FORK_COUNT_MAX
from forkd.model.ids import new_sandbox_id, parse_tag
from forkd.model.sandbox import ForkOptions, SandboxState
from forkd.service.owner import NO_REASON
from forkd.service.sandboxes import REQUEST_CHILDREN_MAX
from tests.support.service_host import TAG, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.ids import SandboxId
    from forkd.service.host_service import HostService
    from tests.support.service_host import FakeHost

OPTIONS = ForkOptions()
DEADLINE_S = 20.0


@pytest.fixture
async def service(fake_host: FakeHost) -> AsyncIterator[HostService]:
    """A service with one snapshot; its sandboxes are deleted afterwards."""
    async with fake_host.service() as made:
        await fake_host.bake(made, fake_host.recipe())
        yield made
        await delete_all(made)
        assert fake_host.left_over() == []


async def delete_all(service: HostService) -> None:
    """Delete every sandbox; one that somebody else deletes meanwhile is fine."""
    for sandbox in await service.list_sandboxes():
        with contextlib.suppress(NotFound):
            await service.delete_sandbox(sandbox.id)


async def kill(pid: int) -> None:
    """Kill a process and return when it has ended."""
    process = Process.open(pid)
    assert process is not None
    with process:
        process.kill()
        assert await process.wait(DEADLINE_S)


async def exited(service: HostService, sandbox: SandboxId) -> None:
    """Return when a sandbox has ended; its console log ends then."""
    async with asyncio.timeout(DEADLINE_S):
        async for _ in service.follow_console_log(sandbox):
            pass


async def test_every_child_is_ready_has_what_was_warmed_and_an_identity_of_its_own(
    service: HostService,
) -> None:
    result = await service.fork(TAG, 20, OPTIONS)

    assert (len(result.sandboxes), result.failures) == (20, ())
    assert {sandbox.state for sandbox in result.sandboxes} == {SandboxState.RUNNING}
    answers = [await service.eval(sandbox.id, "answer") for sandbox in result.sandboxes]
    assert [answer.value for answer in answers] == [42] * 20
    for name in ("hostname", "machine_id", "boot_id"):
        code = f"identity['{name}']"
        values = {(await service.eval(s.id, code)).repr for s in result.sandboxes}
        assert len(values) == 20


async def test_sandboxes_are_listed_oldest_first_and_by_tag(service: HostService) -> None:
    first = (await service.fork(TAG, 1, OPTIONS)).sandboxes
    second = (await service.fork(TAG, 1, OPTIONS)).sandboxes

    assert await service.list_sandboxes() == first + second
    assert await service.list_sandboxes(TAG) == first + second
    assert await service.list_sandboxes(parse_tag("other")) == ()
    assert await service.get_sandbox(first[0].id) == first[0]


@pytest.mark.parametrize("count", [0, FORK_COUNT_MAX + 1])
async def test_a_count_out_of_range_is_refused(service: HostService, count: int) -> None:
    with pytest.raises(InvalidRequest):
        await service.fork(TAG, count, OPTIONS)


async def test_an_unknown_snapshot_and_an_unknown_sandbox_are_not_found(
    service: HostService,
) -> None:
    with pytest.raises(NotFound):
        await service.fork(parse_tag("nowhere"), 1, OPTIONS)
    with pytest.raises(NotFound):
        await service.get_sandbox(new_sandbox_id())
    with pytest.raises(NotFound):
        await service.delete_sandbox(new_sandbox_id())


async def test_a_deleted_sandbox_is_gone_with_its_process_and_folder(
    service: HostService, fake_host: FakeHost
) -> None:
    (sandbox,) = (await service.fork(TAG, 1, OPTIONS)).sandboxes
    assert sandbox.pid in fake_host.vmm_processes()

    await service.delete_sandbox(sandbox.id)

    assert sandbox.pid not in fake_host.vmm_processes()
    assert fake_host.left_over() == []
    with pytest.raises(NotFound):
        await service.get_sandbox(sandbox.id)


async def test_deleting_a_sandbox_twice_at_once_ends_well_for_both(service: HostService) -> None:
    (sandbox,) = (await service.fork(TAG, 1, OPTIONS)).sandboxes

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(service.delete_sandbox(sandbox.id))

    assert await service.list_sandboxes() == ()


async def test_a_sandbox_whose_machine_dies_is_exited_and_keeps_only_its_console(
    service: HostService, fake_host: FakeHost
) -> None:
    dying, other = (await service.fork(TAG, 2, OPTIONS)).sandboxes
    with pytest.raises(EngineExited):
        await service.eval(dying.id, "die")
    await exited(service, dying.id)

    found = await service.get_sandbox(dying.id)
    assert (found.state, found.pid) == (SandboxState.EXITED, None)
    assert found.exit_reason == NO_REASON
    assert b"hello" in await service.console_log(dying.id)
    with pytest.raises(Conflict, match=f"exited: {NO_REASON}"):
        await service.eval(dying.id, "1")
    assert (await service.eval(other.id, "answer")).value == 42

    await service.delete_sandbox(dying.id)
    await service.delete_sandbox(other.id)
    assert fake_host.left_over() == []


async def test_a_child_that_fails_is_reported_and_the_others_live(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs="fork=fail:3"))

        result = await service.fork(TAG, 7, OPTIONS)

        assert (len(result.sandboxes), len(result.failures)) == (5, 2)
        assert {(f.stage, f.code) for f in result.failures} == {("agent", "guest")}
        assert all("reseed_failed" in failure.message for failure in result.failures)
        assert len(fake_host.left_over()) == 5
        for sandbox in result.sandboxes:
            await service.delete_sandbox(sandbox.id)


async def test_all_or_nothing_leaves_nothing_when_one_fails(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs="fork=fail:3"))

        with pytest.raises(EngineError, match="2 of 7 children failed, the first at agent"):
            await service.fork(TAG, 7, ForkOptions(all_or_nothing=True))

        assert await service.list_sandboxes() == ()
        assert fake_host.left_over() == []
        assert len((await service.fork(TAG, 2, ForkOptions(all_or_nothing=True))).sandboxes) == 2
        for sandbox in await service.list_sandboxes():
            await service.delete_sandbox(sandbox.id)


async def test_a_limit_that_cannot_be_set_fails_the_child(
    service: HostService, fake_host: FakeHost
) -> None:
    result = await service.fork(TAG, 2, ForkOptions(memory_limit_mib=64))

    assert result.sandboxes == ()
    assert [failure.stage for failure in result.failures] == ["prepare", "prepare"]
    assert fake_host.left_over() == []


async def test_a_zygote_that_dies_in_a_fork_is_an_error_and_leaves_no_child(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs="fork=die"))

        with pytest.raises(EngineExited):
            await service.fork(TAG, 3, OPTIONS)

        assert await service.list_sandboxes() == ()
        assert fake_host.left_over() == []


async def test_a_zygote_that_dies_takes_no_child_and_the_next_fork_has_another(
    service: HostService, fake_host: FakeHost
) -> None:
    (sandbox,) = (await service.fork(TAG, 1, OPTIONS)).sandboxes
    (zygote,) = set(fake_host.vmm_processes()) - {sandbox.pid}
    await kill(zygote)

    assert (await service.eval(sandbox.id, "answer")).value == 42
    assert len((await service.fork(TAG, 1, OPTIONS)).sandboxes) == 1


async def test_a_zygote_is_shared_by_forks_at_once(
    service: HostService, fake_host: FakeHost
) -> None:
    async with asyncio.TaskGroup() as group:
        forks = [group.create_task(service.fork(TAG, 3, OPTIONS)) for _ in range(4)]

    ids = {sandbox.id for fork in forks for sandbox in fork.result().sandboxes}
    assert len(ids) == 12
    assert len(fake_host.vmm_processes()) == 12 + 1


async def test_a_client_that_goes_away_in_a_fork_leaves_no_sandbox(
    service: HostService, fake_host: FakeHost
) -> None:
    fork = asyncio.ensure_future(service.fork(TAG, 30, OPTIONS))
    await until(lambda: fake_host.left_over() != [])

    fork.cancel()

    await until(lambda: fake_host.left_over() == [] and len(fake_host.vmm_processes()) == 1)
    await delete_all(service)  # waits for the deletions under way
    assert await service.list_sandboxes() == ()


async def test_more_children_than_fit_into_one_request_are_forked(
    service: HostService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkd.service.sandboxes.REQUEST_CHILDREN_MAX", 4)

    assert len((await service.fork(TAG, 9, OPTIONS)).sandboxes) == 9


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
    )
    children = [members(child)] * REQUEST_CHILDREN_MAX

    encode_json(Kind.REQUEST, {"op": "fork", "children": children, "deadline_s": 3600.0})
