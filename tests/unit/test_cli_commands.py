"""The command does what the SDK does, prints it twice over, and ends with a documented status."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd.model.ids import SandboxId, Tag
from forkd.model.sandbox import ForkOptions
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]


@pytest.fixture(autouse=True)
def snapshots(daemon: RunningDaemon) -> None:
    daemon.service.stored = some_snapshots("warm", "is-flaky", "is-broken")


@pytest.fixture
def sandbox(forkd: Forkd) -> str:
    return forkd("fork", "warm").out.strip()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "good"
    folder.mkdir()
    (folder / "recipe.toml").write_text('name = "good"')
    return folder


def test_a_snapshot_is_baked_from_a_folder(forkd: Forkd, recipe: Path) -> None:
    ended = forkd("snapshot", "create", "new", "--recipe", str(recipe))

    assert ended.code == 0
    assert "booting" in ended.err
    assert "snapshot new: 512 MiB, 1 vCPU\n" in ended.err


def test_a_baked_snapshot_is_one_json_document(forkd: Forkd, recipe: Path) -> None:
    ended = forkd("snapshot", "create", "new", "-r", str(recipe), "--json")

    assert (ended.document["tag"], ended.document["bootable"], ended.err) == ("new", True, "")


def test_a_recipe_that_does_not_exist_is_named_beside_those_that_do(forkd: Forkd) -> None:
    ended = forkd("snapshot", "create", "new", "-r", "nothing")

    assert ended.code == 3
    assert "no recipe 'nothing'; there are: fails, good, hangs" in ended.err


def test_a_recipe_of_this_host_is_uploaded_and_one_of_the_daemons_named(
    forkd: Forkd, daemon: RunningDaemon, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert forkd("build", "good").code == 0
    assert daemon.service.recipes.uploads == []

    monkeypatch.chdir(recipe.parent)
    for named in ("good", "./good", str(recipe / "recipe.toml")):
        assert forkd("build", named).code == 0

    assert len(daemon.service.recipes.uploads) == 1


def test_a_folder_without_a_recipe_ends_with_3(forkd: Forkd, tmp_path: Path) -> None:
    ended = forkd("build", f"{tmp_path.name}/nothing")

    assert ended.code == 3
    assert "no folder with a recipe.toml" in ended.err


def test_an_image_is_built(forkd: Forkd, recipe: Path) -> None:
    (recipe / "recipe.toml").rename(recipe / "good.toml")

    ended = forkd("build", str(recipe / "good.toml"), "--json")

    assert ended.document["key"] == "key"


def test_snapshots_are_listed_described_and_removed(forkd: Forkd) -> None:
    assert [each["tag"] for each in forkd("snapshot", "ls", "--json").document] == [
        "is-broken",
        "is-flaky",
        "warm",
    ]
    assert "512 MiB" in forkd("snapshot", "ls").out
    assert "/var/lib/forkd/snapshots/warm" in forkd("snapshot", "info", "warm").out
    assert forkd("snapshot", "rm", "warm", "is-flaky", "--json").document == {
        "removed": ["warm", "is-flaky"]
    }


def test_a_fork_prints_ids_alone_on_standard_output(forkd: Forkd) -> None:
    ended = forkd("fork", "warm", "-n", "3", "--memory", "64")

    listed = forkd("ls", "--quiet")
    assert ended.code == 0
    assert ended.out.splitlines() == listed.out.splitlines()
    assert len(ended.out.splitlines()) == 3
    assert "3 ready, 0 failed" in ended.err


def test_a_fork_that_fails_in_part_says_what_failed_and_ends_with_1(forkd: Forkd) -> None:
    ended = forkd("fork", "is-flaky", "-n", "4")

    assert ended.code == 1
    assert len(ended.out.splitlines()) == 2
    assert "failed in agent: no answer (guest)" in ended.err


def test_a_fork_that_fails_in_part_is_one_json_list(forkd: Forkd) -> None:
    ended = forkd("fork", "is-flaky", "-n", "2", "--json")

    assert [each["status"] for each in ended.document] == ["running", "failed"]


def test_all_or_nothing_leaves_nothing(forkd: Forkd) -> None:
    assert forkd("fork", "is-flaky", "-n", "2", "--all-or-nothing").code == 1
    assert forkd("ls", "--quiet").out == ""


def test_sandboxes_are_listed_in_a_table_that_no_pipe_cuts(forkd: Forkd, sandbox: str) -> None:
    assert forkd("ls").out.splitlines()[1].split()[:3] == [sandbox, "warm", "running"]
    assert "4711" in forkd("ls", "-o", "wide").out
    assert forkd("ps").out.split()[5] == sandbox


def test_every_limit_of_a_fork_can_be_set_and_is_shown(forkd: Forkd) -> None:
    limits = {
        "memory_limit_mib": 64,
        "disk_limit_mib": 32,
        "cpu_limit": 0.5,
        "cpu_weight": 50,
        "pids_limit": 16,
        "io_limit_mib_s": 20,
        "io_limit_ops": 500,
        "bandwidth_limit_mbit": 10,
    }
    options = ("--memory", "64", "--disk", "32", "--pids", "16", "--bandwidth", "10")
    more = ("--cpus", "0.5", "--cpu-weight", "50", "--io", "20", "--io-ops", "500")
    network = ("--network", "internet")

    (made,) = forkd("fork", "warm", *options, *network, *more, "--json").document

    assert {name: made[name] for name in limits} == limits
    shown = (
        "memory 64 MiB, disk 32 MiB, cpu 0.5 cores, cpu weight 50, threads 16, "
        "disk bandwidth 20 MiB/s, disk operations 500/s, network bandwidth 10 Mbit/s"
    )
    assert shown in forkd("ls", "-o", "wide").out
    assert shown in forkd("inspect", made["id"]).out
    assert forkd("fork", "warm", "--cpu", "2", "--json").document[0]["cpu_limit"] == 2
    assert forkd("fork", "warm", "--pids", "7").code == 2
    assert forkd("fork", "warm", "--bandwidth", "10").code == 2, "there is no network"


def test_sandboxes_are_killed_by_id_by_tag_and_all(forkd: Forkd, sandbox: str) -> None:
    forkd("fork", "warm", "-n", "2")
    forkd("fork", "is-flaky", "-n", "1")

    assert forkd("kill", sandbox, "--json").document == {"killed": [sandbox], "failed": []}
    left = forkd("ls", "-q").out.splitlines()
    assert forkd("kill", "--tag", "warm").out.splitlines() == left[:2]
    assert forkd("rm", "--all").out.splitlines() == left[2:]


@pytest.mark.parametrize("args", [[], ["--all", "--tag", "warm"]])
def test_killing_wants_to_know_whom(forkd: Forkd, args: list[str]) -> None:
    assert forkd("kill", *args).code == 2


GONE = "sb-aaaaaaaaaaaaaaaaaaaaaaaaaa"


def test_what_can_be_killed_is_and_the_rest_is_reported(forkd: Forkd, sandbox: str) -> None:
    other = forkd("fork", "warm").out.strip()

    ended = forkd("kill", sandbox, GONE, other, sandbox[:10])

    assert (ended.code, ended.out.splitlines()) == (1, [sandbox, other])
    assert ended.err == f"{GONE} not killed: no sandbox {GONE} (not_found)\n"
    assert forkd("ls", "--quiet").out == ""


def test_what_was_killed_and_what_was_not_are_one_document(forkd: Forkd, sandbox: str) -> None:
    ended = forkd("kill", sandbox, GONE, "--json")

    assert (ended.code, ended.document["killed"]) == (1, [sandbox])
    assert [(each["id"], each["code"]) for each in ended.document["failed"]] == [
        (GONE, "not_found")
    ]


def test_limits_are_shown_and_changed(forkd: Forkd) -> None:
    id_ = forkd("fork", "warm", "--memory", "64", "--json").document[0]["id"]

    assert forkd("limits", id_).out == "Memory:  64 MiB\n"
    assert forkd("limits", id_, "--memory", "1g", "--cpus", "0.5").out == (
        "Memory:  1 GiB\nCPU:     0.5 cores\n"
    )
    assert forkd("limits", id_, "--pids", "16", "--json").document["pids_limit"] == 16
    options = ("--cpu-weight", "7", "--io", "20", "--io-ops", "500")
    changed = forkd("limits", id_, *options, "--json").document
    assert [changed[each] for each in ("cpu_weight", "io_limit_mib_s", "io_limit_ops")] == [
        7,
        20,
        500,
    ]
    assert "without a network" in forkd("limits", id_, "--bandwidth", "5").err
    online = forkd("fork", "warm", "--network", "internet").out.strip()
    assert forkd("limits", online, "--bandwidth", "5m").out == "Network bandwidth:  5 Mbit/s\n"


@pytest.mark.parametrize(
    "command",
    [
        ("exec", "ID", "true"),
        ("exec", "--json", "ID", "true"),
        ("eval", "ID", "1"),
        ("logs", "ID"),
        ("cp", "ID:/tmp", "NEW"),
        ("branch", "ID"),
        ("reset", "ID"),
        ("limits", "ID"),
        ("tree", "ID"),
        ("diff", "ID", "ID"),
        ("snapshot", "create", "new", "--from", "ID"),
        ("snapshot", "create", "new", "--from-sandbox", "ID"),
        ("kill", "ID"),
    ],
)
def test_every_command_takes_the_beginning_of_an_id(
    forkd: Forkd, sandbox: str, tmp_path: Path, command: tuple[str, ...]
) -> None:
    start = sandbox[:12]
    ended = forkd(*(each.replace("ID", start).replace("NEW", f"{tmp_path}/x") for each in command))

    assert ended.code == 0, ended.err


def test_an_id_may_be_given_without_what_all_begin_with(forkd: Forkd, sandbox: str) -> None:
    assert forkd("logs", sandbox.removeprefix("sb-")[:8]).code == 0


def test_a_beginning_of_several_ids_names_them(forkd: Forkd, daemon: RunningDaemon) -> None:
    for last in "abcdefg":
        made = daemon.service.fork_one(Tag("warm"), ForkOptions())
        guest = daemon.service.running.pop(made.id)
        guest.sandbox = replace(made, id=SandboxId(f"sb-{'a' * 25}{last}"))
        daemon.service.running[guest.sandbox.id] = guest

    ended = forkd("logs", "sb-aaaa")

    assert ended.code == 2
    assert "7 ids begin with sb-aaaa: " in ended.err
    assert f"sb-{'a' * 25}b, " in ended.err
    assert "and 2 more" in ended.err
    assert forkd("logs", f"sb-{'a' * 25}b").code == 0
    assert forkd("kill", "aaaa", GONE).code == 1


def test_a_snapshot_that_is_called_like_an_id_comes_first(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str
) -> None:
    daemon.service.stored |= some_snapshots(sandbox[:8])

    made = forkd("snapshot", "create", "new", "--from", sandbox[:8], "--exec", "true", "--json")

    assert made.code == 0
    assert forkd("snapshot", "create", "other", "--from", "sb-zzzz").code == 3


def test_a_program_runs_for_as_long_as_it_likes_with_json_and_without(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str
) -> None:
    for options in ([], ["--json"]):
        assert forkd("exec", *options, sandbox, "echo").code == 0
        assert forkd("exec", "--timeout", "5", *options, sandbox, "echo").code == 0

    assert [each.request.timeout_s for each in daemon.service.execs] == [None, 5, None, 5]
    assert forkd("exec", "--json", "--tty", sandbox, "echo").code == 125


def test_an_evaluation_prints_what_a_prompt_would(forkd: Forkd, sandbox: str) -> None:
    ended = forkd("eval", sandbox, "print('hi')\n6 * 7")

    assert (ended.code, ended.out) == (0, "hi\n42\n")


def test_code_for_another_runtime_is_refused_with_the_one_there_is(
    forkd: Forkd, sandbox: str
) -> None:
    assert forkd("eval", sandbox, "--runtime", "python", "6 * 7").out == "42\n"

    ended = forkd("eval", sandbox, "--runtime", "node", "6 * 7")

    assert (ended.code, ended.out) == (4, "")
    assert "no runtime 'node' in this sandbox: its warm runtime is python" in ended.err


def test_code_comes_from_a_file_or_standard_input(
    forkd: Forkd, sandbox: str, tmp_path: Path
) -> None:
    (tmp_path / "code.py").write_text("'file'")

    assert forkd("eval", sandbox, "--file", str(tmp_path / "code.py")).out == "'file'\n"
    assert forkd("eval", sandbox, "-", stdin=b"'input'").out == "'input'\n"
    assert forkd("eval", sandbox).code == 2


def test_an_exception_in_code_is_its_traceback_and_status_1(forkd: Forkd, sandbox: str) -> None:
    ended = forkd("eval", sandbox, "1 / 0")

    assert (ended.code, ended.out) == (1, "")
    assert ended.err.endswith("ZeroDivisionError: division by zero\n")


def test_an_evaluation_as_json_has_its_value(forkd: Forkd, sandbox: str) -> None:
    document = forkd("eval", sandbox, "[1, 'x']", "--json").document

    assert (document["value"], document["error"]) == ([1, "x"], None)


def test_code_out_of_time_ends_with_124(forkd: Forkd, sandbox: str) -> None:
    assert forkd("eval", sandbox, "0", "--timeout", "0.5").code == 124


def test_a_program_has_our_streams_and_we_its_exit_code(forkd: Forkd, sandbox: str) -> None:
    ended = forkd("exec", sandbox, "fail")
    assert (ended.code, ended.out) == (0, "out")
    assert ended.err.startswith("err ")

    assert forkd("exec", sandbox, "--", "exit", "7").code == 7
    assert forkd("exec", sandbox, "cat", stdin=b"to and fro").out == "to and fro"


def test_options_after_the_program_are_the_programs(forkd: Forkd, sandbox: str) -> None:
    assert forkd("exec", sandbox, "echo", "--json", "-n").out == "--json -n\n"


def test_a_program_gets_variables_and_no_others(forkd: Forkd, sandbox: str) -> None:
    ended = forkd("exec", "-e", "A=1", "-e", "B=x=y", sandbox, "env")

    assert json.loads(ended.out) == {"A": "1", "B": "x=y"}
    assert forkd("exec", "-e", "=1", sandbox, "env").code == 2


def test_a_programs_result_as_json_has_both_outputs(forkd: Forkd, sandbox: str) -> None:
    ended = forkd("exec", "--json", sandbox, "fail")

    assert (ended.document["stdout"], ended.document["truncated"]) == ("out", False)


def test_a_program_that_does_not_exist_ends_with_127(forkd: Forkd, sandbox: str) -> None:
    ended = forkd("exec", sandbox, "nope")

    assert ended.code == 127
    assert ended.err == "error: nope: no such program (not_found)\n"


def test_a_file_that_cannot_be_executed_ends_with_126(forkd: Forkd, sandbox: str) -> None:
    assert forkd("exec", sandbox, "text").code == 126


def test_a_program_in_no_sandbox_ends_with_125(forkd: Forkd) -> None:
    assert forkd("exec", "sb-aaaaaaaaaaaaaaaaaaaaaaaaaa", "true").code == 125


def test_a_terminal_is_wanted_where_there_is_none(forkd: Forkd, sandbox: str) -> None:
    ended = forkd("exec", "--tty", sandbox, "cat")

    assert ended.code == 125
    assert "terminal" in ended.err


def test_a_file_is_copied_there_and_back(forkd: Forkd, sandbox: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\0\xff")
    (tmp_path / "a").chmod(0o750)

    assert forkd("cp", str(tmp_path / "a"), f"{sandbox}:/tmp").code == 0
    there_and_back = forkd("cp", f"{sandbox}:/tmp/a", str(tmp_path / "b"), "--json")

    assert there_and_back.document == {"files": 1, "bytes": 2, "skipped": []}
    assert (tmp_path / "b").read_bytes() == b"\0\xff"
    assert not list(tmp_path.glob("tmp*"))


@pytest.mark.parametrize("too_old", [False, True])
def test_a_folder_is_copied_whole_and_what_is_left_out_is_named(
    forkd: Forkd,
    daemon: RunningDaemon,
    sandbox: str,
    tmp_path: Path,
    too_old: bool,  # noqa: FBT001 - the cases
) -> None:
    next(iter(daemon.service.running.values())).too_old = too_old
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "file").write_text("x")
    (tree / "link").symlink_to("/etc/passwd")  # which the fake's files have not

    up = forkd("cp", str(tree), f"{sandbox}:/root/")
    down = forkd("cp", f"{sandbox}:/root/tree", str(tmp_path / "back"))

    assert (up.code, down.code) == (1, 0)
    assert f"left out: {f'{tree}/link' if too_old else 'link'}: " in up.err
    assert (tmp_path / "back" / "deep" / "file").read_text() == "x"
    assert not (tmp_path / "back" / "link").exists()


def test_owners_are_asked_for_and_refused_where_the_agent_is_too_old(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str, tmp_path: Path
) -> None:
    guest = next(iter(daemon.service.running.values()))
    (tmp_path / "tree").mkdir()
    (tmp_path / "file").write_text("x")

    assert forkd("cp", "--user", "app", str(tmp_path / "tree"), f"{sandbox}:/tmp/a").code == 0
    assert forkd("cp", "--user", "1:2", str(tmp_path / "file"), f"{sandbox}:/tmp/b").code == 0
    assert forkd("cp", "-a", str(tmp_path / "tree"), f"{sandbox}:/tmp/c").code == 0
    assert guest.users == {"/tmp/a": "app", "/tmp/b": "1:2", "/tmp/c": "archive"}

    guest.too_old = True
    refused = forkd("cp", "--user", "app", str(tmp_path / "tree"), f"{sandbox}:/tmp/a")
    assert refused.code == 4
    assert "bake the snapshot again" in refused.err


def test_a_guest_cannot_name_a_file_outside_the_target(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str, tmp_path: Path
) -> None:
    guest = next(iter(daemon.service.running.values()))
    guest.contents.files["/root/../"] = b""
    guest.contents.files["/root/good"] = b"x"
    (tmp_path / "target").mkdir()

    for guest.too_old in (False, True):
        ended = forkd("cp", f"{sandbox}:/root", str(tmp_path / "target" / f"{guest.too_old}"))

        assert ended.code == 1
        assert "left out: " in ended.err
        assert ".." in ended.err
        assert (tmp_path / "target" / f"{guest.too_old}" / "good").read_bytes() == b"x"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["target"]


def test_words_and_names_that_are_no_text_are_no_traceback(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str, tmp_path: Path
) -> None:
    (tmp_path / "caf\udce9").write_bytes(b"x")

    up = forkd("cp", f"{tmp_path}/caf\udce9", f"{sandbox}:/tmp/")
    down = forkd("cp", f"{sandbox}:/tmp/caf\udce9", f"{tmp_path}/back")
    missing = forkd("cp", f"{sandbox}:/tmp/\udcff", f"{tmp_path}/back")
    ran = forkd("exec", "-n", sandbox, "--", "echo", "\udcff")
    long = forkd("exec", "-n", sandbox, "--", "sh", "-c", "x" * 140_000)

    assert (up.code, down.code, missing.code, ran.code, long.code) == (0, 0, 3, 0, 125)
    assert (tmp_path / "back").read_bytes() == b"x"
    assert daemon.service.execs[-1].request.args == ("echo", "\udcff")
    assert "140000 bytes; at most 131071" in long.err


def test_a_copy_within_one_host_is_refused(forkd: Forkd) -> None:
    assert forkd("cp", "/a", "/b").code == 2


def test_a_file_that_is_missing_ends_with_3(forkd: Forkd, sandbox: str, tmp_path: Path) -> None:
    assert forkd("cp", f"{sandbox}:/nothing", str(tmp_path)).code == 3
    assert forkd("cp", str(tmp_path / "nothing"), f"{sandbox}:/tmp").code == 3


def test_logs_are_printed(forkd: Forkd, sandbox: str) -> None:
    assert forkd("logs", sandbox).out == "Linux version 6.1.0\n"
    assert forkd("logs", sandbox, "--json").document["log"] == "Linux version 6.1.0\n"


def test_the_host_is_shown(forkd: Forkd) -> None:
    assert "Fake CPU" in forkd("host", "show").out
    assert forkd("host", "show", "--json").document["cpus"] == 2


def test_an_unknown_tag_is_an_error_a_hint_and_status_3(forkd: Forkd) -> None:
    ended = forkd("fork", "nothing")

    assert ended.code == 3
    assert ended.err.splitlines() == [
        "error: no snapshot 'nothing' (not_found)",
        "hint: `forkd snapshot ls` lists snapshots",
    ]


def test_an_unknown_sandbox_is_an_error_with_a_hint_of_its_own(forkd: Forkd) -> None:
    ended = forkd("logs", "sb-aaaaaaaaaaaaaaaaaaaaaaaaaa")

    assert ended.err.splitlines()[1:] == ["hint: `forkd ls` lists sandboxes"]


def test_what_is_neither_has_no_hint(forkd: Forkd, sandbox: str, tmp_path: Path) -> None:
    for command in (
        ["cp", f"{sandbox}:/nothing", str(tmp_path)],
        ["cp", str(tmp_path / "nothing"), f"{sandbox}:/tmp"],
        ["build", "nothing"],
        ["build", f"{tmp_path}/nothing/"],
        ["key", "show", "nothing"],
        ["unpack", str(tmp_path / "nothing")],
    ):
        ended = forkd(*command)
        assert ended.code in (2, 3)
        assert "hint:" not in ended.err


def test_an_error_as_json_has_its_code(forkd: Forkd) -> None:
    said = json.loads(forkd("fork", "nothing", "--json").err)

    assert (said["code"], said["context"]) == ("not_found", {"tag": "nothing"})


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["fork", "warm", "-n", "0"], 2),
        (["fork", "warm", "-n", "10001"], 2),
        (["fork", "../warm"], 2),
        (["snapshot", "rm", "a..b"], 2),
        (["--url", "ftp://x", "ls"], 2),
        (["--url", "http://127.0.0.1:1", "ls"], 7),
        (["--url", "http://127.0.0.1:1", "kill", "sb-a", "sb-b"], 7),
        (["nonsense"], 2),
    ],
)
def test_each_kind_of_error_has_its_status(forkd: Forkd, args: list[str], code: int) -> None:
    ended = forkd(*args)

    assert ended.code == code
    assert "Traceback" not in ended.err


def test_a_wrong_token_ends_with_5(forkd: Forkd, daemon: RunningDaemon) -> None:
    ended = forkd("--url", daemon.tcp_url, "--token", "wrong", "ls")

    assert ended.code == 5
    assert "FORKD_TOKEN" in ended.err


def test_a_conflict_ends_with_4(forkd: Forkd, sandbox: str) -> None:
    ended = forkd("snapshot", "rm", "warm")

    assert ended.code == 4
    assert sandbox in ended.err


def test_what_happened_is_listed_and_nothing_in_it_can_act_on_a_terminal(
    forkd: Forkd, daemon: RunningDaemon
) -> None:
    daemon.service.journal.happen("sb-a", "sb-b")
    bad = replace(daemon.service.journal.happened[1], detail={"reason": "\x1b[2Jgone"})
    daemon.service.journal.happened[1] = bad

    lines = forkd("events").out.splitlines()

    assert [line.split()[1:4] for line in lines] == [
        ["1", "sandbox.ready", "sb-a"],
        ["2", "sandbox.ready", "sb-b"],
    ]
    assert lines[0].endswith('tag="warm"')
    assert lines[1].endswith(r'reason="\u001b[2Jgone"')


def test_what_happened_is_json_lines_after_an_event(forkd: Forkd, daemon: RunningDaemon) -> None:
    daemon.service.journal.happen("sb-a", "sb-b", "sb-c")

    said = [json.loads(line) for line in forkd("events", "--after", "1", "--json").out.splitlines()]

    assert [(each["id"], each["subject"]) for each in said] == [(2, "sb-b"), (3, "sb-c")]
    assert forkd("events", "--after", "-1").code == 2
