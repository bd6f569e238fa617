"""What crosses between a program and the guests of its tasks: pickles, and their limits.

A task travels as a pickle, in the code of an `eval` if it is short, else in a file of the guest.
Its result comes back the same way.  A guest needs no package for that: `prepare` sends it the
source of cloudpickle, of the version that this program has.
"""

from __future__ import annotations

import base64
import contextlib
import inspect
import json
import pickle
import sys
import uuid
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from forkd.errors import (
    Conflict,
    EngineError,
    EngineExited,
    GuestError,
    InvalidRequest,
    NotFound,
    TaskError,
)
from forkd.executor import _guest

try:
    import cloudpickle
    from cloudpickle import cloudpickle as cloudpickle_module
except ImportError as error:
    raise ImportError(
        "forkd.executor needs cloudpickle, which is not installed: "
        "pip install 'forkd-vm[executor]'",
        name="cloudpickle",
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pydantic import JsonValue

    from forkd.sdk import Sandbox

TASK_BYTES_MAX = 64 * 1024 * 1024
"""Longest pickle of a task: of its function and its arguments."""

RESULT_BYTES_MAX = 64 * 1024 * 1024
"""Longest pickle, or JSON, of what a task returns."""

INLINE_BYTES_MAX = 48 * 1024
"""Longest pickle that travels in an `eval`; the guest keeps the code of some dozens of evals."""

RUNNER = "_forkd_tasks"
"""The name of `_guest` in guests."""

_VERSION = "(lambda s: [s.implementation.cache_tag, *s.version_info[:3]])(__import__('sys'))"

_INSTALL = """\
(lambda module: [
    __import__("sys").modules.__setitem__({name!r}, module),
    exec({source!r}, module.__dict__),
    module.install({version!r}, {sources!r}),
])(__import__("types").ModuleType({name!r})) and None
"""


class RemoteTraceback(Exception):
    """Where in a guest a task raised, as the cause of its exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text.rstrip()}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task returned or raised.

    Attributes:
        value: What it returned.
        error: What it raised; None if it returned.
    """

    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Runner:
    """How tasks are run, whatever they are.

    Attributes:
        as_json: Take no pickle out of a guest: values are JSON, exceptions are text.
        timeout_s: Interrupt a task after this time; None: never.
    """

    as_json: bool
    timeout_s: float | None

    def run(self, sandbox: Sandbox, task: bytes) -> Outcome:
        """Run a task in a sandbox.

        Raises:
            NotFound, Conflict: The sandbox is not there or does not run; nothing was started.
            CapacityError: The daemon is too busy; nothing was started.
            ExecTimeout: The task's time ran out; the sandbox can be used further.
            ForkdError: The sandbox, or the connection to it, ended while the task ran.
        """
        inline: str | None = None
        path: str | None = None
        if len(task) > INLINE_BYTES_MAX:
            path = f"/tmp/forkd-task-{uuid.uuid4().hex}"  # noqa: S108 - the guest's
            try:
                sandbox.files.write(path, task, mode=0o600, make_parents=True)
            except GuestError as error:
                words = f"the task could not be written into the sandbox: {error}"
                return Outcome(error=TaskError(words, sandbox=sandbox.id))
        else:
            inline = base64.b64encode(task).decode()
        ended = sandbox.eval(
            f"__import__({RUNNER!r}).run({inline!r}, {path!r}, as_json={self.as_json}, "
            f"inline_bytes_max={INLINE_BYTES_MAX}, result_bytes_max={RESULT_BYTES_MAX})",
            timeout_s=self.timeout_s,
        )
        sys.stdout.write(ended.stdout)
        sys.stderr.write(ended.stderr)
        if ended.error is not None or not isinstance(ended.value, dict):
            said = ended.error or "it gave no answer"
            raise EngineExited(f"the interpreter of the sandbox cannot run tasks any more: {said}")
        return self._outcome(sandbox, ended.value)

    def _outcome(self, sandbox: Sandbox, answer: dict[str, JsonValue]) -> Outcome:
        data = _data(sandbox, answer)
        failed = answer.get("error")
        if isinstance(failed, dict):
            return Outcome(error=self._error(sandbox, failed, data, answer.get("stage")))
        try:
            return Outcome(json.loads(data) if self.as_json else pickle.loads(data))  # noqa: S301 - as documented
        except Exception as error:  # noqa: BLE001 - whatever a class's own unpickling raises
            words = f"what the task returned cannot be read here: {type(error).__name__}: {error}"
            return Outcome(error=TaskError(words, sandbox=sandbox.id))

    def _error(
        self, sandbox: Sandbox, failed: dict[str, JsonValue], data: bytes, stage: JsonValue
    ) -> BaseException:
        """Return the exception of a task; `TaskError` if it cannot be made again here."""
        kind, message = str(failed.get("type")), str(failed.get("message"))
        error: BaseException = TaskError(
            f"{kind}: {message}", sandbox=sandbox.id, type=kind, guest_code="exception"
        )
        if data and not self.as_json:
            with contextlib.suppress(Exception):  # whatever a class's own unpickling raises
                made = pickle.loads(data)  # noqa: S301 - as documented
                error = made if isinstance(made, BaseException) else error
        error.__cause__ = RemoteTraceback(str(failed.get("traceback")))
        if stage == "load":
            error.add_note(
                f"The task could not be read in the snapshot {sandbox.tag}: what it imports must "
                "be installed there, or be sent along, as ForkExecutor(…, modules=[module])."
            )
        return error


def pickled(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return a task as a pickle.

    Raises:
        InvalidRequest: It is longer than `TASK_BYTES_MAX`.
        Exception: It cannot be pickled.
    """
    data: bytes = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    if len(data) > TASK_BYTES_MAX:
        raise InvalidRequest(
            f"the task has {len(data)} bytes as a pickle, more than the {TASK_BYTES_MAX} that a "
            "task may have; put its data into the snapshot, or write files in the sandbox",
            field="task",
        )
    return data


def send_by_value(modules: Sequence[ModuleType]) -> None:
    """Have functions and classes of these modules sent whole, for the rest of this program.

    Raises:
        InvalidRequest: One is no module.
    """
    for each in modules:
        if not isinstance(each, ModuleType):
            raise InvalidRequest(f"modules: {each!r} is no module", field="modules")
        cloudpickle.register_pickle_by_value(each)


def prepare(sandbox: Sandbox) -> None:
    """Make a sandbox ready for tasks.

    Raises:
        Conflict: Its Python is another one than this program's.
        GuestError: It has no warm Python.
    """
    theirs = sandbox.eval(_VERSION, check=True).value
    ours = [sys.implementation.cache_tag, *sys.version_info[:3]]
    if not isinstance(theirs, list) or theirs[0] != ours[0]:
        raise Conflict(
            f"snapshot {sandbox.tag} has {_shown(theirs)}, and this program {_shown(ours)}: tasks "
            "are sent as bytecode, which both must read.  Use a snapshot with the Python of this "
            "program, or run this program with the Python of the snapshot",
            tag=sandbox.tag,
        )
    sources = {
        "cloudpickle.cloudpickle": inspect.getsource(cloudpickle_module),
        "cloudpickle": inspect.getsource(cloudpickle),
    }
    runner, version = inspect.getsource(_guest), cloudpickle.__version__
    code = _INSTALL.format(name=RUNNER, source=runner, version=version, sources=sources)
    sandbox.eval(code, check=True)


def _shown(version: object) -> str:
    if not isinstance(version, list):
        return "an unknown Python"
    tag, *numbers = version
    name = "Python" if str(tag).startswith("cpython") else str(tag)
    return f"{name} {'.'.join(map(str, numbers))}"


def _data(sandbox: Sandbox, answer: Mapping[str, JsonValue]) -> bytes:
    """Return the bytes of an answer, from the guest's file if they are in one.

    Raises:
        EngineError: There are more than a task may return, or they are gone.
    """
    path = answer.get("path")
    if not isinstance(path, str):
        return base64.b64decode(str(answer.get("data") or ""))
    data = bytearray()
    try:
        with sandbox.files.open(path, length=RESULT_BYTES_MAX + 1) as pieces:
            for piece in pieces:
                data += piece
        sandbox.files.remove(path)
    except (NotFound, Conflict) as error:  # the task did run
        raise EngineExited(f"its result is gone: {error}") from error
    if len(data) > RESULT_BYTES_MAX:
        raise EngineError(f"the guest returned more than {RESULT_BYTES_MAX} bytes")
    return bytes(data)
