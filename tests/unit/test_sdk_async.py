"""The SDK, in both flavours, does over HTTP what the service does."""

from __future__ import annotations

import hashlib
import io
import signal
import tarfile
from typing import TYPE_CHECKING

import pytest

from forkd import AsyncClient
from forkd.errors import (
    BudgetError,
    Conflict,
    EngineError,
    EngineTimeout,
    ExecTimeout,
    GuestError,
    InvalidRequest,
    NotFound,
    TransportError,
    WarmUpError,
)
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from forkd.sdk import AsyncSandbox
    from forkd.wire.v2 import ProgressEvent
    from tests.support.daemon import RunningDaemon


@pytest.fixture
async def client(daemon: RunningDaemon) -> AsyncIterator[AsyncClient]:
    daemon.service.stored = some_snapshots("warm", "is-flaky", "is-broken")
    async with AsyncClient(daemon.url) as client:
        yield client


@pytest.fixture
async def sandbox(client: AsyncClient) -> AsyncSandbox:
    return (await client.fork("warm"))[0]


async def test_a_bake_reports_its_steps_and_returns_the_snapshot(client: AsyncClient) -> None:
    steps: list[ProgressEvent] = []

    made = await client.snapshots.create("new", "/recipes/good", on_progress=steps.append)

    assert (made.tag, made.status, made.memory_mib) == ("new", "ready", 512)
    assert [(each.stage, each.fraction) for each in steps] == [("boot", None), ("warm", 1.0)]


async def test_a_bake_that_fails_midway_raises_the_daemons_error(client: AsyncClient) -> None:
    with pytest.raises(WarmUpError, match="ValueError") as caught:
        await client.snapshots.create("new", "/recipes/fails")

    assert caught.value.context == {"recipe": "fails"}


async def test_a_tag_that_exists_is_a_conflict(client: AsyncClient) -> None:
    with pytest.raises(Conflict, match="snapshot warm exists"):
        await client.snapshots.create("warm", "/recipes/good")


async def test_an_image_is_built_with_its_steps_reported(client: AsyncClient) -> None:
    steps: list[ProgressEvent] = []

    made = await client.images.build("/recipes/good", on_progress=steps.append)

    assert (made.key, made.disk_mib, len(steps)) == ("key", 2048, 1)


async def test_a_recipe_of_this_host_is_uploaded_once(
    client: AsyncClient, daemon: RunningDaemon, tmp_path: Path
) -> None:
    (tmp_path / "recipe.toml").write_text('name = "good"')
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to("../recipe.toml")

    made = await client.images.build(tmp_path)
    await client.snapshots.create("new", str(tmp_path))
    again = await client.recipes.upload(tmp_path / "recipe.toml")

    (sent,) = daemon.service.recipes.uploads
    with tarfile.open(fileobj=io.BytesIO(sent)) as tar:
        assert [each.name for each in tar] == ["data", "data/link", "recipe.toml"]
    assert (made.name, again.name) == ("good", "good")
    assert again.recipe == f"sha256:{hashlib.sha256(sent).hexdigest()}"


async def test_any_toml_file_of_a_folder_is_its_recipe(
    client: AsyncClient, daemon: RunningDaemon, tmp_path: Path
) -> None:
    (tmp_path / "recipe.toml").write_text('name = "fails"')
    (tmp_path / "good.toml").write_text('name = "good"')

    assert (await client.images.build(tmp_path / "good.toml")).name == "good"

    with tarfile.open(fileobj=io.BytesIO(daemon.service.recipes.uploads[0])) as tar:
        assert [each.name for each in tar] == ["recipe.toml"]


async def test_a_long_upload_says_how_far_it_is(client: AsyncClient, tmp_path: Path) -> None:
    steps: list[ProgressEvent] = []
    (tmp_path / "recipe.toml").write_text('name = "good"')
    (tmp_path / "data").write_bytes(bytes(20 << 20))

    await client.recipes.upload(tmp_path, on_progress=steps.append)

    assert [each.stage for each in steps] == ["upload", "upload"]
    assert 0.3 < (steps[0].fraction or 0) < 0.5 < (steps[1].fraction or 0) < 1
    assert "20 MiB" in steps[0].message


