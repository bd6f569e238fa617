"""The SDK against a whole daemon over the fake VMM: what programs of its users do."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from forkd import AsyncClient, AsyncSandbox
from forkd.errors import CommandError, ExecTimeout, NotFound
from tests.support.served_host import served_host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.served_host import Served
    from tests.support.service_host import FakeHost


@contextlib.asynccontextmanager
async def serving(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """Serve a host as the daemon that programs find; nothing is left of it afterwards."""
    async with served_host(host) as served:
        monkeypatch.setenv("FORKD_URL", served.url)
        yield served
        assert await served.sandboxes() == []
        assert host.left_over() == []


async def test_a_program_written_for_e2b_runs(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/howto/move-from-e2b.md has it."""
    async with serving(fake_host, monkeypatch):
        sandbox = await AsyncSandbox.create("python", timeout=300, metadata={"for": "me"})
        done = await sandbox.commands.run("echo hello", timeout=60)
        assert (done.stdout, done.exit_code) == ("hello\n", 0)
        assert (await sandbox.commands.run("exit 3")).exit_code == 3
        with pytest.raises(CommandError, match="exited with 3"):
            await sandbox.commands.run("exit 3", check=True)

        execution = await sandbox.run_code("print('hi'); x = 41; x + 1")
        assert (execution.text, execution.logs.stdout) == ("42", ["hi\n"])
        failed = await sandbox.run_code("nothing")
        assert failed.error is not None
        assert failed.error.name == "NameError"

        await sandbox.files.write("/note", "text")
        assert await sandbox.files.read("/note", format="text") == "text"
        await sandbox.files.rename("/note", "/kept")
        assert "kept" in [entry.name for entry in await sandbox.files.list("/")]
        assert (await sandbox.files.get_info("/kept")).size_bytes == 4
        await sandbox.files.remove("/kept")
        assert not await sandbox.files.exists("/kept")

        await sandbox.set_timeout(600)
        assert (await sandbox.get_info()).labels == {"for": "me"}
        assert await sandbox.is_running()
        assert (await sandbox.pause()).condition == "paused"
        assert (await sandbox.resume()).condition == "running"
        same = await AsyncSandbox.connect(sandbox.sandbox_id)
        assert (await same.run_code("x")).text == "41"
        assert await sandbox.kill()
        assert not await sandbox.is_running()
        assert not await same.kill()


async def test_the_first_lines_of_the_manual_run(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(fake_host, monkeypatch) as served:
        async with AsyncSandbox("python", env={"A": "b"}) as sandbox:
            assert (await sandbox.run("env")).stdout == "A=b\n"
            await sandbox.eval("x = 7", check=True)
            async with await sandbox.branch(2) as siblings:
                await siblings[0].eval("x = 8")
                assert [each.value for each in await siblings.eval("x")] == [8, 7]
        async with AsyncClient(served.url) as client, await client.fork("python", 8) as many:
            sent, told = bytes(range(256)) * 65_536, 0

            def count(piece: bytes) -> None:
                nonlocal told
                told += len(piece)

            echoed = await many[0].exec("cat", stdin=sent, text=False, on_stdout=count)
            assert (told, echoed.truncated) == (len(sent), True)  # no buffer holds so much
            assert sent.startswith(echoed.stdout)
            assert [str(each) for each in await many.run("echo a")] == ["a\n"] * 8
            with pytest.raises(ExecTimeout, match="late was killed"):
                await many[1].exec("late", timeout_s=5)
            assert (await many[1].exec("late", timeout_s=5, check=False)).signal == 9
            with pytest.raises(NotFound, match="no such program"):
                await many[2].exec("missing")
