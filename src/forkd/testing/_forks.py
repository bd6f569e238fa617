"""Run the tests of a session in forks: what `pytest --forkd TAG` does.

The session is collected here, as ever, and once more in a sandbox that has the project.  Branches
of this sandbox run the tests, some dozens at a time; reports are told in the order of the tests.
"""

from __future__ import annotations

import inspect
import json
import sys
from concurrent.futures import CancelledError
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from forkd.errors import Conflict, ForkdError, SandboxLost, TaskError
from forkd.executor import ForkExecutor
from forkd.sdk import Sandbox
from forkd.testing import TTL_S, _guest
from forkd.testing._archive import distribution_files, named, project_files, send

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    Reports = list[list[Any] | None]

PLUGIN = "forkd.testing.plugin"
"""What pytest calls our plugin, which stands above this module."""

CHUNK_TESTS_MAX = 50
"""Most tests that a sandbox is given at once."""

CHUNKS_PER_WORKER = 4
"""How many times a sandbox is given tests, if there are few: the last ones end at the same time."""

DEADLINE_S = 300.0
"""How long a sandbox has until it answers; where a processor is emulated, it takes its time."""

SITE = "/opt/forkd-site"
"""Where distributions are that were sent into a sandbox."""

HERE = {"sandbox", "forkd_states"}
"""Fixtures of tests that run here, because they use sandboxes themselves."""

RUNNER = "_forkd_pytest"
"""The name of `_guest` in guests."""

_LOADED = "getattr(__import__('sys').modules.get('pytest'), '__version__', None)"

_INSTALLED = "__import__('importlib.metadata').metadata.version('pytest')"


def goes_away(item: pytest.Item) -> bool:
    """Return whether a test runs in a fork."""
    return not HERE & set(getattr(item, "fixturenames", ()))


def run(session: pytest.Session, away: Sequence[pytest.Item], tag: str) -> None:
    """Run the tests of a session.

    Args:
        session: What was collected.
        away: Those of its tests that run in forks.
        tag: The snapshot.

    Raises:
        UsageError: The snapshot cannot run them.
        Failed, Interrupted: As many have failed as may, or pytest was told to stop.
    """
    config = session.config
    try:
        with Sandbox(tag, ttl_s=TTL_S, deadline_s=DEADLINE_S) as source:
            start = _prepared(source, config)
            with ForkExecutor(
                source,
                workers=config.getoption("forkd_workers"),
                fresh=config.getoption("forkd_fresh"),
                initializer=_started(),
                initargs=start,
                results="json",
                deadline_s=DEADLINE_S,
            ) as executor:
                try:
                    _distribute(session, away, executor)
                except BaseException:
                    executor.kill_workers()
                    raise
    except TaskError as error:
        cause = error.__cause__ if "RuntimeError" not in str(error) else ""
        raise pytest.UsageError(f"--forkd {tag}: {error}\n{cause or ''}") from None
    except ForkdError as error:
        raise pytest.UsageError(f"--forkd {tag}: {error}") from None


def _prepared(source: Sandbox, config: pytest.Config) -> tuple[Any, ...]:
    """Copy what a sandbox needs; return what the session there is started with."""
    root = config.rootpath
    there = config.getoption("forkd_path") or str(root)
    if config.getoption("forkd_path") is None:
        send(source, named(project_files(root), root), there)
    wanted = [*([] if has_our_pytest(source) else ["pytest"]), *config.getoption("forkd_with")]
    if wanted:
        send(source, distribution_files(wanted), SITE)

    def moved(text: str) -> str:
        return there + text[len(str(root)) :] if Path(text).is_relative_to(root) else text

    options = {
        name: moved(value) if isinstance(value, str) else value
        for name, value in options_of(config).items()
    }
    paths = [SITE, *(moved(each) for each in sys.path if each and Path(each).is_relative_to(root))]
    args = [moved(each) for each in config.args]
    folder = moved(str(config.invocation_params.dir))
    return inspect.getsource(_guest), paths, options, args, folder


def options_of(config: pytest.Config) -> dict[str, Any]:
    """Return the options of the command line that a session in a sandbox has, too."""
    found = {}
    for name, value in vars(config.option).items():
        if not name.startswith("forkd"):
            try:
                found[name] = json.loads(json.dumps(value))
            except (TypeError, ValueError):
                continue  # what is no text and no number is no option of the command line
    # A sandbox need not have our plugin, and does not use it.
    found["plugins"] = [each for each in found.get("plugins") or () if each != PLUGIN]
    return found


