"""Run the functions of a program in forks of a snapshot: an executor of `concurrent.futures`.

    from forkd.executor import ForkExecutor

    with ForkExecutor("numpy", workers=4) as executor:
        print(list(executor.map(lambda n: n * n, range(10))))

It needs cloudpickle, `pip install 'forkd-vm[executor]'`.  docs/howto/run-tasks-in-forks.md is the
guide.

A result is a pickle that a sandbox made, and to read a pickle is to run what it says: whoever
controls the sandbox can run code in this program.  Where the tasks are not trusted, pass
`results="json"`.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar

from forkd.errors import (
    CapacityError,
    Conflict,
    ExecTimeout,
    ForkdError,
    InvalidRequest,
    NotFound,
    RequestError,
    SandboxLost,
)
from forkd.executor._forks import Forks
from forkd.executor._tasks import Outcome, RemoteTraceback, Runner, pickled, prepare, send_by_value
from forkd.limits import EXEC_TIMEOUT_S_MAX, TTL_S_MAX
from forkd.sdk import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import ModuleType, TracebackType

    from forkd.sdk import Client

__all__ = ["ForkExecutor", "RemoteTraceback"]

P = ParamSpec("P")
R = TypeVar("R")

WORKERS_MAX = 200
"""Most sandboxes that tasks of one executor run in at once; a client has 256 connections."""

RETRIES_MAX = 10
"""Most times that a task is run again whose sandbox was lost."""

TTL_S_MIN = 5.0
"""Shortest life of a sandbox beyond its program's: a daemon may be busy for some seconds."""

TIMEOUT_S_MIN = 0.001
"""Shortest time that a task may be given."""

DEAD_MAX = 3
"""New sandboxes that are found to have ended before a task begins, until the task is given up."""


class _Life(TypedDict):
    """How a sandbox begins and ends, as options of a fork or a branch."""

    ttl_s: float
    deadline_s: float | None


