"""Code written for the reference's Python package goes on with ours."""

from __future__ import annotations

import pytest

from forkd.compat import CommandResult, Controller, ControllerError, Sandbox
from forkd.errors import InvalidRequest, TransportError
from forkd.sdk import Client
from tests.support.daemon import TOKEN, RunningDaemon
from tests.support.fake_service import some_snapshots


@pytest.fixture(autouse=True)
def environment(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.service.stored = some_snapshots("pyagent", "warm")
    monkeypatch.setenv("FORKD_URL", daemon.tcp_url)
    monkeypatch.setenv("FORKD_TOKEN", TOKEN)


def test_a_sandbox_runs_programs_and_code_and_ends(daemon: RunningDaemon) -> None:
    with Sandbox() as sandbox:
        assert (sandbox.tag, sandbox.timeout) == ("pyagent", 30)
        assert sandbox.commands.run(["echo", "a b"]) == CommandResult("a b\n", "", 0)
        assert sandbox.eval("1 + 1") == "2"
        assert sandbox.eval("x = 1") is None
        assert sandbox.ping()["pong"] is True
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            sandbox.eval("1 / 0")
    assert daemon.service.running == {}
    sandbox.kill()


def test_a_string_is_read_by_a_shell(daemon: RunningDaemon) -> None:
    with Sandbox("warm") as sandbox:
        sandbox.commands.run("echo hi | wc", timeout=5)

    (ran,) = daemon.service.execs
    assert (ran.request.args, ran.request.timeout_s) == (("/bin/sh", "-c", "echo hi | wc"), 5)


def test_a_sandbox_ends_after_an_hour_by_itself() -> None:
    sandbox = Sandbox.create(tag="warm")

    with Client() as client:
        (found,) = client.sandboxes.list()
    assert found.id == sandbox.target
    assert found.info.expires_at_unix == found.info.created_at_unix + 3_600
    sandbox.kill()


def test_a_program_that_is_not_there_is_a_result() -> None:
    with Sandbox("warm") as sandbox:
        assert sandbox.commands.run(["nope"]) == CommandResult("", "nope: no such program\n", 1)


def test_one_that_cannot_be_forked_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="nothing"):
        Sandbox("nothing")


@pytest.mark.parametrize("by", ["id", "guest_addr"])
def test_a_sandbox_that_is_there_can_be_used_and_lives_on(daemon: RunningDaemon, by: str) -> None:
    (made,) = Controller().spawn_sandboxes("warm", per_child_netns=True)

    with Sandbox(target=made[by], spawn=False) as sandbox:
        assert sandbox.target == made["id"]

    assert list(daemon.service.running) == [made["id"]]


@pytest.mark.parametrize("target", [None, "10.42.0.2:8888"])
def test_one_that_is_not_there_cannot_be_used(target: str | None) -> None:
    with pytest.raises(InvalidRequest, match="no sandbox has"):
        Sandbox(target=target, spawn=False)


def test_a_sandbox_that_has_gone_is_no_error_when_it_is_killed() -> None:
    sandbox = Sandbox("warm")
    Controller().kill_sandbox(sandbox.target)

    sandbox.kill()


def test_a_controller_does_all_that_it_can() -> None:
    controller = Controller()
    assert {each["tag"] for each in controller.list_snapshots()} == {"pyagent", "warm"}
    first, second = controller.spawn_sandboxes("warm", 2, prewarm=True)
    assert controller.get_sandbox(first["id"]) == first
    assert controller.exec_command(first["id"], ["echo", "a"])["stdout"] == "a\n"
    assert controller.eval_code(first["id"], "2 * 3")["result"] == "6"
    assert controller.ping_sandbox(first["id"])["warmup_ready"] is True
    branch = controller.branch_sandbox(first["id"], "checkpoint", diff=True)
    assert (branch["tag"], branch["branched_from"]) == ("checkpoint", first["id"])
    later = controller.branch_sandbox(first["id"], mode="live", diff=True, wait=False)
    assert later["status"] == "writing"
    controller.delete_snapshot("checkpoint")
    controller.kill_sandbox(second["id"])
    assert [each["id"] for each in controller.list_sandboxes()] == [first["id"]]


def test_what_the_daemon_refuses_is_a_controller_error(daemon: RunningDaemon) -> None:
    with pytest.raises(ControllerError, match="HTTP 404") as caught:
        Controller().get_sandbox("sb-67a1b3-0000")

    assert caught.value.status == 404
    assert caught.value.body["code"] == "not_found"
    assert caught.value.url == f"{daemon.tcp_url}/v1/sandboxes/sb-67a1b3-0000"


def test_ids_and_tags_are_one_segment_of_a_path() -> None:
    with pytest.raises(ControllerError) as caught:
        Controller().delete_snapshot("../sandboxes")

    assert caught.value.status in {400, 404}


def test_a_wrong_token_is_a_controller_error(daemon: RunningDaemon) -> None:
    with pytest.raises(ControllerError, match="HTTP 401"):
        Controller(daemon.tcp_url, "x" * 32).list_snapshots()


def test_a_controller_talks_over_the_unix_socket_too(daemon: RunningDaemon) -> None:
    assert len(Controller(daemon.url).list_snapshots()) == 2


def test_nobody_there_is_an_error_of_ours() -> None:
    with pytest.raises(TransportError, match="no daemon answers"):
        Controller("http://127.0.0.1:1").list_snapshots()
