"""Tasks in forks, over a daemon in memory: how they end, and what is refused."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import forkd.executor
from forkd import Client, ExecTimeout, Sandbox
from forkd.errors import Conflict, InvalidRequest, NotFound, SandboxLost, TaskError
from forkd.executor import ForkExecutor, RemoteTraceback, _forks, _guest, _tasks
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from tests.support.daemon import RunningDaemon


@pytest.fixture(autouse=True)
def environment(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    daemon.service.stored = some_snapshots("warm")
    monkeypatch.setenv("FORKD_URL", daemon.url)
    yield
    assert daemon.service.running == {}, "an executor left sandboxes"


def square(number: int) -> int:
    return number * number


def test_a_task_returns_what_its_function_returns() -> None:
    with ForkExecutor("warm", workers=2) as executor:
        assert executor.submit(square, 3).result() == 9
        assert executor.submit(sorted, [1, 2], reverse=True).result() == [2, 1]


def test_results_of_a_map_come_in_order() -> None:
    with ForkExecutor("warm", workers=3) as executor:
        assert list(executor.map(lambda a, b: a - b, range(10), range(10, 0, -1))) == [
            a - b for a, b in zip(range(10), range(10, 0, -1), strict=True)
        ]


@pytest.mark.parametrize("size", [2, 3, 100])
def test_a_map_hands_out_several_items_at_once(size: int) -> None:
    with ForkExecutor("warm", workers=2) as executor:
        assert list(executor.map(square, range(7), chunksize=size)) == list(map(square, range(7)))


def test_sandboxes_are_made_as_they_are_needed_and_kept(daemon: RunningDaemon) -> None:
    with ForkExecutor("warm", workers=5) as executor:
        assert len(daemon.service.running) == 1  # the one that is prepared
        for number in range(4):
            executor.submit(square, number).result()
        assert len(executor.sandbox_ids) == 1


@pytest.mark.parametrize(("fresh", "count"), [(True, 3), (False, 1)])
def test_a_fresh_executor_runs_each_task_in_a_branch_of_its_own(
    fresh: bool,  # noqa: FBT001 - a case
    count: int,
    daemon: RunningDaemon,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used, run = set(), _tasks.Runner.run

    def noting(self: _tasks.Runner, sandbox: Sandbox, task: bytes) -> _tasks.Outcome:
        used.add(sandbox.id)
        return run(self, sandbox, task)

    monkeypatch.setattr(_tasks.Runner, "run", noting)
    with ForkExecutor("warm", workers=1, fresh=fresh) as executor:
        for number in range(3):
            executor.submit(square, number).result()
        assert len(daemon.service.running) <= 2

    assert len(used) == count


def test_tasks_run_at_the_same_time_each_in_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many threads are inside `run` as there are workers; one fewer would wait for ever."""
    met, run = threading.Barrier(3, timeout=10), _tasks.Runner.run

    def slow(self: _tasks.Runner, sandbox: Sandbox, task: bytes) -> _tasks.Outcome:
        met.wait()
        return run(self, sandbox, task)

    monkeypatch.setattr(_tasks.Runner, "run", slow)
    with ForkExecutor("warm", workers=3) as executor:
        assert list(executor.map(square, range(6))) == list(map(square, range(6)))
        assert len(executor.sandbox_ids) == 3


def fails() -> None:
    raise ZeroDivisionError("nothing to divide by")


def test_what_a_task_raises_is_raised_with_where_it_was() -> None:
    with ForkExecutor("warm") as executor, pytest.raises(ZeroDivisionError) as caught:
        executor.submit(fails).result()

    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "in fails" in str(cause)
    assert "_guest" not in str(cause)
    assert "_forkd_tasks" not in str(cause)


