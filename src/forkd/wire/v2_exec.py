"""Programs and code in a sandbox, on the wire.

The rules are those of `wire.v2`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue

from forkd import limits
from forkd.wire.parts import Answer, Request, TimeoutSecs
from forkd.wire.text import Arg, Path, few


class TerminalSize(Request):
    """A terminal's size, in characters."""

    rows: int = Field(ge=1, le=limits.TTY_CELLS_MAX)
    columns: int = Field(ge=1, le=limits.TTY_CELLS_MAX)


class _ExecBase(Request):
    args: Annotated[list[Arg], BeforeValidator(few)] = Field(
        min_length=1, max_length=limits.EXEC_ARGS_MAX, description="No shell."
    )
    env: dict[str, Arg] = Field(default_factory=dict, max_length=limits.EXEC_ENV_MAX)
    cwd: Path | None = None
    user: str | None = Field(default=None, min_length=1, max_length=limits.EXEC_USER_CHARS_MAX)


class Exec(_ExecBase):
    """Run a program and wait for it."""

    timeout_secs: TimeoutSecs | None = Field(
        default=limits.EXEC_TIMEOUT_S_DEFAULT,
        description="Kill the program after this time; null: never.",
    )
    stdin: str | None = Field(default=None, max_length=limits.EXEC_STDIN_CHARS_MAX)


class ExecStart(_ExecBase):
    """Run a program with its streams attached: first message of the exec WebSocket."""

    timeout_secs: TimeoutSecs | None = Field(
        default=None, description="Kill the program after this time; null: never."
    )
    stdin: bool = Field(default=False, description="False: standard input is /dev/null.")
    tty: TerminalSize | None = None


class ExecStarted(Answer):
    """The program runs."""

    event: Literal["started"] = "started"
    pid: int


class ExecControl(Request):
    """Do something to a program that runs; exactly one member."""

    signal: int | None = Field(default=None, ge=1, le=64)
    resize: TerminalSize | None = None


class ExecExit(Answer):
    """How a program ended."""

    exit_code: int | None = Field(description="None if a signal ended it.")
    signal: int | None = None
    timed_out: bool = False
    duration_s: float
    truncated: bool = Field(default=False, description="Later output of others was dropped.")


class ExecResult(ExecExit):
    """How a program ended, and what it wrote."""

    exit_code: int = Field(description="As a shell's: 128 + signal if a signal ended the program.")
    stdout: str = Field(description="UTF-8; other bytes become U+FFFD.")
    stderr: str
    truncated: bool = Field(description="Output beyond the limit, or too late, was dropped.")


class Kind(IntEnum):
    """First byte of each message of the exec WebSocket; the guest protocol's frame kinds."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    EVENT = 4
    CONTROL = 5
    STDIN = 16
    STDIN_EOF = 17
    STDOUT = 18
    STDERR = 19


class Eval(Request):
    """Run code in the sandbox's warm runtime."""

    code: str = Field(max_length=limits.EVAL_CODE_BYTES_MAX)
    runtime: str | None = Field(
        default=None,
        pattern=limits.RUNTIME_NAME_PATTERN,
        description="Refuse the code if the warm runtime is another one; null: whatever it is.",
    )
    context: str | None = Field(
        default=None,
        pattern=limits.EVAL_CONTEXT_PATTERN,
        description="Run it with names and a working directory of their own, which the first code "
        "there makes; null: those of the warm-up.",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        max_length=limits.EXEC_ENV_MAX,
        description="Variables of the environment, as long as this code runs.",
    )
    timeout_secs: TimeoutSecs = limits.EXEC_TIMEOUT_S_DEFAULT


class EvalException(Answer):
    """An exception that the code raised and did not catch."""

    type: str
    message: str
    traceback: str


class EvalForms(Answer):
    """One thing that the code showed: its value, a figure, or what it displayed."""

    is_main: bool = Field(default=False, description="It is the value of the last expression.")
    data: dict[str, str] = Field(
        description="By MIME type: text; base64 of PNG, JPEG and PDF; JSON as text."
    )
    omitted: dict[str, int] = Field(
        default_factory=dict, description="MIME types of forms that were too large, with bytes."
    )


class EvalResult(Answer):
    """What the code gave.  An exception is a result too."""

    result: str | None = Field(description="`repr` of the last expression; None without one.")
    has_value: bool
    value: JsonValue = Field(default=None, description="The last expression, if JSON can say it.")
    value_is_json: bool
    stdout: str
    stderr: str
    truncated: bool = Field(default=False, description="Output beyond the limit was dropped.")
    error: str | None = Field(default=None, description="`type: message` of `exception`.")
    exception: EvalException | None = None
    timed_out: bool = False
    results: list[EvalForms] = Field(
        default_factory=list,
        description="What the code showed, in its order; the value only if it has further forms.",
    )
    more_results: int = Field(default=0, description="Results beyond the limit; they are lost.")
    exit_code: int = Field(description="0; 1 if there was an exception or the time ran out.")
