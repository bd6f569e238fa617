"""Requests, checked before they travel: the wire's own types refuse what the daemon would.

Errors name arguments as the SDK's callers write them: `ttl_s`, where the wire has `ttl_secs`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar

from pydantic import ValidationError

from forkd.errors import InvalidRequest
from forkd.limits import PORT_MAX
from forkd.wire import v2, v2_trees
from forkd.wire.text import encoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pydantic import BaseModel

M = TypeVar("M", bound="BaseModel")
P = ParamSpec("P")
R = TypeVar("R")

ARGUMENTS = {
    "deadline_secs": "deadline_s",
    "exec_timeout_secs": "exec_timeout_s",
    "expires_in_secs": "expires_in_s",
    "idle_ttl_secs": "idle_ttl_s",
    "snapshot_tag": "tag",
    "timeout_secs": "timeout_s",
    "ttl_secs": "ttl_s",
}
"""What arguments of the SDK are called, where that is not the name of the wire's member."""

KINDS = {"bool", "float", "int", "str", "list[str]"}
"""Parts of an error's place that are kinds which a member may be, and no members."""


class ForkOptions(TypedDict, total=False):
    """What each sandbox of one fork gets; `Client.fork` documents each."""

    memory_limit_mib: int | None
    disk_limit_mib: int | None
    cpu_limit: float | None
    cpu_weight: int | None
    pids_limit: int | None
    io_limit_mib_s: int | None
    io_limit_ops: int | None
    bandwidth_limit_mbit: int | None
    network: bool | str | list[str] | None
    hold_egress: bool
    secrets: Sequence[str] | None
    env: Mapping[str, str] | None
    labels: Mapping[str, str] | None
    ttl_s: float | Literal["default"] | None
    idle_ttl_s: float | None
    deadline_s: float | None
    wait: bool


class NamedForkOptions(ForkOptions, total=False):
    """What one sandbox gets, which may have a name."""

    name: str | None


class LimitOptions(TypedDict, total=False):
    """What a running sandbox may take of its host; `Sandbox.set_limits` documents each."""

    memory_limit_mib: int | None
    cpu_limit: float | None
    cpu_weight: int | None
    pids_limit: int | None
    io_limit_mib_s: int | None
    io_limit_ops: int | None
    bandwidth_limit_mbit: int | None


class BranchOptions(TypedDict, total=False):
    """How siblings of a running sandbox are made; `Sandbox.branch` documents each."""

    deadline_s: float | None
    ttl_s: float | Literal["default"] | None
    labels: Mapping[str, str] | None
    network: bool | str | list[str] | None
    hold_egress: bool


class ExecOptions(TypedDict, total=False):
    """How a program runs; `Sandbox.exec` documents each."""

    env: Mapping[str, str] | None
    cwd: str | None
    user: str | None


def build(kind: type[M], **members: Any) -> M:  # noqa: ANN401 - the type checks them
    """Return a request; members that are None are left to their defaults.

    Raises:
        InvalidRequest: A member is malformed or out of range; `context["field"]` names it.
    """
    given = {key: value for key, value in members.items() if value is not None}
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors()[0]
        parts = [str(part) for part in first["loc"] if part not in KINDS]
        field = argument(".".join(part for part in parts if "[" not in part)) or "request"
        raise InvalidRequest(f"{field}: {first['msg']}", field=field) from None


def patch(kind: type[M], **members: Any) -> M:  # noqa: ANN401 - the type checks them
    """Return a request that changes members; None is a value of those that are named.

    Raises:
        InvalidRequest: A member is malformed or out of range.
    """
    absent = {name: None for name, value in members.items() if value is None}
    return build(kind, **members).model_copy(update=absent)


def argument(field: str) -> str:
    """Return what a member of the wire is called here; whatever is below it stays."""
    name, dot, rest = field.partition(".")
    return f"{ARGUMENTS.get(name, name)}{dot}{rest}"