def has_our_pytest(source: Sandbox) -> bool:
    """Return whether a sandbox has this version of pytest.

    Raises:
        Conflict: Its warm-up has imported another one, whose place none can take.
    """
    ours = metadata.version("pytest")
    loaded = source.eval(_LOADED).value
    if loaded not in {None, ours}:
        raise Conflict(
            f"snapshot {source.tag} has imported pytest {loaded}, and this is pytest {ours}.  "
            f"Install pytest {loaded} here, or make the snapshot with pytest {ours}",
            tag=source.tag,
        )
    return source.eval(_INSTALLED).value == ours


def _started() -> Callable[..., None]:
    """Return what starts a session in a guest; it is sent whole, because it is no module's."""
    name = RUNNER

    def start(source: str, paths: list[str], options: Any, args: list[str], folder: str) -> None:  # noqa: ANN401 - JSON
        import sys  # noqa: PLC0415 - the guest's
        import types  # noqa: PLC0415 - the guest's

        sys.path[:0] = [each for each in paths if each not in sys.path]
        module = types.ModuleType(name)
        exec(compile(source, f"<{name}>", "exec"), module.__dict__)  # noqa: S102 - our own
        vars(module)["held"] = module.__dict__["Held"](options, args, folder)
        sys.modules[name] = module

    return start


def _task() -> Callable[[list[str]], Reports]:
    """Return what runs tests in a guest, as `_started`."""
    name = RUNNER

    def task(ids: list[str]) -> Reports:
        import sys  # noqa: PLC0415 - the guest's

        found: Reports = vars(sys.modules[name])["held"].run(ids)
        return found

    return task


def _distribute(
    session: pytest.Session, away: Sequence[pytest.Item], executor: ForkExecutor
) -> None:
    """Have the tests run, and tell their reports in order."""
    task = _task()
    reports: dict[pytest.Item, Iterator[list[Any] | None]] = {}
    for chunk in _chunks(away, _most(session.config, len(away))):
        future = executor.submit(task, [each.nodeid for each in chunk])
        reports |= dict.fromkeys(chunk, _reports(executor, task, future, chunk))
    here = [each for each in session.items if each not in reports]
    following = dict(pairwise([*here, None]))
    for item in session.items:
        if item in reports:
            _tell(item, next(reports[item]))
        else:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following[item])
        _check(session)


def _reports(
    executor: ForkExecutor,
    task: Callable[[list[str]], Reports],
    future: Future[Reports],
    chunk: Sequence[pytest.Item],
) -> Iterator[list[Any] | None]:
    """Yield the reports of each test; those whose sandbox was lost are run again, one by one.

    Begins when the first is asked for, and yields to each test of the chunk in turn.
    """
    try:
        yield from future.result()
    except SandboxLost as error:
        if len(chunk) == 1:
            yield [str(error)]
            return
    except CancelledError:
        return
    else:
        return
    again = [executor.submit(task, [each.nodeid]) for each in chunk]
    for each in again:
        try:
            yield from each.result()
        except SandboxLost as error:
            yield [str(error)]


def _tell(item: pytest.Item, reports: list[Any] | None) -> None:
    """Tell the reports of one test, as if it had run here."""
    hook, config = item.config.hook, item.config
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    if reports is None:
        reports = ["the test is not there in the sandbox: it was collected here alone"]
    for each in reports:
        if isinstance(each, str):
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", each, "setup")
        else:
            report = hook.pytest_report_from_serializable(config=config, data=each)
            _with_tuples(report)
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _with_tuples(report: Any) -> None:  # noqa: ANN401 - what it has, too, pytest leaves open
    """Make tuples of what JSON has made lists of, since plugins tell them apart."""
    if isinstance(report.longrepr, list):  # of a test that was skipped
        report.longrepr = tuple(report.longrepr)
    report.location = tuple(report.location)
    report.sections = [tuple(each) for each in report.sections]
    report.user_properties = [tuple(each) for each in report.user_properties]


def _check(session: pytest.Session) -> None:
    """Stop if pytest wants to, as its own loop does."""
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _most(config: pytest.Config, tests: int) -> int:
    """Return how many tests a sandbox is given at once, at the most."""
    if config.getoption("forkd_fresh"):
        return 1
    workers: int = config.getoption("forkd_workers")
    return min(CHUNK_TESTS_MAX, max(1, tests // (workers * CHUNKS_PER_WORKER)))


def _chunks(items: Sequence[pytest.Item], most: int) -> Iterator[list[pytest.Item]]:
    """Yield tests in order, those of one module together if they are not too many."""
    chunk: list[pytest.Item] = []
    for item in items:
        if chunk and (len(chunk) == most or chunk[-1].path != item.path):
            yield chunk
            chunk = []
        chunk.append(item)
    if chunk:
        yield chunk