class Stubborn(Exception):
    """Cannot be made again of what it was pickled as."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def raise_stubborn() -> None:
    raise Stubborn("no", "pe")


def test_an_exception_that_cannot_be_made_again_is_told_as_text() -> None:
    with ForkExecutor("warm") as executor, pytest.raises(TaskError, match="Stubborn: nope") as told:
        executor.submit(raise_stubborn).result()

    assert "raise_stubborn" in str(told.value.__cause__)


def test_a_value_that_cannot_be_pickled_is_an_error_of_the_task() -> None:
    with ForkExecutor("warm") as executor:
        with pytest.raises(TypeError, match="pickle"):
            executor.submit(threading.Lock).result()
        with pytest.raises(TypeError, match="pickle"):
            executor.submit(square, threading.Lock()).result()  # type: ignore[arg-type]
        assert executor.submit(square, 2).result() == 4


def test_a_program_that_does_not_trust_its_tasks_unpickles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ForkExecutor("warm", results="json") as executor:
        monkeypatch.setattr(_tasks, "pickle", None)
        value: object = executor.submit(lambda: {"a": (1, None)}).result()
        assert value == {"a": [1, None]}
        with pytest.raises(TaskError, match="ZeroDivisionError: nothing") as caught:
            executor.submit(fails).result()
        assert "in fails" in str(caught.value.__cause__)
        with pytest.raises(TaskError, match="not JSON serializable"):
            executor.submit(lambda: {1, 2}).result()


def test_what_a_task_prints_is_printed_here(capsys: pytest.CaptureFixture[str]) -> None:
    with ForkExecutor("warm") as executor:
        executor.submit(print, "hello").result()

    assert capsys.readouterr().out == "hello\n"


def test_a_task_whose_time_runs_out_says_so_and_others_go_on() -> None:
    with ForkExecutor("warm", timeout_s=0.5) as executor:
        with pytest.raises(ExecTimeout):
            executor.submit(square, 2).result()
        assert len(executor.sandbox_ids) == 1


def remember(value: int) -> None:
    sys.modules["remembered"] = types.ModuleType("remembered")
    sys.modules["remembered"].__dict__["value"] = value


def remembered() -> Any:  # noqa: ANN401 - of the other's
    return sys.modules["remembered"].__dict__["value"]


def test_an_initializer_runs_once_and_every_task_finds_what_it_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    monkeypatch.setitem(sys.modules, "remembered", types.ModuleType("remembered"))

    with ForkExecutor("warm", workers=2, initializer=remember, initargs=(7,)) as executor:
        futures = [executor.submit(remembered) for _ in range(4)]
        calls += [each.result() for each in futures]

    assert calls == [7] * 4


def test_an_initializer_that_raises_is_an_error_of_the_constructor() -> None:
    with pytest.raises(ZeroDivisionError, match="nothing"):
        ForkExecutor("warm", initializer=fails)


def test_tasks_start_from_a_sandbox_that_is_given_and_it_lives_on(daemon: RunningDaemon) -> None:
    with Sandbox("warm") as source:
        with ForkExecutor(source) as executor:
            assert executor.submit(square, 2).result() == 4
        assert list(daemon.service.running) == [source.id]


def test_a_client_that_is_given_is_asked(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKD_URL", "unix:///nowhere")
    with Client(daemon.url) as client, ForkExecutor("warm", client=client) as executor:
        assert executor.submit(square, 2).result() == 4


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"workers": 0}, "workers"),
        ({"workers": forkd.executor.WORKERS_MAX + 1}, "workers"),
        ({"workers": True}, "workers"),
        ({"retries": -1}, "retries"),
        ({"retries": forkd.executor.RETRIES_MAX + 1}, "retries"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"ttl_s": 1}, "ttl_s"),
        ({"results": "yaml"}, "yaml"),
        ({"source": 3}, "source"),
        ({"modules": ["math"]}, "'math' is no module"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_forked(
    options: dict[str, Any], word: str, daemon: RunningDaemon
) -> None:
    with pytest.raises(InvalidRequest, match=word):
        ForkExecutor(**{"source": "warm", **options})

    assert daemon.service.running == {}


def test_a_snapshot_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(NotFound, match="nothing"):
        ForkExecutor("nothing")


def test_a_snapshot_with_another_python_is_refused_by_both_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_tasks, "_VERSION", "['cpython-39', 3, 9, 2]")
    ours = ".".join(map(str, sys.version_info[:3]))

    with pytest.raises(Conflict, match=rf"warm has Python 3\.9\.2, and this program .*{ours}"):
        ForkExecutor("warm")


def test_a_task_as_long_as_the_limit_is_sent_and_one_byte_more_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = b"x" * 1000
    monkeypatch.setattr(_tasks, "TASK_BYTES_MAX", len(_tasks.pickled(len, (data,), {})))
    with ForkExecutor("warm") as executor:
        assert executor.submit(len, data).result() == 1000
        with pytest.raises(InvalidRequest, match="bytes as a pickle, more than"):
            executor.submit(len, data + b"x").result()


def test_a_result_beyond_its_limit_is_an_error_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tasks, "RESULT_BYTES_MAX", 2000)
    with ForkExecutor("warm") as executor:
        assert len(executor.submit(bytes, 1900).result()) == 1900
        with pytest.raises(ValueError, match="more than the 2000 that may be returned"):
            executor.submit(bytes, 2000).result()


def test_a_map_in_chunks_of_nothing_is_refused() -> None:
    with ForkExecutor("warm") as executor, pytest.raises(InvalidRequest, match="chunksize"):
        executor.map(square, [1], chunksize=0)


def test_no_task_is_taken_after_the_end() -> None:
    executor = ForkExecutor("warm")
    executor.shutdown()
    executor.shutdown()

    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(square, 1)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds each task back that has begun, until it is set."""
    opened, run = threading.Event(), _tasks.Runner.run

    def held(self: _tasks.Runner, sandbox: Sandbox, task: bytes) -> _tasks.Outcome:
        assert opened.wait(10)
        return run(self, sandbox, task)

    monkeypatch.setattr(_tasks.Runner, "run", held)
    yield opened
    opened.set()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def test_tasks_that_have_not_begun_can_be_cancelled_at_the_end(gate: threading.Event) -> None:
    executor = ForkExecutor("warm", workers=1)
    futures = [executor.submit(square, number) for number in range(3)]
    until(futures[0].running)

    executor.shutdown(wait=False, cancel_futures=True)
    gate.set()

    assert futures[0].result(10) == 0
    for each in futures[1:]:
        with pytest.raises(CancelledError):
            each.result(10)
    executor.shutdown()