def explicit(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function that was called with an option it does not have say which it has.

    Python's own `TypeError` is no error of ours, and names no option that was meant.
    """
    kinds = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    parameters = inspect.signature(function).parameters.values()
    known = [each.name for each in parameters if each.kind in kinds]
    options = [name for name in known if name not in {"self", "cls"}]

    @functools.wraps(function)
    def checked(*args: P.args, **given: P.kwargs) -> R:
        for name in given:
            if name not in options:
                said = type(args[0]).__name__ if function.__name__ == "__init__" else None
                raise unknown_option(said or function.__name__, name, options)
        return function(*args, **given)

    return checked


def checked_port(port: int) -> int:
    """Return a port of a sandbox.

    Raises:
        InvalidRequest: It is none.
    """
    if not 1 <= port <= PORT_MAX:
        raise InvalidRequest(f"port must be 1 to {PORT_MAX}, not {port}", field="port")
    return port


def unknown_option(function: str, name: str, options: Iterable[str]) -> InvalidRequest:
    """Return the error for an option that a function does not have."""
    options = list(options)
    begun = [each for each in options if each.startswith((f"{name}_", name))]
    close = begun or difflib.get_close_matches(name, options, n=3, cutoff=0.5)
    if close:
        advice = f"; did you mean {' or '.join(close)}?"
    else:
        advice = f"; its options are {', '.join(options)}"
    return InvalidRequest(f"{function}() has no option {name!r}{advice}", field=name)


def fork(
    tag: str, n: int, options: ForkOptions | NamedForkOptions, *, all_or_nothing: bool
) -> v2.SandboxCreate:
    """Return the request for a fork."""
    return build(
        v2.SandboxCreate, snapshot_tag=tag, n=n, all_or_nothing=all_or_nothing, **_wire(options)
    )


def branch(
    n: int,
    tag: str | None,
    options: BranchOptions,
    *,
    all_or_nothing: bool,
    wait: bool = True,
) -> v2_trees.BranchCreate:
    """Return the request for a branch."""
    return build(
        v2_trees.BranchCreate,
        n=n,
        tag=tag,
        wait=wait,
        all_or_nothing=all_or_nothing,
        **_wire(options),
    )


def _wire(options: ForkOptions | NamedForkOptions | BranchOptions) -> dict[str, Any]:
    """Return options under the names that they have on the wire."""
    members: dict[str, Any] = dict(options)
    members["deadline_secs"] = members.pop("deadline_s", None)
    members["ttl_secs"] = members.pop("ttl_s", None)
    if "idle_ttl_s" in members:
        members["idle_ttl_secs"] = members.pop("idle_ttl_s")
    for name in ("env", "labels"):
        if members.get(name) is not None:
            members[name] = dict(members[name])
    if isinstance(members.get("secrets"), tuple):
        members["secrets"] = list(members["secrets"])
    return members


def shell_lines(run: object) -> list[str]:
    """Return lines for a shell as a list.

    Raises:
        InvalidRequest: They are one string, whose characters would be lines.
    """
    if isinstance(run, str | bytes):
        raise InvalidRequest('run must be a list of lines, such as ["make"]', field="run")
    return [str(each) for each in run]  # type: ignore[attr-defined]  # Iterable, or TypeError


def as_base64(path: str) -> str:
    """Return the bytes of a path in base64.

    Raises:
        InvalidRequest: It has surrogates that stand for no byte.
    """
    try:
        return encoded(path)
    except UnicodeEncodeError:
        words = "path: holds a surrogate that stands for no byte"
        raise InvalidRequest(words, field="path") from None


def either(name: str, value: R | None, other_name: str, other: R | None) -> R | None:
    """Return an option that has two names.

    Raises:
        InvalidRequest: Both are given.
    """
    if value is not None and other is not None:
        raise InvalidRequest(
            f"{other_name} is another name of {name}; give one of them", field=other_name
        )
    return other if value is None else value


def program(args: object, more: tuple[str, ...] = ()) -> list[str]:
    """Return a program and its arguments as a list, given as one or as words.

    Raises:
        InvalidRequest: They are one string of several words, which would need a shell to be split.
    """
    if isinstance(args, str | bytes):
        if isinstance(args, str) and (more or not set(args) & set(" \t\n")):
            return [args, *(str(each) for each in more)]
        raise InvalidRequest(
            'exec() takes a program and its arguments, such as ["ls", "-l"] or "ls", "-l"; '
            'run("ls -l") has a shell read the line',
            field="args",
        )
    if more:
        raise InvalidRequest("exec() takes one list, or words, but not both", field="args")
    return [str(each) for each in args]  # type: ignore[attr-defined]  # Iterable, or TypeError


def shell(line: object) -> list[str]:
    """Return the program that has a shell read a line.

    Raises:
        InvalidRequest: It is no string.
    """
    if not isinstance(line, str):
        raise InvalidRequest(
            'run() takes a line for the shell, such as "ls | wc -l"; '
            'exec(["ls", "-l"]) runs a program without one',
            field="line",
        )
    return ["/bin/sh", "-c", line]