class ForkExecutor(Executor):
    """Runs tasks in forks of a snapshot.

    One sandbox is forked and prepared at once; the sandboxes of the tasks are branches of it, made
    as they are needed.  As a context manager the executor ends all of them.

    Args:
        source: The snapshot; or a running sandbox, of which a branch is prepared instead.  Without
            one, as for `Sandbox`.
        workers: How many tasks run at once, each in a sandbox of its own.
        fresh: Run each task in a new branch.  Otherwise a sandbox runs one task after the other,
            as a worker of a process pool does, and keeps what they leave in modules and files.
        initializer: Called once, in the sandbox that is prepared: every task finds what it left.
        initargs: What it is called with.
        retries: How often a task is run again, in another sandbox, whose sandbox was lost.
        timeout_s: Interrupt a task after this time; None: never.
        results: "pickle", or "json": then a value is what JSON can represent, an exception is
            always a `TaskError`, and nothing of a sandbox is unpickled here.
        modules: Modules whose functions and classes are sent along; others must be installed in the
            snapshot.  They are sent so for the rest of the program.
        ttl_s: A sandbox is ended so long after the program was killed, in seconds.
        deadline_s: Time each sandbox has until its agent has answered, in seconds.
        client: The client whose daemon is asked; None as for `Sandbox`.

    Raises:
        NotFound: There is no such snapshot.
        Conflict: The snapshot's Python is another one than this program's.
        Exception: What `initializer` raised.
    """

    def __init__(  # noqa: PLR0913 - how tasks can be run
        self,
        source: str | Sandbox | None = None,
        *,
        workers: int = 8,
        fresh: bool = False,
        initializer: Callable[..., object] | None = None,
        initargs: Sequence[Any] = (),
        retries: int = 0,
        timeout_s: float | None = None,
        results: Literal["pickle", "json"] = "pickle",
        modules: Sequence[ModuleType] = (),
        ttl_s: float = 300.0,
        deadline_s: float | None = None,
        client: Client | None = None,
    ) -> None:
        _check("workers", workers, 1, WORKERS_MAX)
        _check("retries", retries, 0, RETRIES_MAX)
        _check("ttl_s", ttl_s, TTL_S_MIN, TTL_S_MAX)
        if timeout_s is not None:
            _check("timeout_s", timeout_s, TIMEOUT_S_MIN, EXEC_TIMEOUT_S_MAX)
        if results not in {"pickle", "json"}:
            raise InvalidRequest(
                f'results: is "pickle" or "json", not {results!r}', field="results"
            )
        if not isinstance(source, str | Sandbox | None):
            raise InvalidRequest(
                f"source: is the name of a snapshot or a Sandbox, not {source!r}", field="source"
            )
        send_by_value(modules)
        self._fresh = fresh
        self._retries = retries
        self._workers = workers
        self._runner = Runner(results == "json", timeout_s)
        first = None if initializer is None else pickled(_silent(initializer), initargs, {})
        life: _Life = {"ttl_s": ttl_s, "deadline_s": deadline_s}
        make = partial(_made, source, life, client)
        ready = partial(_get_ready, self._runner, first)
        self._forks = Forks(make, ready, workers, ttl_s, deadline_s)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="forkd-task")
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._is_shut = False
        # Whoever forgets `shutdown` has no sandboxes left over, as long as the program ends well.
        atexit.register(self._forks.close)
        self._forgotten = weakref.finalize(self, _forget, self._forks)
        self._forgotten.atexit = False

    @property
    def sandbox_ids(self) -> list[str]:
        """The ids of the sandboxes that tasks run in, as they are now."""
        return self._forks.ids

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Have a sandbox call a function; return its future.

        The function and its arguments are pickled when the task begins.  The future raises what the
        function raised, with the guest's traceback as the cause; `SandboxLost` if the sandbox ended
        first; `TaskError` for an exception or a value that cannot be made again here.

        Args:
            fn: What to call.
            args: What it is called with.
            kwargs: Likewise, by name.

        Raises:
            RuntimeError: The executor was shut down.
        """
        future: Future[R] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._threads.submit(self._work, future, fn, args, kwargs)
            self._pending.add(future)
        return future

    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        **others: Any,  # noqa: ANN401 - those of later Pythons
    ) -> Iterator[R]:
        """Return an iterator over what a function returns for each item, in order.

        Args:
            fn: What to call.
            iterables: Its arguments.
            timeout: Raise `TimeoutError` if a result is not there so many seconds after this call.
            chunksize: How many items one task is given; one that is lost loses them all.
            others: Arguments of `Executor.map` in later versions of Python.

        Raises:
            InvalidRequest: `chunksize` is not at least 1.
        """
        if chunksize < 1:
            raise InvalidRequest("chunksize must be at least 1", field="chunksize")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout, **others)
        chunks = _chunks(zip(*iterables, strict=False), chunksize)
        results = super().map(_of_each(fn), chunks, timeout=timeout, **others)
        return chain.from_iterable(results)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - as its base
        """Take no more tasks, and end all sandboxes when those that were taken have ended.

        Args:
            wait: Return when that is so, instead of at once.
            cancel_futures: Cancel the tasks that have not begun.
        """
        with self._lock:
            self._is_shut = True
            pending = list(self._pending)
        if cancel_futures:
            for each in pending:
                each.cancel()
        self._threads.shutdown(wait=wait)
        if wait or not pending:
            self._close()

    def kill_workers(self) -> None:
        """End all sandboxes at once, as a pool of processes can in Python 3.14.

        The tasks that run are lost, those that have not begun are cancelled, and no more are taken.
        """
        self.shutdown(wait=False, cancel_futures=True)
        self._close()
        self.shutdown(wait=True)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut down; at Ctrl-C without waiting for tasks, whose sandboxes are ended."""
        if exc is not None and not isinstance(exc, Exception):
            self.kill_workers()
        self.shutdown(wait=True)

    def _close(self) -> None:
        self._forks.close()
        self._forgotten.detach()
        atexit.unregister(self._forks.close)

    def _work(
        self, future: Future[R], fn: Callable[..., R], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Do a task, in a thread of its own; never raises."""
        spent: list[Sandbox] = []
        try:
            if not future.set_running_or_notify_cancel():
                return
            try:
                outcome = self._run(pickled(fn, args, kwargs), spent)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the task's outcome
                outcome = Outcome(error=error)
            if outcome.error is None:
                future.set_result(outcome.value)
            else:
                future.set_exception(outcome.error)
            for each in spent:
                self._forks.end(each)
        finally:
            with self._lock:
                self._pending.discard(future)
                is_last = self._is_shut and not self._pending
            if is_last:
                self._close()

    def _run(self, task: bytes, spent: list[Sandbox]) -> Outcome:
        """Return how a task ended; `spent` gets the sandbox, if no other task may use it."""
        left, dead_max = self._retries, self._workers + DEAD_MAX
        while True:
            sandbox = self._forks.take()
            try:
                outcome = self._runner.run(sandbox, task)
            except ExecTimeout as error:
                outcome = Outcome(error=error)
            except (NotFound, Conflict) as error:  # it had ended before: the task was not begun
                self._forks.end(sandbox)
                dead_max -= 1
                if dead_max == 0:
                    raise _lost(sandbox, error) from error
                continue
            except (RequestError, CapacityError):  # nothing was begun either
                self._forks.give_back(sandbox)
                raise
            except ForkdError as error:
                self._forks.end(sandbox)
                if left == 0:
                    raise _lost(sandbox, error) from error
                left -= 1
                continue
            if self._fresh:
                spent.append(sandbox)
            else:
                self._forks.give_back(sandbox)
            return outcome


def _lost(sandbox: Sandbox, error: ForkdError) -> SandboxLost:
    return SandboxLost(
        f"the task was lost with its sandbox {sandbox.id}: {error}", sandbox=sandbox.id
    )


def _made(source: str | Sandbox | None, life: _Life, client: Client | None) -> Sandbox:
    """Return a new sandbox."""
    if isinstance(source, Sandbox):
        (made,) = source.branch(1, **life)
        return made
    return Sandbox(source, client=client, **life)


def _get_ready(runner: Runner, first: bytes | None, sandbox: Sandbox) -> None:
    """Get a sandbox ready for tasks, and run the initializer in it."""
    prepare(sandbox)
    outcome = Outcome() if first is None else runner.run(sandbox, first)
    if outcome.error is not None:
        raise outcome.error


def _forget(forks: Forks) -> None:
    atexit.unregister(forks.close)
    forks.close()


def _silent(function: Callable[..., object]) -> Callable[..., None]:
    """Return a function that returns nothing, and is pickled whole because it is no module's."""

    def call(*args: object) -> None:
        function(*args)

    return call


def _of_each(function: Callable[..., R]) -> Callable[[list[tuple[Any, ...]]], list[R]]:
    """Return a function over several items, as `_silent`."""

    def call(items: list[tuple[Any, ...]]) -> list[R]:
        return [function(*each) for each in items]

    return call


def _chunks(items: Iterable[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


def _check(name: str, value: float, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidRequest(f"{name}: is from {least} to {most}, not {value!r}", field=name)