async def test_a_recipe_that_is_nowhere_is_not_found(client: AsyncClient, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no recipe at"):
        await client.images.build(tmp_path)
    with pytest.raises(NotFound, match="no recipe at"):
        await client.recipes.upload("good")
    with pytest.raises(NotFound, match="no recipe 'nothing'"):
        await client.images.build("nothing")
    with pytest.raises(NotFound, match="upload it again"):
        await client.images.build(f"sha256:{'0' * 64}")


async def test_links_are_written_compacted_and_removed_with_what_stands_on_them(
    client: AsyncClient,
) -> None:
    said: list[str] = []
    (sandbox,) = await client.fork("warm", wait=False)

    taken = await client.snapshots.link("taken", sandbox.id, wait=False)
    ran = await client.snapshots.link(
        "ran", "warm", exec="true", on_progress=lambda step: said.append(step.message)
    )

    assert (taken.status, taken.parent_tag, taken.source_id) == ("writing", "warm", sandbox.id)
    assert (ran.status, said) == ("ready", ["true"])
    assert (await client.snapshots.compact("ran", "flat")).parent_tag is None
    with pytest.raises(InvalidRequest, match="exclude each other"):
        await client.snapshots.delete("warm", cascade=True, force=True)
    await sandbox.kill()
    await client.snapshots.delete("warm", cascade=True)
    assert "flat" in [each.tag for each in await client.snapshots.list()]
    assert (await client.snapshots.gc(dry_run=True)).removed == []


async def test_snapshots_are_listed_described_and_deleted(client: AsyncClient) -> None:
    await client.snapshots.delete("is-flaky")

    assert [each.tag for each in await client.snapshots.list()] == ["is-broken", "warm"]
    assert (await client.snapshots.info("warm")).memory_logical_bytes == 512 << 20


async def test_a_snapshot_in_use_is_not_deleted(client: AsyncClient, sandbox: AsyncSandbox) -> None:
    assert (await client.snapshots.info("warm")).sandbox_ids == [sandbox.id]

    with pytest.raises(Conflict, match=sandbox.id):
        await client.snapshots.delete("warm")


async def test_a_fork_gives_as_many_sandboxes_as_asked_for(client: AsyncClient) -> None:
    made = await client.fork("warm", 3, memory_limit_mib=64, network=True)

    listed = await client.sandboxes.list("warm")
    assert {each.id for each in made} == {each.id for each in listed}
    assert (made[0].info.memory_limit_mib, made[0].info.guest_addr) == (64, "10.200.0.2")
    assert made[0].info.fork_ms is not None
    assert made[0].info.fork_ms.total == 4.75


async def test_a_fork_is_all_or_nothing(client: AsyncClient) -> None:
    with pytest.raises(EngineError, match="2 of 4 failed"):
        await client.fork("is-flaky", 4)

    assert await client.sandboxes.list() == []


async def test_a_fork_that_may_fail_in_part_says_what_failed(client: AsyncClient) -> None:
    ready, failed = await client.try_fork("is-flaky", 4)

    assert (len(ready), len(failed)) == (2, 2)
    assert (failed[0].stage, failed[0].error, failed[0].code) == ("agent", "no answer", "guest")


async def test_a_fork_of_which_nothing_remains_is_an_error(client: AsyncClient) -> None:
    with pytest.raises(EngineError, match="none of 2 became ready"):
        await client.try_fork("is-broken", 2)


async def test_a_program_has_no_time_limit_unless_it_is_given_one(
    sandbox: AsyncSandbox, daemon: RunningDaemon
) -> None:
    await sandbox.exec(["echo"])
    await sandbox.exec(["echo"], timeout_s=5.0)

    assert [each.request.timeout_s for each in daemon.service.execs] == [None, 5.0]


async def test_an_unknown_tag_is_not_found(client: AsyncClient) -> None:
    with pytest.raises(NotFound, match="no snapshot 'nothing'"):
        await client.fork("nothing")


@pytest.mark.parametrize("n", [0, 10_001])
async def test_a_count_out_of_range_names_its_field(client: AsyncClient, n: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.fork("warm", n)

    assert caught.value.context["field"] == "n"


@pytest.mark.parametrize("tag", ["../etc", "a..b", "", "x" * 65])
async def test_a_tag_that_could_leave_its_folder_is_refused(client: AsyncClient, tag: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.fork(tag)

    assert caught.value.context["field"] == "tag"


async def test_a_sandbox_as_a_context_is_killed_at_its_end(client: AsyncClient) -> None:
    async with (await client.fork("warm"))[0] as sandbox:
        assert (await sandbox.ping()).pong

    with pytest.raises(NotFound):
        await sandbox.refresh()


async def test_a_sandbox_killed_within_its_context_is_fine(sandbox: AsyncSandbox) -> None:
    async with sandbox:
        await sandbox.kill()


async def test_an_evaluation_keeps_its_names(sandbox: AsyncSandbox) -> None:
    await sandbox.eval("import math; x = 40")

    result = await sandbox.eval("print('hi'); x + math.floor(2.5)")

    assert (result.value, result.repr, result.stdout, result.ok) == (42, "42", "hi\n", True)
    assert result.check() is result


async def test_an_exception_in_evaluated_code_is_data(sandbox: AsyncSandbox) -> None:
    result = await sandbox.eval("1 / 0")

    assert str(result.error) == "ZeroDivisionError: division by zero"
    with pytest.raises(GuestError, match="Traceback"):
        result.check()


async def test_an_evaluation_out_of_time_says_so(sandbox: AsyncSandbox) -> None:
    result = await sandbox.eval("print('hi')", timeout_s=0.5, check=False)

    assert (result.timed_out, result.ok) == (True, False)
    with pytest.raises(ExecTimeout, match="timed out") as caught:
        await sandbox.eval("print('hi')", timeout_s=0.5)
    assert caught.value.result.stdout == "hi\n"


async def test_a_program_returns_its_output_and_exit_code(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec(["fail"])

    assert (result.exit_code, result.stdout, result.stderr) == (0, "out", "err �")
    assert (await sandbox.exec(["exit", "3"])).exit_code == 3


async def test_a_program_gets_its_input_and_environment(sandbox: AsyncSandbox) -> None:
    assert (await sandbox.exec(["cat"], stdin="hello")).stdout == "hello"
    assert (await sandbox.exec(["env"], env={"A": "b"})).stdout == '{"A": "b"}'


async def test_output_beyond_the_limit_is_dropped_and_said_to_be(sandbox: AsyncSandbox) -> None:
    limit = 8 << 20

    within = await sandbox.exec(["spew", str(limit)])
    beyond = await sandbox.exec(["spew", str(limit + 1)])

    assert (len(within.stdout), within.truncated) == (limit, False)
    assert (len(beyond.stdout), beyond.truncated) == (limit, True)


async def test_a_program_that_does_not_exist_is_an_error(sandbox: AsyncSandbox) -> None:
    with pytest.raises(NotFound, match="no such program") as caught:
        await sandbox.exec(["nope"])

    assert caught.value.context == {"guest_code": "not_found", "program": "nope"}


async def test_streams_go_both_ways_while_a_program_runs(sandbox: AsyncSandbox) -> None:
    async with sandbox.exec_stream(["cat"], stdin=True) as process:
        await process.write(b"one")
        first = await anext(process)
        await process.write(b"two")
        await process.close_stdin()
        rest = [each.data async for each in process]

    assert process.pid == 42
    assert (first.stream, first.data, rest) == ("stdout", b"one", [b"two"])
    assert process.exit is not None
    assert process.exit.exit_code == 0


async def test_long_input_and_output_pass_unharmed(sandbox: AsyncSandbox) -> None:
    sent = bytes(range(256)) * 4096

    async with sandbox.exec_stream(["cat"], stdin=True) as process:
        await process.write(sent)
        await process.close_stdin()
        received = b"".join([each.data async for each in process])

    assert received == sent


async def test_a_signal_reaches_the_program(sandbox: AsyncSandbox) -> None:
    async with sandbox.exec_stream(["sleep"]) as process:
        await process.send_signal(signal.SIGTERM)
        ended = await process.wait()

    assert (ended.exit_code, ended.signal) == (None, signal.SIGTERM)


async def test_a_terminal_is_resized(sandbox: AsyncSandbox) -> None:
    async with sandbox.exec_stream(["size"], tty=(24, 80)) as process:
        await process.resize(50, 132)
        output = [each.data async for each in process]

    assert output == [b"50x132"]


async def test_leaving_a_program_ends_it(daemon: RunningDaemon, sandbox: AsyncSandbox) -> None:
    async with sandbox.exec_stream(["sleep"]):
        pass

    daemon.wait_for(lambda: daemon.service.execs[0].closed)


async def test_a_stream_of_a_program_that_does_not_exist_is_refused(sandbox: AsyncSandbox) -> None:
    with pytest.raises(NotFound, match="no such program"):
        async with sandbox.exec_stream(["nope"]):
            pass


async def test_input_that_a_program_does_not_take_is_a_conflict(sandbox: AsyncSandbox) -> None:
    async with sandbox.exec_stream(["sleep"]) as process:
        await process.write(b"hello")
        with pytest.raises(Conflict, match="no standard input"):
            await process.wait()


async def test_a_program_that_was_not_entered_says_so(sandbox: AsyncSandbox) -> None:
    with pytest.raises(TransportError, match="enter its context"):
        await sandbox.exec_stream(["cat"]).write(b"x")


async def test_a_file_comes_back_as_it_was_written(sandbox: AsyncSandbox) -> None:
    data = bytes(range(256)) * 1000

    assert await sandbox.files.write("/tmp/a b?&", data) == len(data)

    assert await sandbox.files.read("/tmp/a b?&") == data
    async with sandbox.files.open("/tmp/a b?&", offset=256, length=2) as pieces:
        assert [each async for each in pieces] == [b"\0\x01"]


async def test_text_is_written_and_read_as_utf8(sandbox: AsyncSandbox) -> None:
    await sandbox.files.write("/deep/er/x", "grüß", make_parents=True)

    assert await sandbox.files.read_text("/deep/er/x") == "grüß"


async def test_a_file_is_sent_as_it_comes(sandbox: AsyncSandbox) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for each in (b"a", b"b", b"c"):
            yield each

    assert await sandbox.files.write("/tmp/x", pieces()) == 3
    assert (await sandbox.files.stat("/tmp/x")).size_bytes == 3


async def test_folders_are_made_listed_moved_from_and_removed(sandbox: AsyncSandbox) -> None:
    files = sandbox.files
    await files.make_dir("/tmp/d", parents=True)
    await files.write("/tmp/d/one", b"1")
    await files.move("/tmp/d/one", "/tmp/d/two")

    assert [each.name for each in await files.list("/tmp/d")] == ["two"]
    await files.remove("/tmp/d", recursive=True)
    assert not await files.exists("/tmp/d/two")


async def test_a_file_that_is_missing_is_not_found(sandbox: AsyncSandbox) -> None:
    with pytest.raises(NotFound, match="no such file"):
        await sandbox.files.read("/tmp/nothing")
    assert not await sandbox.files.exists("/tmp/nothing")


async def test_a_sandbox_that_is_missing_is_not_a_file_that_is_missing(
    sandbox: AsyncSandbox,
) -> None:
    await sandbox.kill()

    with pytest.raises(NotFound, match="no sandbox"):
        await sandbox.files.exists("/tmp")


async def test_logs_are_read_and_followed_to_the_end(sandbox: AsyncSandbox) -> None:
    assert await sandbox.logs() == b"Linux version 6.1.0\n"

    followed = sandbox.follow_logs()
    first = await anext(followed)
    await sandbox.kill()
    rest = [each async for each in followed]

    assert (first, rest) == (b"Linux version 6.1.0\n", [b"reboot: Power down\n"])


async def test_the_host_and_the_version_are_told(client: AsyncClient) -> None:
    assert (await client.host()).memory_total_mib == 16384
    assert (await client.version()).api == "v2"


async def test_a_daemon_that_is_not_there_is_a_transport_error() -> None:
    """Port 1 is `tcpmux`, which nobody serves."""
    async with AsyncClient("http://127.0.0.1:1") as client:
        with pytest.raises(TransportError, match="forkd up"):
            await client.host()


async def test_siblings_of_a_sandbox_have_what_it_had_and_go_their_own_ways(
    sandbox: AsyncSandbox,
) -> None:
    await sandbox.eval("thought = 7")

    one, other = await sandbox.branch(2)
    await one.eval("thought = 8")

    assert one.info.parent_id == other.info.parent_id == sandbox.id
    values = [(await each.eval("thought")).value for each in (sandbox, one, other)]
    assert values == [7, 8, 7]


async def test_a_branch_reports_its_pause_and_keeps_its_instant_as_a_snapshot(
    client: AsyncClient, sandbox: AsyncSandbox
) -> None:
    made = await sandbox.try_branch(2, tag="kept", wait=False)

    assert (len(made.sandboxes), made.failures) == (2, [])
    assert (made.pause_ms, made.stall_ms) == (1.25, 2.5)
    assert made.snapshot is not None
    assert (made.snapshot.tag, made.snapshot.status) == ("kept", "writing")
    assert (await sandbox.snapshot("too")).status == "ready"
    assert {each.tag for each in await client.snapshots.list()} >= {"kept", "too"}


async def test_a_branch_that_fails_in_part_says_so(client: AsyncClient) -> None:
    source = (await client.try_fork("is-flaky", 1))[0][0]

    made = await source.try_branch(2)

    assert (len(made.sandboxes), len(made.failures)) == (1, 1)
    with pytest.raises(EngineError, match="1 of 2 failed"):
        await source.branch(2)


async def test_a_branch_of_nothing_is_refused(sandbox: AsyncSandbox) -> None:
    with pytest.raises(InvalidRequest, match="nothing to do"):
        await sandbox.branch(0)
    with pytest.raises(InvalidRequest, match="ttl_s:"):
        await sandbox.branch(1, ttl_s=0.0)


async def test_a_tree_at_its_budget_is_an_error_of_its_own(sandbox: AsyncSandbox) -> None:
    (child,) = await sandbox.branch()
    (leaf,) = await child.branch()

    with pytest.raises(BudgetError, match="too deep") as caught:
        await leaf.branch()
    assert caught.value.context["budget"] == "depth"


async def test_a_sandbox_is_reset_in_place(sandbox: AsyncSandbox) -> None:
    await sandbox.eval("thought = 7")

    assert await sandbox.reset() == 2.5

    assert (await sandbox.eval("thought")).error is not None
    with pytest.raises(EngineTimeout):
        await sandbox.reset(deadline_s=0.5)


async def test_limits_are_changed_while_it_runs(client: AsyncClient) -> None:
    (made,) = await client.fork("warm", memory_limit_mib=64, pids_limit=16)
    found = await made.set_limits(memory_limit_mib=128, cpu_limit=0.5)
    assert (found.memory_limit_mib, found.cpu_limit, found.pids_limit) == (128, 0.5, 16)


async def test_a_promoted_sandbox_is_its_parent_from_then_on(
    client: AsyncClient, sandbox: AsyncSandbox
) -> None:
    winner, loser = await sandbox.branch(2)
    await winner.eval("thought = 8")
    old = winner.id

    ended = await winner.promote()

    assert (winner.id, set(ended)) == (sandbox.id, {old, loser.id})
    assert (await winner.eval("thought")).value == 8
    assert [each.id for each in await client.sandboxes.list()] == [sandbox.id]
    with pytest.raises(Conflict, match="not branched"):
        await winner.promote()


async def test_the_tree_says_who_was_branched_from_whom(
    client: AsyncClient, sandbox: AsyncSandbox
) -> None:
    (child,) = await sandbox.branch()
    stranger = (await client.fork("warm"))[0]

    tree = await client.tree()

    assert [root.id for root in tree.roots] == [sandbox.id, stranger.id]
    (node,) = tree.roots[0].children
    assert (node.id, node.status, node.private_bytes) == (child.id, "running", 3 << 20)
    assert tree.limits.live == 100
    assert [root.id for root in (await client.tree(child.id)).roots] == [sandbox.id]


async def test_a_difference_names_what_was_added_changed_and_removed(
    client: AsyncClient, sandbox: AsyncSandbox
) -> None:
    for name in ("kept", "changed", "removed"):
        await sandbox.files.write(f"/root/{name}", name)
    (child,) = await sandbox.branch()
    await child.files.write("/root/changed", "other")
    await child.files.remove("/root/removed")
    await child.files.write("/root/added", "new")

    found = await client.diff(sandbox.id, child.id)

    assert [(each.path, each.change) for each in found.changes] == [
        ("/root/added", "added"),
        ("/root/changed", "changed"),
        ("/root/removed", "removed"),
    ]
    assert (found.more, found.pages_apart) == (0, 5)
    assert len((await client.diff("warm", sandbox.id)).changes) == 3
    with pytest.raises(InvalidRequest):
        await client.diff("../x", sandbox.id)


async def test_events_come_in_order_and_end_where_there_are_no_more(
    client: AsyncClient, daemon: RunningDaemon
) -> None:
    daemon.service.journal.happen("a", "b", "c")

    found = [each async for each in client.events(after=1, follow=False)]

    assert [(each.id, each.event, each.subject) for each in found] == [
        (2, "sandbox.ready", "b"),
        (3, "sandbox.ready", "c"),
    ]
    assert (found[0].tenant, found[0].detail) == ("default", {"tag": "warm"})


async def test_events_go_on_after_each_connection_that_ends(
    client: AsyncClient, daemon: RunningDaemon
) -> None:
    daemon.service.journal.happen("a", "b")
    found = []
    async for each in client.events(after=0):
        found.append(each.subject)
        if len(found) == 2:
            daemon.service.journal.happen("c")
        if len(found) == 3:
            break

    assert found == ["a", "b", "c"]


async def test_events_end_with_their_connection_if_told_so(
    client: AsyncClient, daemon: RunningDaemon
) -> None:
    daemon.service.journal.happen("a")

    assert [each.subject async for each in client.events(after=0, reconnect=False)] == ["a"]


async def test_who_cannot_reach_a_daemon_for_its_events_is_told_at_once() -> None:
    async with AsyncClient("http://127.0.0.1:1") as nowhere:
        with pytest.raises(TransportError, match="no daemon answers"):
            await anext(nowhere.events())
