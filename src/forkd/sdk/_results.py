"""What calls return, where the wire's own types are not what a caller wants to hold."""

from __future__ import annotations

import json
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, AnyStr, Generic, Literal, Self, TypeVar

from pydantic import Field, field_serializer

from forkd.errors import CommandError, ExecTimeout, GuestError
from forkd.sdk import _notebook
from forkd.sdk._notebook import Shown, shortened
from forkd.wire import v2, v2_files, v2_trees
from forkd.wire.text import readable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pydantic import JsonValue

    from forkd.wire.v2 import SandboxFailure, SnapshotInfo
    from forkd.wire.v2_trees import TreeNode

S = TypeVar("S")

SIGNAL_EXIT_BASE = 128
"""A program that a signal ended has this plus the signal as exit code, as in a shell."""

QUOTED_CHARS_MAX = 2_000
"""How much of a program's output the message of an error repeats; the end is kept."""


class FileEntry(v2_files.FileEntry):
    """One file, folder or link in a guest; `path` says where it is."""

    path: str = Field(default="", description="Its path in the guest, as it was asked for.")

    def __repr__(self) -> str:
        return f"<FileEntry {shortened(self.path)} {self.kind} of {self.size_bytes} bytes>"

    @field_serializer("path")
    def _readable_path(self, text: str) -> str:
        return readable(text)


def placed(entry: v2_files.FileEntry, path: str) -> FileEntry:
    """Return what is at a path, with the path."""
    return FileEntry.model_construct(**{**vars(entry), "path": path})


