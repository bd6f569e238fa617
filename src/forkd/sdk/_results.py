"""What calls return, where the wire's own types are not what a caller wants to hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from forkd.errors import GuestError

if TYPE_CHECKING:
    from pydantic import JsonValue

    from forkd.wire import v2

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Branch(Generic[S]):
    """What became of a branch.

    Attributes:
        sandboxes: The siblings that became ready.
        failures: Why the others did not.
        pause_ms: How long the source was paused.
        stall_ms: The longest time for which its guest saw itself paused, from just before
            the pause until siblings had answered; None if that is not known.
        snapshot: Its instant as a snapshot, if one was asked for.
    """

    sandboxes: list[S]
    failures: list[v2.SandboxFailure]
    pause_ms: float
    stall_ms: float | None
    snapshot: v2.SnapshotInfo | None


@dataclass(frozen=True, slots=True)
class EvalError:
    """An exception that the evaluated code raised and did not catch."""

    type: str
    message: str
    traceback: str

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What code evaluated in a sandbox gave.

    Attributes:
        value: The last expression where JSON can say it, else None; see `value_is_json`.
        repr: Its `repr`; None if the code did not end in an expression.
        stdout: What the code printed.
        stderr: What it printed to standard error.
        error: The exception it raised; None if it raised none.
        value_is_json: Whether `value` is the value, and not None because it is no JSON.
        timed_out: It was interrupted; its namespace lives on.
        truncated: Some output was dropped, because there was too much.
    """

    value: JsonValue
    repr: str | None
    stdout: str
    stderr: str
    error: EvalError | None
    value_is_json: bool = False
    timed_out: bool = False
    truncated: bool = False

    @property
    def ok(self) -> bool:
        """Whether the code ran to its end."""
        return self.error is None and not self.timed_out

    def check(self) -> EvalResult:
        """Return this result, if the code ran to its end.

        Raises:
            GuestError: It raised, with its traceback in the message, or its time ran out.
        """
        if self.error is not None:
            raise GuestError(f"{self.error}\n{self.error.traceback}", guest_code="exception")
        if self.timed_out:
            raise GuestError("the code timed out", guest_code="timed_out")
        return self


def eval_result(answer: v2.EvalResult) -> EvalResult:
    """Return the daemon's answer as callers see it."""
    fault = answer.exception
    return EvalResult(
        value=answer.value,
        repr=answer.result,
        stdout=answer.stdout,
        stderr=answer.stderr,
        error=None if fault is None else EvalError(fault.type, fault.message, fault.traceback),
        value_is_json=answer.value_is_json,
        timed_out=answer.timed_out,
        truncated=answer.truncated,
    )


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes that a program wrote."""

    stream: Literal["stdout", "stderr"]
    data: bytes
