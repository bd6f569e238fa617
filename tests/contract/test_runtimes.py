"""Every warm runtime keeps protocol/runtime/CONTRACT.md."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from forkd.service.introduction import assignments
from tests.support.dialects import DIALECTS, Dialect, missing
from tests.support.runtimes import DATA, ERROR, REPLY, REQUEST, GoneError, RuntimeProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MUCH_BYTES = 8 << 20

REPR_MAX, VALUE_MAX = 65_536, 262_144

SEED, OTHER_SEED = "00" * 64, "0f" * 64


SLOW = frozenset({"java"})
"""Runtimes that take two seconds to start: a soak asks them."""

PARAMETERS = [
    pytest.param(name, marks=[pytest.mark.soak(only=True)] if name in SLOW else [])
    for name in sorted(DIALECTS)
]


@pytest.fixture(params=PARAMETERS)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    """Each language, if this host can run it."""
    wanted = DIALECTS[request.param]
    if (program := missing(wanted)) is not None:
        pytest.skip(f"this machine lacks {program}")
    return wanted


@pytest.fixture
def runtime(dialect: Dialect, tmp_path: Path) -> Iterator[RuntimeProcess]:
    """A runtime that was greeted."""
    with RuntimeProcess(dialect.started_from(tmp_path), dialect.environment(tmp_path)) as process:
        assert process.ask("hello", contract=1).body["contract"] == 1
        yield process


def test_it_says_what_it_is(runtime: RuntimeProcess) -> None:
    answer = runtime.ask("hello", contract=1)
    assert (answer.kind, answer.body["contract"]) == (REPLY, 1)
    assert answer.body["language"]


def test_state_is_kept_from_cell_to_cell_and_over_a_freeze(
    runtime: RuntimeProcess, dialect: Dialect
) -> None:
    assert runtime.ask("warm", code=dialect.keep).body == {}
    assert runtime.eval(dialect.recall).stdout == "kept\n"
    assert runtime.ask("freeze").kind == REPLY
    assert runtime.eval(dialect.recall).stdout == "kept\n"


def test_an_exception_is_data(runtime: RuntimeProcess, dialect: Dialect) -> None:
    runtime.eval(dialect.keep)
    answer = runtime.eval(dialect.raises)
    kind, message, trace = dialect.fault
    error = answer.body["error"]
    assert (answer.kind, answer.body["has_value"], error["type"]) == (REPLY, False, kind)
    assert message in error["message"]
    assert trace in error["traceback"]
    assert not answer.body.get("timed_out")
    assert runtime.eval(dialect.recall).stdout == "kept\n"


def test_what_is_no_program_is_an_exception(runtime: RuntimeProcess, dialect: Dialect) -> None:
    runtime.eval(dialect.keep)
    assert runtime.eval(dialect.malformed).body["error"]["type"]
    assert runtime.eval(dialect.recall).stdout == "kept\n"


def test_values_come_as_json_where_json_can_say_them(
    runtime: RuntimeProcess, dialect: Dialect
) -> None:
    for code, value in dialect.values:
        body = runtime.eval(code).body
        assert (body.get("error"), body["has_value"], body["value_is_json"]) == (None, True, True)
        assert body["value"] == value
        assert body["repr"]
    for code in dialect.foreign:
        body = runtime.eval(code).body
        assert (body.get("error"), body["has_value"]) == (None, True), code
        assert (body["value_is_json"], body["value"]) == (False, None), code
        assert body["repr"], code
    for code in dialect.silent:
        body = runtime.eval(code).body
        assert (body.get("error"), body["has_value"]) == (None, False), code


def test_a_long_value_is_cut(runtime: RuntimeProcess, dialect: Dialect) -> None:
    if dialect.long:
        body = runtime.eval(dialect.long).body
        assert (body["has_value"], body["value_is_json"], body["value"]) == (True, False, None)
        assert REPR_MAX - 1000 < len(body["repr"]) <= REPR_MAX


def test_output_of_the_code_and_of_its_children_comes_before_the_answer(
    runtime: RuntimeProcess, dialect: Dialect
) -> None:
    answer = runtime.eval(dialect.output)
    assert answer.body.get("error") is None
    assert (answer.stdout, answer.stderr) == ("out\nchild\n", "err\n")


def test_output_comes_while_the_code_runs(runtime: RuntimeProcess, dialect: Dialect) -> None:
    runtime.start(dialect.forever)
    runtime.wait_for_output("now\n")


def test_8_mib_of_output_come_whole(runtime: RuntimeProcess, dialect: Dialect) -> None:
    answer = runtime.eval(dialect.much(MUCH_BYTES))
    assert answer.body.get("error") is None
    lines = answer.stdout.split("\n")
    assert (len(lines) - 1, set(lines)) == (MUCH_BYTES // 1000, {"x" * 999, ""})


def test_an_interruption_ends_the_code_and_keeps_the_state(
    runtime: RuntimeProcess, dialect: Dialect
) -> None:
    runtime.eval(dialect.keep)
    for code in (dialect.forever, *(f"{dialect.started}{loop}" for loop in dialect.loops)):
        runtime.start(code)
        runtime.wait_for_output("now\n")
        body = runtime.interrupted().body
        assert (body["timed_out"], body["has_value"]) == (True, False), code
        assert body["error"]["type"], code
        after = runtime.eval(dialect.recall)
        assert (after.stdout, after.body.get("error")) == ("kept\n", None)


def test_a_signal_that_the_agent_did_not_announce_is_no_time_limit(
    runtime: RuntimeProcess, dialect: Dialect
) -> None:
    runtime.start(dialect.forever)
    runtime.wait_for_output("now\n")
    body = runtime.interrupted(told=False).body
    assert body["error"]["type"]
    assert not body.get("timed_out")


def test_an_interruption_that_comes_too_late_is_nobodys(
    runtime: RuntimeProcess, dialect: Dialect
) -> None:
    runtime.eval(dialect.keep)
    runtime.interrupt()
    answer = runtime.eval(dialect.recall)
    assert (answer.stdout, answer.body.get("error")) == ("kept\n", None)
    assert not answer.body.get("timed_out")


@pytest.mark.soak(only=True)
def test_a_signal_that_comes_just_when_java_has_answered_ends_nothing(tmp_path: Path) -> None:
    java = DIALECTS["java"]
    if (program := missing(java)) is not None:
        pytest.skip(f"this machine lacks {program}")
    with RuntimeProcess(java.started_from(tmp_path), java.environment(tmp_path)) as process:
        process.eval(java.keep)
        for _ in range(50):
            process.start(java.forever)
            process.wait_for_output("now\n")
            assert process.interrupted().body["timed_out"]
            os.kill(process.process.pid, signal.SIGINT)
            answer = process.eval(java.recall)
            assert (answer.stdout, answer.body.get("error")) == ("kept\n", None)


def test_requests_that_come_at_once_are_answered_in_turn(
    runtime: RuntimeProcess, dialect: Dialect
) -> None:
    runtime.start(dialect.keep)
    runtime.start(dialect.recall)
    runtime.start(dialect.raises)
    answers = [runtime.answer() for _ in range(3)]
    assert "".join(answer.stdout for answer in answers) == "kept\n"
    assert [answer.body.get("error") is None for answer in answers] == [True, True, False]


def test_standard_input_is_empty(runtime: RuntimeProcess, dialect: Dialect) -> None:
    assert runtime.eval(dialect.read).stdout == "end\n"


def test_children_do_not_get_the_agents_socket(runtime: RuntimeProcess, dialect: Dialect) -> None:
    listed = runtime.eval(dialect.descriptors).stdout
    assert "->" in listed
    assert "socket:" not in listed


def test_a_failing_warm_up_is_refused_with_its_reason(
    runtime: RuntimeProcess, dialect: Dialect
) -> None:
    answer = runtime.ask("warm", code=dialect.raises)
    assert (answer.kind, answer.body["code"]) == (ERROR, "warm_up_failed")
    assert dialect.fault[1] in answer.body["message"]


def test_variables_hold_for_one_cell(runtime: RuntimeProcess, dialect: Dialect) -> None:
    if not dialect.variable:
        assert not runtime.ask("hello", contract=1).body.get("env")
        return
    runtime.eval(dialect.set_variable("A", "before"))
    mine = {"A": "é", "B": "new"}

    assert runtime.ask("eval", code=dialect.variable, env=mine).stdout == "é new\n"
    assert runtime.eval(dialect.variable).stdout == "before none\n"
    assert runtime.ask("eval", code=dialect.raises, env=mine).body["error"] is not None
    assert runtime.eval(dialect.variable).stdout == "before none\n"


def test_a_fork_reseeds(runtime: RuntimeProcess, dialect: Dialect) -> None:
    def drawn(seed: str) -> str:
        assert dialect.reseeds in runtime.ask("post_fork", seed=seed, code=None).body["reseeded"]
        return runtime.eval(dialect.random).stdout

    if dialect.reseeds:
        runtime.eval(dialect.random)
        assert drawn(SEED) != drawn(OTHER_SEED)
        assert drawn(SEED) == drawn(SEED)
    else:
        body = runtime.ask("post_fork", seed=SEED, code=None).body
        assert body.get("hook", "none") == "none"


def test_a_fork_runs_the_images_code(runtime: RuntimeProcess, dialect: Dialect) -> None:
    assert runtime.ask("post_fork", seed=SEED, code=dialect.keep).body["hook"] == "ran"
    assert runtime.eval(dialect.recall).stdout == "kept\n"
    failed = runtime.ask("post_fork", seed=SEED, code=dialect.raises)
    assert (failed.kind, failed.body["code"]) == (ERROR, "hook_failed")
    assert dialect.fault[1] in failed.body["message"]


def test_what_it_does_not_know_is_refused(runtime: RuntimeProcess, dialect: Dialect) -> None:
    runtime.eval(dialect.keep)
    answer = runtime.ask("later")
    assert (answer.kind, answer.body["code"]) == (ERROR, "protocol")
    runtime.send(REQUEST, json.dumps({"op": "warm", "code": dialect.recall, "more": 1}).encode())
    assert runtime.answer().stdout == "kept\n"


def test_long_code_runs(runtime: RuntimeProcess, dialect: Dialect) -> None:
    blank = " " * 64 + "\n"
    assert runtime.ask("warm", code=dialect.keep).body == {}
    runtime.send(DATA, (blank * 8_000 + dialect.recall).encode())
    assert runtime.answer().stdout == "kept\n"


def test_code_that_ends_the_process_has_no_answer(
    runtime: RuntimeProcess, dialect: Dialect
) -> None:
    runtime.start(dialect.die)
    with pytest.raises(GoneError, match="ended with 3"):
        runtime.answer()


def test_it_ends_with_the_agent(runtime: RuntimeProcess) -> None:
    assert runtime.hang_up() == 0


@pytest.mark.parametrize(
    ("name", "shown"), [("python", "import os\nos.environ['A']"), ("node", "process.env.A")]
)
def test_a_runtime_takes_the_variables_of_secrets(name: str, shown: str, tmp_path: Path) -> None:
    wanted = DIALECTS[name]
    if (program := missing(wanted)) is not None:
        pytest.skip(f"this machine lacks {program}")
    value = "it's \"\u2028\\ é"
    with RuntimeProcess(wanted.started_from(tmp_path), wanted.environment(tmp_path)) as process:
        body = process.eval(assignments({"A": value, "B": "b"})[name]).body
        assert (body.get("error"), body["has_value"]) == (None, False)
        assert process.eval(shown).body["value"] == value


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RuntimeProcess]:
    wanted = DIALECTS["node"]
    if (program := missing(wanted)) is not None:
        pytest.skip(f"this machine lacks {program}")
    with RuntimeProcess(wanted.started_from(tmp_path), wanted.environment(tmp_path)) as process:
        assert process.ask("hello", contract=1).kind == REPLY
        yield process


def test_node_calls_back_in_each_fork(node: RuntimeProcess) -> None:
    node.eval("let forks = 0; forkd.onFork(() => { forks += 1; });")
    for _ in range(2):
        assert node.ask("post_fork", seed=SEED, code=None).body["hook"] == "ran"
    assert node.eval("forks").body["value"] == 2
    node.eval("forkd.onFork(() => { throw new RangeError('no fork'); });")
    failed = node.ask("post_fork", seed=SEED, code=None)
    assert (failed.kind, failed.body["code"]) == (ERROR, "hook_failed")
    assert "RangeError: no fork" in failed.body["message"]


def test_node_survives_an_exit_and_what_a_callback_throws(node: RuntimeProcess) -> None:
    assert node.eval("process.exit(3)").body["error"]["type"] == "Exit"
    answer = node.eval("setTimeout(() => { throw new Error('late') }); await new Promise((done) =>"
                       " setTimeout(done, 50)); 'on'")  # fmt: skip
    assert (answer.body["value"], "late" in answer.stderr) == ("on", True)