@dataclass(frozen=True, slots=True)
class BuildStep:
    """An instruction of a Dockerfile that is done.

    Attributes:
        number: Which of the build it is, from 1.
        total: How many the build has.
        line: Where it is in the Dockerfile.
        text: It, in one line.
        changes_files: Whether it has a link of its own, as RUN, COPY and ADD have.
        cached: Whether that link was there already.
        seconds: How long it took.
    """

    number: int
    total: int
    line: int
    text: str
    changes_files: bool = False
    cached: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What a build has made.

    Attributes:
        snapshot: The snapshot.
        steps: The instructions, as far as they were needed.
        warnings: What in the Dockerfile has no effect here, or a risk.
    """

    snapshot: SnapshotInfo
    steps: tuple[BuildStep, ...]
    warnings: tuple[str, ...]


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

    sandboxes: Sequence[S]
    failures: list[SandboxFailure]
    pause_ms: float
    stall_ms: float | None
    snapshot: SnapshotInfo | None


@dataclass(frozen=True, slots=True, repr=False)
class ExecResult(Shown, Generic[AnyStr]):
    """How a program ended, and what it wrote.

    `str(result)` is what it wrote to standard output.

    Attributes:
        exit_code: As a shell's: 128 + signal if a signal ended the program.
        stdout: What it wrote: text, or bytes with `text=False`.
        stderr: What it wrote to standard error, likewise.
        signal: The signal that ended it; None if it exited.
        timed_out: It was killed because its time ran out.
        duration_s: How long it ran.
        truncated: Some output was dropped, because there was too much.
        args: The program and its arguments.
    """

    exit_code: int
    stdout: AnyStr
    stderr: AnyStr
    signal: int | None = None
    timed_out: bool = False
    duration_s: float = 0.0
    truncated: bool = False
    args: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.exit_code == 0 and not self.timed_out

    def check(self) -> Self:
        """Return this result, if the program exited with 0.

        Raises:
            ExecTimeout: Its time ran out.
            CommandError: It exited with another code.
        """
        if self.timed_out:
            raise ExecTimeout(
                f"{self._program} was killed after {self.duration_s:.1f} s: its time ran out"
                f"{self._quoted}",
                result=self,
                guest_code="timed_out",
            )
        if self.exit_code != 0:
            raise CommandError(
                f"{self._program} exited with {self.exit_code}{self._quoted}",
                result=self,
                exit_code=self.exit_code,
            )
        return self

    def __str__(self) -> str:
        return _text(self.stdout)

    def __repr__(self) -> str:
        members = [f"exit_code={self.exit_code}", f"stdout={shortened(self.stdout)}"]
        if self.stderr:
            members.append(f"stderr={shortened(self.stderr)}")
        members += [name for name in ("timed_out", "truncated") if getattr(self, name)]
        return f"<{type(self).__name__} {' '.join(members)}>"

    @property
    def _program(self) -> str:
        return _notebook.visible(shlex.join(self.args)) if self.args else "the program"

    @property
    def _quoted(self) -> str:
        """The end of what the program said, for a message."""
        said = _text(self.stderr).strip() or _text(self.stdout).strip()
        return f": {_notebook.visible(said[-QUOTED_CHARS_MAX:])}" if said else ""

    def _remark(self) -> str:
        if self.timed_out:
            return f"timed out after {self.duration_s:.1f} s"
        words = "" if self.exit_code == 0 else f"exit code {self.exit_code}"
        return _joined(words, "output truncated" if self.truncated else "")

    def _shown_text(self) -> str:
        said = (_text(self.stdout), _text(self.stderr), self._remark())
        return _notebook.visible("\n".join(each.rstrip("\n") for each in said if each))

    def _repr_html_(self) -> str:
        said = _notebook.block(_text(self.stdout)) + _notebook.red(_text(self.stderr))
        return said + _notebook.faint(self._remark()) or _notebook.faint("no output")


@dataclass(frozen=True, slots=True)
class EvalError:
    """An exception that the evaluated code raised and did not catch.

    Attributes:
        type: The name of its class.
        message: What it says.
        traceback: Where it was raised, as Python prints it.
    """

    type: str
    message: str
    traceback: str

    @property
    def name(self) -> str:
        """Same as `type`, under E2B's name."""
        return self.type

    @property
    def value(self) -> str:
        """Same as `message`, under E2B's name."""
        return self.message

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """One thing that evaluated code showed, in each form that it has, under E2B's names.

    The value of the last expression, a figure of matplotlib, or what `display(…)` was given.
    What a guest has made is not to be trusted: HTML, SVG and JavaScript may hold anything.

    Attributes:
        text: Its `repr`.
        json: The value itself, where JSON can say it, else None.
        is_main_result: Whether it is the value of the last expression.
        html: As HTML, such as a table of pandas.
        markdown: As Markdown.
        svg: As SVG.
        png: As PNG, in base64.
        jpeg: As JPEG, in base64.
        pdf: As PDF, in base64.
        latex: As LaTeX.
        javascript: As JavaScript.
        extra: Its other forms, by MIME type.
        omitted: Forms that were too large to be sent: their size in bytes, by MIME type.
    """

    text: str
    json: JsonValue = None
    is_main_result: bool = True
    html: str | None = None
    markdown: str | None = None
    svg: str | None = None
    png: str | None = None
    jpeg: str | None = None
    pdf: str | None = None
    latex: str | None = None
    javascript: str | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    omitted: Mapping[str, int] = field(default_factory=dict)

    def formats(self) -> list[str]:
        """Return the names of the forms that it has."""
        names = ("text", "json", *_FORMS.values())
        return [name for name in names if getattr(self, name) is not None] + list(self.extra)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        forms = self.formats()[1:]  # a picture would be pages of base64
        others = f" and as {', '.join(forms)}" if forms else ""
        return f"<Result {shortened(self.text)}{others}>"

    def _repr_html_(self) -> str:
        if self.png is not None or self.jpeg is not None or self.svg is not None:
            shown = _notebook.picture(png=self.png, jpeg=self.jpeg, svg=self.svg)
        elif self.html is not None:
            shown = _notebook.page(self.html)
        else:
            shown = _notebook.block(self.markdown or self.latex or self.text)
        left = (f"{kind} is too large: {size} bytes" for kind, size in self.omitted.items())
        return shown + _notebook.faint("\n".join(left))


_FORMS = {
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/javascript": "javascript",
}
_TEXT, _JSON = "text/plain", "application/json"


def _result(forms: v2.EvalForms, text: str | None, value: JsonValue) -> Result:
    """Return one thing that was shown; of the value, with its `repr` and what JSON says of it."""
    data, named = dict(forms.data), {}
    text = data.pop(_TEXT, "") if text is None else text
    said = data.pop(_JSON, None)
    if value is None and said is not None:
        with suppress(ValueError):
            value = json.loads(said)
    for kind, name in _FORMS.items():
        if kind in data:
            named[name] = data.pop(kind)
    return Result(text, value, forms.is_main, **named, extra=data, omitted=forms.omitted)


