"""What happens inside sandboxes comes through the service unchanged, in both directions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict, EngineExited, GuestError, InvalidRequest, NotFound
from forkd.limits import EVAL_CODE_BYTES_MAX, EVAL_OUTPUT_BYTES_MAX, SANDBOX_ENV_BYTES_MAX
from forkd.model.exec import ExecRequest, Exited, Started, Stderr, Stdout, TtySize
from forkd.model.sandbox import ForkOptions, SandboxState
from forkd.service.guests import ECHO_BYTES_MAX
from forkd.service.sandboxes import agent_state
from forkd.service.sandboxes.owner import REASON_AGENT
from tests.support.callers import CALLER
from tests.support.service_host import TAG, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.exec import ExecEvent
    from forkd.model.ids import SandboxId
    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

DEADLINE_S = 20.0


class Held:
    """One sandbox and its service."""

    def __init__(self, service: Host, id_: SandboxId) -> None:
        self.service = service
        self.id = id_


@pytest.fixture
async def held(fake_host: FakeHost) -> AsyncIterator[Held]:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        yield Held(service, sandbox.id)
        with contextlib.suppress(NotFound):
            await service.sandboxes.delete(CALLER, sandbox.id)


async def test_an_evaluation_gives_its_value_and_its_output(held: Held) -> None:
    result = await held.service.guests.eval(CALLER, held.id, "print('out') or [1, 'two']")

    assert (result.repr, result.value, result.stdout) == ("[1, 'two']", [1, "two"], "out\n")
    assert not result.output_truncated


async def test_what_the_code_raises_is_data(held: Held) -> None:
    result = await held.service.guests.eval(CALLER, held.id, "1 / 0")

    assert result.error is not None
    assert (result.has_value, result.error.type) == (False, "ZeroDivisionError")


@pytest.mark.parametrize("name", ["", "Node", "../x", "a" * 33])
async def test_what_is_no_name_of_a_runtime_reaches_no_guest(held: Held, name: str) -> None:
    with pytest.raises(InvalidRequest, match="is not the name of a runtime") as refused:
        await held.service.guests.eval(CALLER, held.id, "1", runtime=name)

    assert refused.value.context == {"field": "runtime"}


async def test_output_past_its_limit_is_dropped_and_said_to_be(held: Held) -> None:
    code = f"print('x' * {EVAL_OUTPUT_BYTES_MAX // 2}, end='')"

    result = await held.service.guests.eval(CALLER, held.id, code)
    assert (len(result.stdout), result.output_truncated) == (EVAL_OUTPUT_BYTES_MAX // 2, False)

    with pytest.raises(InvalidRequest):
        await held.service.guests.eval(CALLER, held.id, "x" * (EVAL_CODE_BYTES_MAX + 1))


async def test_an_evaluation_reuses_its_connection(held: Held) -> None:
    guest = held.service.sandboxes.roster.get(CALLER, held.id).guest
    await held.service.guests.eval(CALLER, held.id, "1")
    first = guest._idle[0]  # noqa: SLF001 - as above
    await held.service.guests.eval(CALLER, held.id, "2")

    assert guest._idle == [first]  # noqa: SLF001 - as above


async def test_echo_returns_what_it_was_given_up_to_its_limit(held: Held) -> None:
    assert await held.service.guests.echo(CALLER, held.id, "héllo") == "héllo"
    assert (
        len(await held.service.guests.echo(CALLER, held.id, "x" * ECHO_BYTES_MAX)) == ECHO_BYTES_MAX
    )

    with pytest.raises(InvalidRequest):
        await held.service.guests.echo(CALLER, held.id, "x" * (ECHO_BYTES_MAX + 1))


async def test_a_commands_streams_and_its_end_come_in_order(held: Held) -> None:
    events: list[ExecEvent] = []
    async with await held.service.guests.exec(
        CALLER, held.id, ExecRequest(("program",), stdin=True)
    ) as session:
        await session.write_stdin(b"data")
        await session.close_stdin()
        events += [event async for event in session]

    assert events[0] == Started(7)
    assert events[1:-1] == [Stderr(b"program"), Stdout(b"data")]
    assert events[-1] == Exited(0, None, timed_out=False, duration_s=0.1)
    with pytest.raises(Conflict):
        await session.write_stdin(b"late")


async def test_a_signal_ends_a_command(held: Held) -> None:
    async with await held.service.guests.exec(
        CALLER, held.id, ExecRequest(("cat",), stdin=True)
    ) as session:
        await session.send_signal(15)
        *_, last = [event async for event in session]

    assert last == Exited(None, 15, timed_out=False, duration_s=0.1)


async def test_a_command_without_a_terminal_or_input_refuses_both(held: Held) -> None:
    async with await held.service.guests.exec(CALLER, held.id, ExecRequest(("true",))) as session:
        with pytest.raises(Conflict):
            await session.resize(TtySize(24, 80))
        with pytest.raises(Conflict):
            await session.write_stdin(b"x")


async def test_a_program_that_does_not_exist_is_not_found_and_named(held: Held) -> None:
    with pytest.raises(NotFound, match="missing: no such program") as refusal:
        await held.service.guests.exec(CALLER, held.id, ExecRequest(("missing",)))

    assert refusal.value.context == {"guest_code": "not_found", "program": "missing"}
    assert (await held.service.guests.ping(CALLER, held.id)).version == "0"


async def test_a_file_is_written_and_read_back_in_pieces(held: Held) -> None:
    data = bytes(range(256)) * 8_192

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 700_000):
            yield data[start : start + 700_000]

    assert await held.service.guests.write_file(CALLER, held.id, "/f", pieces()) == len(data)
    async with await held.service.guests.read_file(CALLER, held.id, "/f") as reader:
        assert (reader.size_bytes, reader.mode) == (len(data), 0o644)
        assert b"".join([piece async for piece in reader]) == data


async def test_a_missing_file_is_not_found_and_a_relative_path_refused(held: Held) -> None:
    with pytest.raises(NotFound):
        await held.service.guests.read_file(CALLER, held.id, "/nowhere")
    with pytest.raises(InvalidRequest):
        await held.service.guests.read_file(CALLER, held.id, "nowhere")


async def test_a_full_disk_ends_a_write_with_the_agents_words(held: Held) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(65_536)

    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(GuestError, match="the disk is full") as refusal:
            await held.service.guests.write_file(CALLER, held.id, "/full", endless())

    assert refusal.value.context["guest_code"] == "no_space"


async def test_a_source_of_bytes_that_fails_passes_its_own_error_on(held: Held) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x"
        raise NotFound("the source is gone")

    with pytest.raises(NotFound, match="the source is gone"):
        await held.service.guests.write_file(CALLER, held.id, "/f", broken())


ENDINGS = {
    "killed": "its process ended without giving a reason",
    "its time is over": "ttl",
    "deleted": "deleted",
}


@pytest.mark.parametrize("how", ENDINGS)
async def test_whoever_waits_is_told_why_the_sandbox_ended_as_everybody_is(
    held: Held, how: str
) -> None:
    guests, sandboxes = held.service.guests, held.service.sandboxes
    session = await guests.exec(CALLER, held.id, ExecRequest(("forever",)))
    written = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"begun"
        written.set()
        await asyncio.Event().wait()

    async def told() -> str:
        with pytest.raises(EngineExited) as ended:
            async for _ in session:
                pass
        return str(ended.value)

    waiting = [
        asyncio.create_task(told()),
        asyncio.create_task(guests.write_file(CALLER, held.id, "/tmp/file", endless())),
    ]
    await written.wait()
    owner = sandboxes.roster.get(CALLER, held.id)
    if how == "killed":
        assert owner.sandbox.pid is not None
        os.kill(owner.sandbox.pid, signal.SIGKILL)
    elif how == "deleted":
        await sandboxes.delete(CALLER, held.id)
    else:
        owner.sandbox = replace(owner.sandbox, expires_at=datetime.now(UTC))
        owner.watch_expiry()

    async with asyncio.timeout(DEADLINE_S):
        said = await waiting[0]
    assert said == f"sandbox {held.id} has exited: {ENDINGS[how]}"
    waiting[1].cancel()
    await asyncio.wait(waiting)
    if how != "deleted":
        await until(lambda: owner.sandbox.state is SandboxState.EXITED)
        assert owner.sandbox.exit_reason == ENDINGS[how]
        with pytest.raises(Conflict) as refused:
            await guests.ping(CALLER, held.id)
        assert str(refused.value) == said
    await session.aclose()


async def test_a_sandbox_whose_agent_died_has_exited_and_says_so(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_state, "AGENT_GRACE_S", 0.5)
    guests, sandboxes = held.service.guests, held.service.sandboxes

    with pytest.raises(EngineExited, match=f"{held.id} has exited: {REASON_AGENT}"):
        async for _ in await guests.exec(CALLER, held.id, ExecRequest(("end-agent",))):
            pass

    found = await sandboxes.get(CALLER, held.id)
    assert (found.state, found.exit_reason) == (SandboxState.EXITED, REASON_AGENT)
    with pytest.raises(Conflict, match=REASON_AGENT):
        await guests.ping(CALLER, held.id)


@pytest.mark.parametrize(
    ("program", "why"), [("hang-up", "was reset or promoted"), ("halt", "no longer answers")]
)
async def test_a_sandbox_that_does_not_refuse_connections_runs_on(
    held: Held, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    monkeypatch.setattr(agent_state, "AGENT_GRACE_S", 0.5)
    guests, sandboxes = held.service.guests, held.service.sandboxes

    with pytest.raises(EngineExited, match=f"still runs: it {why}"):
        async for _ in await guests.exec(CALLER, held.id, ExecRequest((program,))):
            pass

    assert (await sandboxes.get(CALLER, held.id)).state is SandboxState.RUNNING


async def test_a_machine_that_ends_while_something_has_the_sandbox_is_explained(
    held: Held,
) -> None:
    owner = held.service.sandboxes.roster.get(CALLER, held.id)

    async with owner.exclusive("a test") as sandbox:
        assert sandbox.pid is not None
        os.kill(sandbox.pid, signal.SIGKILL)
        with pytest.raises(EngineExited, match=f"{held.id} has exited: {ENDINGS['killed']}"):
            await owner.guest.ping()


async def test_code_in_a_context_has_names_of_its_own(fake_host: FakeHost) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        made = (await host.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes[0]
        await host.guests.eval(CALLER, made.id, "x = 1", context="draft")
        found = await host.guests.eval(CALLER, made.id, "x", context="draft", runtime="python")
        assert found.value == 1
        elsewhere = await host.guests.eval(CALLER, made.id, "x")
        assert elsewhere.error is not None
        for name in ("", "A", "a b", "a" * 64):
            with pytest.raises(InvalidRequest) as refused:
                await host.guests.eval(CALLER, made.id, "x", context=name)
            assert refused.value.context["field"] == "context"
        await host.sandboxes.delete(CALLER, made.id)


async def test_code_has_variables_of_its_own_and_tells_what_it_writes(held: Held) -> None:
    told: list[Stdout | Stderr] = []

    async def take(output: Stdout | Stderr) -> None:
        told.append(output)

    code = "import os, sys\nprint('out')\nprint('err', file=sys.stderr)\nos.environ.get('A')"
    guests = held.service.guests
    result = await guests.eval(CALLER, held.id, code, env={"A": "b"}, on_output=take)

    assert (result.value, result.stdout, result.stderr) == ("b", "", "")
    assert told == [Stdout(b"out\n"), Stderr(b"err\n")]
    assert (await guests.eval(CALLER, held.id, code)).value is None


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ({"A=B": "c"}, "must not be empty or hold '='"),
        ({"A": "b\0"}, "holds a NUL"),
        ({"A": "\udcff"}, "Unicode"),
        ({"A": "b" * SANDBOX_ENV_BYTES_MAX}, f"at most {SANDBOX_ENV_BYTES_MAX}"),
    ],
)
async def test_variables_that_no_code_can_have_are_refused(
    held: Held, env: dict[str, str], complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint) as refused:
        await held.service.guests.eval(CALLER, held.id, "1", env=env)

    assert refused.value.context["field"] == "env"
