"""Commands and evaluations inside a guest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forkd import limits
from forkd.errors import InvalidRequest
from forkd.model.checks import in_range, length_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from typing import TypeAlias

    from forkd.model.json import JsonValue


_WAY_OUT = ": send it by `stdin`, or as a file by `files.write`"


@dataclass(frozen=True, slots=True)
class TtySize:
    """Size of a terminal, in characters.

    Raises:
        InvalidRequest: A side is not 1 to `TTY_CELLS_MAX`.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        in_range("rows", self.rows, 1, limits.TTY_CELLS_MAX)
        in_range("columns", self.columns, 1, limits.TTY_CELLS_MAX)


@dataclass(frozen=True, slots=True)
class ExecRequest:
    """A command to run in a guest; no shell reads it.

    Attributes:
        args: The program and its arguments, at least one.
        env: Added to the image's environment.
        cwd: Where it starts; the image's if None.
        user: A name, or `uid[:gid]`; the image's if None.
        timeout_s: It is killed after this time; never if None.
        stdin: Whether the caller will send input; /dev/null otherwise.
        tty: Run it on a terminal of this size.

    Raises:
        InvalidRequest: A value is out of range; the field is named.
    """

    args: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    timeout_s: float | None = None
    stdin: bool = False
    tty: TtySize | None = None

    def __post_init__(self) -> None:
        in_range("args", len(self.args), 1, limits.EXEC_ARGS_MAX)
        if not self.args[0]:
            raise InvalidRequest("args[0], the program, is empty", field="args")
        _check_bytes(self.args, self.env)
        if self.timeout_s is not None:
            in_range("timeout_s", self.timeout_s, 0.001, limits.EXEC_TIMEOUT_S_MAX)


def check_variables(env: Mapping[str, str], bytes_max: int) -> None:
    """Return if a program can be given these variables.

    Raises:
        InvalidRequest: One of them no program can have, there are too many, or they have more than
            `bytes_max` bytes.
    """
    if len(env) > limits.EXEC_ENV_MAX:
        raise InvalidRequest(
            f"env has {len(env)} variables; at most {limits.EXEC_ENV_MAX} are possible",
            field="env",
        )
    _check_names(env)
    words = ((f"env[{name[:80]!r}]", f"{name}={value}") for name, value in env.items())
    total = sum(_length(what, "env", word) for what, word in words)
    if total > bytes_max:
        raise InvalidRequest(
            f"env has {total} bytes, names included; at most {bytes_max} are possible", field="env"
        )


def _check_names(env: Mapping[str, str]) -> None:
    if any(not name or "=" in name for name in env):
        raise InvalidRequest("names in env must not be empty or hold '='", field="env")


def _check_bytes(args: tuple[str, ...], env: Mapping[str, str]) -> None:
    _check_names(env)
    words = [(f"args[{number}]", "args", arg) for number, arg in enumerate(args)]
    words += [(f"env[{name!r}]", "env", f"{name}={value}") for name, value in env.items()]
    total = sum(_length(*word) for word in words)
    if total > limits.EXEC_BYTES_MAX:
        raise InvalidRequest(
            f"args and env have {total} bytes together; at most {limits.EXEC_BYTES_MAX} are "
            f"possible{_WAY_OUT}",
            field="args",
        )


def _length(what: str, field: str, text: str) -> int:
    """Return the bytes of one argument or variable, which must be possible."""
    if "\0" in text:
        raise InvalidRequest(f"{what} holds a NUL, which no argument can", field=field)
    length = length_of(what, text, field)
    if length > limits.EXEC_ARG_BYTES_MAX:
        raise InvalidRequest(
            f"{what} has {length} bytes; at most {limits.EXEC_ARG_BYTES_MAX} are possible in one "
            f"argument or variable{_WAY_OUT}",
            field=field,
        )
    return length


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of a command that exists: its process id in the guest."""

    pid: int


@dataclass(frozen=True, slots=True)
class Stdout:
    """Bytes that the command wrote to its standard output, or to its terminal."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Stderr:
    """Bytes that the command wrote to its standard error."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Exited:
    """The last event: the command has ended and its output is drained.

    Attributes:
        exit_code: What it returned; None if a signal ended it.
        signal: The signal that ended it; None if it returned.
        timed_out: Whether it was killed because its time was over.
        duration_s: How long it ran.
        truncated: Whether a process that it had started still held an output: what that writes
            later is dropped.
    """

    exit_code: int | None
    signal: int | None
    timed_out: bool
    duration_s: float
    truncated: bool = False


ExecEvent = Started | Stdout | Stderr | Exited

OnOutput: TypeAlias = "Callable[[Stdout | Stderr], Awaitable[None]]"
"""Is called with each piece of output."""


@dataclass(frozen=True, slots=True)
class EvalFault:
    """An exception that escaped the evaluated code; it is data, not an error of ours."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class EvalForms:
    """One thing that evaluated code showed: its value, a figure, or what it displayed.

    Attributes:
        is_main: Whether it is the value of the last expression.
        data: Its forms by MIME type, besides its `repr`: texts; of pictures, base64.
        omitted: Forms that were too large, with their size in bytes.
    """

    is_main: bool
    data: Mapping[str, str]
    omitted: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What an evaluation gave.

    Attributes:
        has_value: Whether the last statement was an expression.
        repr: Its `repr`, cut at 65,536 characters; None without a value.
        value: The value itself where JSON can say it (`value_is_json`).
        value_is_json: Whether `value` is the value.
        stdout: What it printed, at most `EVAL_OUTPUT_BYTES_MAX` bytes, undecodable ones replaced.
        stderr: As `stdout`.
        output_truncated: Whether some of either was dropped.
        error: The exception that escaped; None if none did.
        timed_out: Whether it was interrupted because its time was over.
        results: What it showed.
        more_results: How many results were too many.
    """

    has_value: bool
    repr: str | None
    value: JsonValue
    value_is_json: bool
    stdout: str
    stderr: str
    output_truncated: bool
    error: EvalFault | None
    timed_out: bool
    results: Sequence[EvalForms] = ()
    more_results: int = 0