@dataclass(frozen=True, slots=True)
class CodeContext:
    """Where code has names and a working directory of its own, under E2B's names.

    Attributes:
        id: Its name.
        language: The warm runtime's.
        cwd: Where its code started.
    """

    id: str
    language: str
    cwd: str


@dataclass(frozen=True, slots=True)
class Logs:
    """What evaluated code printed, under E2B's names.

    Attributes:
        stdout: What it printed: one text, or none.
        stderr: What it printed to standard error, likewise.
    """

    stdout: list[str]
    stderr: list[str]


@dataclass(frozen=True, slots=True, repr=False)
class EvalResult(Shown):
    """What code evaluated in a sandbox gave.

    `str(result)` is the `repr` of the value; what was printed, if there is no value; the
    traceback, if the code raised.

    Attributes:
        value: The last expression where JSON can say it, else None; see `value_is_json`.
        repr: Its `repr`; None if the code did not end in an expression.
        stdout: What the code printed.
        stderr: What it printed to standard error.
        error: The exception it raised; None if it raised none.
        value_is_json: Whether `value` is the value, and not None because it is no JSON.
        timed_out: It was interrupted; its namespace lives on.
        truncated: Some output was dropped, because there was too much.
        results: What it showed: figures, what it displayed, and the value, in their order.
        more_results: How many results were dropped, because there were too many.
    """

    value: JsonValue
    repr: str | None
    stdout: str
    stderr: str
    error: EvalError | None
    value_is_json: bool = False
    timed_out: bool = False
    truncated: bool = False
    results: list[Result] = field(default_factory=list)
    more_results: int = 0

    def __post_init__(self) -> None:
        """Have the value among the results, also if it has only a `repr`."""
        if self.repr is not None and not any(each.is_main_result for each in self.results):
            results = [*self.results, Result(self.repr, self.value)]
            object.__setattr__(self, "results", results)

    @property
    def ok(self) -> bool:
        """Whether the code ran to its end."""
        return self.error is None and not self.timed_out

    @property
    def text(self) -> str | None:
        """Same as `repr`, under E2B's name."""
        return self.repr

    @property
    def logs(self) -> Logs:
        """What the code printed, under E2B's names."""
        return Logs([self.stdout] if self.stdout else [], [self.stderr] if self.stderr else [])

    def check(self) -> EvalResult:
        """Return this result, if the code ran to its end.

        Raises:
            ExecTimeout: Its time ran out.
            GuestError: It raised, with its traceback in the message.
        """
        if self.timed_out:
            raise ExecTimeout(
                "the code timed out and was interrupted; variables that it has set are kept",
                result=self,
                guest_code="timed_out",
            )
        if self.error is not None:
            raise GuestError(f"{self.error}\n{self.error.traceback}", guest_code="exception")
        return self

    def __str__(self) -> str:
        if self.error is not None:
            return self.error.traceback
        return self.stdout if self.repr is None else self.repr

    def __repr__(self) -> str:
        if self.error is not None:
            said = _notebook.visible(str(self.error))
        elif self.value_is_json:
            said = f"value={shortened(self.value)}"
        else:
            said = f"repr={shortened(self.repr)}"
        if self.stdout:
            said += f" stdout={shortened(self.stdout)}"
        said += "".join(f" {name}" for name in ("timed_out", "truncated") if getattr(self, name))
        return f"<EvalResult {said}>"

    def _remark(self) -> str:
        words = "timed out; variables that were set are kept" if self.timed_out else ""
        more = f"{self.more_results} more results were dropped" if self.more_results else ""
        return _joined(words, "output truncated" if self.truncated else "", more)

    def _shown_text(self) -> str:
        fault = "" if self.error is None else self.error.traceback
        texts = (each.text for each in self.results if each.text != "None")
        said = (self.stdout, self.stderr, *texts, fault, self._remark())
        return _notebook.visible("\n".join(each.rstrip("\n") for each in said if each))

    def _repr_html_(self) -> str:
        fault = "" if self.error is None else self.error.traceback
        return "".join(
            (
                _notebook.block(self.stdout),
                _notebook.red(self.stderr),
                *(each._repr_html_() for each in self.results if each.text != "None"),
                _notebook.red(fault),
                _notebook.faint(self._remark()),
            )
        )


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes that a program wrote.

    Attributes:
        stream: Where it wrote them.
        data: The bytes.
    """

    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True, slots=True)
class OutputMessage:
    """A piece of what evaluated code wrote, under E2B's names.

    Attributes:
        line: The text: as much as came at once, with its line ends.
        timestamp: When it came, in nanoseconds since the epoch.
        error: Whether it was written to standard error.
    """

    line: str
    timestamp: int
    error: bool = False

    def __str__(self) -> str:
        return self.line


def messages(
    callback: Callable[[OutputMessage], object] | None, *, error: bool
) -> Callable[[str], object] | None:
    """Return what a function is called by with pieces of text; None for none."""
    if callback is None:
        return None
    return lambda text: callback(OutputMessage(text, time.time_ns(), error))


class TreeInfo(Shown, v2_trees.TreeInfo):
    """Who was branched from whom; `str(tree)` draws it."""

    def __str__(self) -> str:
        return "\n".join(line for root in self.roots for line in _drawn(root, "", ""))

    def __repr__(self) -> str:
        return f"<TreeInfo {len(self.roots)} roots>"


class DiffInfo(Shown, v2_trees.DiffInfo):
    """How one machine differs from another; `str(diff)` has a line for each file."""

    def __repr__(self) -> str:
        return f"<DiffInfo {len(self.changes) + self.more} changes>"

    def __str__(self) -> str:
        lines = [f"{_MARKS[each.change]} {each.path}" for each in self.changes]
        return "\n".join([*lines, *self._remarks()])

    def _remarks(self) -> list[str]:
        remarks = [f"… {self.more} more"] if self.more else []
        if self.pages_apart is not None:
            remarks.append(f"{self.pages_apart} pages of memory differ")
        return remarks

    def _repr_html_(self) -> str:
        rows = [(each.change, each.path, each.size_bytes) for each in self.changes]
        changes = _notebook.table(("change", "path", "bytes"), rows) if rows else ""
        return changes + _notebook.faint("\n".join(self._remarks()))


_MARKS = {"added": "+", "changed": "~", "removed": "-"}


def _drawn(node: TreeNode, first: str, rest: str) -> Iterator[str]:
    """Yield the lines of a tree: `first` is before its root, `rest` before what is below."""
    yield f"{first}{node.id} ({node.status})"
    for child in node.children:
        last = child is node.children[-1]
        yield from _drawn(
            child, rest + ("└── " if last else "├── "), rest + ("    " if last else "│   ")
        )


def _joined(*words: str) -> str:
    return ", ".join(each for each in words if each)


def _text(said: str | bytes) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said


def eval_result(answer: v2.EvalResult) -> EvalResult:
    """Return the daemon's answer as callers see it."""
    fault = answer.exception
    results = [
        _result(
            each, answer.result if each.is_main else None, answer.value if each.is_main else None
        )
        for each in answer.results
    ]
    return EvalResult(
        value=answer.value,
        repr=answer.result,
        stdout=answer.stdout,
        stderr=answer.stderr,
        error=None if fault is None else EvalError(fault.type, fault.message, fault.traceback),
        value_is_json=answer.value_is_json,
        timed_out=answer.timed_out,
        truncated=answer.truncated,
        results=results,
        more_results=answer.more_results,
    )


def exec_result(answer: v2.ExecResult, args: Sequence[str]) -> ExecResult[str]:
    """Return the daemon's answer as callers see it."""
    return ExecResult(
        exit_code=answer.exit_code,
        stdout=answer.stdout,
        stderr=answer.stderr,
        signal=answer.signal,
        timed_out=answer.timed_out,
        duration_s=answer.duration_s,
        truncated=answer.truncated,
        args=tuple(args),
    )


R = TypeVar("R", ExecResult[str], ExecResult[bytes], EvalResult)


def judged(result: R, *, check: bool | None) -> R:
    """Return a result as the caller's `check` wants it: None raises for timeouts only.

    Raises:
        ExecTimeout: The time ran out, unless `check` is false.
        CommandError: A program exited with a code other than 0, and `check` is true.
        GuestError: Code raised, and `check` is true.
    """
    if check or (check is None and result.timed_out):
        result.check()
    return result