def test_an_end_that_nobody_waits_for_comes_when_the_last_task_has_ended(
    gate: threading.Event, daemon: RunningDaemon
) -> None:
    executor = ForkExecutor("warm", workers=1)
    future = executor.submit(square, 2)
    executor.shutdown(wait=False)
    gate.set()

    assert future.result(10) == 4
    until(lambda: daemon.service.running == {})


def test_an_interruption_ends_the_sandboxes_without_waiting_for_tasks(
    gate: threading.Event, daemon: RunningDaemon
) -> None:
    futures: list[Future[int]] = []

    def open_late() -> None:
        until(lambda: daemon.service.running == {})
        gate.set()

    def program() -> None:
        with ForkExecutor("warm", workers=1) as executor:
            futures.extend(executor.submit(square, number) for number in range(2))
            until(futures[0].running)
            threading.Thread(target=open_late).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program()

    with pytest.raises(SandboxLost):
        futures[0].result(10)
    assert futures[1].cancelled()


def test_an_executor_that_is_forgotten_leaves_no_sandboxes(daemon: RunningDaemon) -> None:
    def use() -> None:
        assert ForkExecutor("warm").submit(square, 1).result() == 1

    use()
    until(lambda: daemon.service.running == {})


def test_a_program_that_ends_without_a_shutdown_leaves_no_sandboxes(daemon: RunningDaemon) -> None:
    code = (
        "from forkd.executor import ForkExecutor\n"
        "executor = ForkExecutor('warm')\n"
        "executor.itself = executor  # so that the end of the program is all that ends it\n"
        "print(executor.submit(len, 'abc').result())\n"
    )
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50
    )

    assert (done.stdout, done.stderr) == ("3\n", "")
    assert daemon.service.running == {}


def test_sandboxes_live_a_while_longer_than_their_program(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_forks, "SIGNS_PER_TTL", 10_000)
    with ForkExecutor("warm", workers=2, ttl_s=5) as executor:
        executor.submit(square, 1).result()
        asked = [each.sandbox for each in daemon.service.running.values()]
        assert all(each.expires_at is not None for each in asked)
        before = {each.id: each for each in asked}

        def renewed() -> bool:
            return all(daemon.service.running[each].sandbox is not before[each] for each in before)

        until(renewed)


def test_a_guest_without_cloudpickle_is_given_ours(tmp_path: Path) -> None:
    """In an interpreter without any package, as in a guest."""
    answer = tmp_path / "answer"
    sources = []

    class Recorder:
        tag = "warm"

        def eval(self, code: str, **_: object) -> Any:  # noqa: ANN401 - as much as is asked
            sources.append(code)
            value = [sys.implementation.cache_tag, *sys.version_info[:3]]
            return types.SimpleNamespace(value=value)

    _tasks.prepare(Recorder())  # type: ignore[arg-type]
    offset = 3
    task = _tasks.pickled(lambda n: n + offset, (4,), {})
    text = base64.b64encode(task).decode()
    program = (
        f"{sources[1]}\nimport json, base64\n"
        f"said = __import__('_forkd_tasks').run({text!r}, None, as_json=False,"
        " inline_bytes_max=1000, result_bytes_max=1000)\n"
        f"open({str(answer)!r}, 'w').write(json.dumps(said))"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, timeout=50)  # noqa: S603 - our own

    assert '"stage": "done"' in answer.read_text()


def test_what_is_long_travels_in_files(tmp_path: Path) -> None:
    path = tmp_path / "task"
    path.write_bytes(_tasks.pickled(bytes, (5000,), {}))

    said = _guest.run(None, str(path), as_json=False, inline_bytes_max=100, result_bytes_max=9000)

    assert not path.exists()
    assert said["data"] is None
    result = Path(said["path"])
    assert len(result.read_bytes()) > 5000
    result.unlink()


def test_without_cloudpickle_the_import_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['cloudpickle'] = None\n"
        "try:\n    import forkd.executor\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    )

    assert "pip install 'forkd-vm[executor]'" in done.stdout


def test_sandboxes_are_given_more_time_at_once() -> None:
    """One that is waited for keeps none of the others from its renewal."""
    met, seen = threading.Barrier(4, timeout=10), threading.Event()

    def renewed(_: float) -> None:
        met.wait()
        seen.set()

    def made(name: str) -> Any:  # noqa: ANN401 - what it is asked of a sandbox
        return types.SimpleNamespace(id=name, set_ttl=renewed, kill=bool, branch=branched)

    def branched(count: int, **_: object) -> list[Any]:
        return [made(f"branch-{number}") for number in range(count)]

    forks = _forks.Forks(lambda: made("source"), bool, 3, ttl_s=3600)
    forks._live.update((each.id, each) for each in branched(3))  # noqa: SLF001 - as threads do
    forks._ttl_s = 0.03  # noqa: SLF001 - its own thread waits for an hour, and renews none too early
    keeper = threading.Thread(target=forks._keep)  # noqa: SLF001 - what that thread does

    keeper.start()
    try:
        assert seen.wait(10)
    finally:
        met.abort()
        forks.close()
        keeper.join()


def test_a_sandbox_is_given_more_time_while_it_is_prepared() -> None:
    renewed = threading.Event()
    source: Any = types.SimpleNamespace(
        id="source", set_ttl=lambda _: renewed.set(), kill=lambda: None
    )
    seen: list[bool] = []

    forks = _forks.Forks(lambda: source, lambda _: seen.append(renewed.wait(10)), 1, ttl_s=0.03)
    forks.close()

    assert seen == [True]


def test_a_sandbox_that_cannot_be_prepared_is_ended_and_no_thread_is_left() -> None:
    ended = threading.Event()
    source: Any = types.SimpleNamespace(id="source", set_ttl=bool, kill=ended.set)

    def prepare(_: object) -> None:
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        _forks.Forks(lambda: source, prepare, 1, ttl_s=60)

    assert ended.is_set()
    until(lambda: "forkd-executor" not in {each.name for each in threading.enumerate()})
