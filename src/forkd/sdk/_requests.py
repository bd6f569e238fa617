"""Requests, checked before they travel: the wire's own types refuse what the daemon would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from pydantic import ValidationError

from forkd.errors import InvalidRequest
from forkd.wire import v2, v2_trees
from forkd.wire.text import encoded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

M = TypeVar("M", bound="BaseModel")


class ForkOptions(TypedDict, total=False):
    """What each sandbox of one fork gets; what is left out is not limited.

    Attributes:
        memory_limit_mib: Memory of each sandbox, its VMM included; no swap.
        disk_limit_mib: Limit of each sandbox's private disk layer; None for the host's.
        cpu_limit: CPU time of each sandbox, in cores.
        cpu_weight: Share of CPU time of each, beside other sandboxes; 100 if None.
        pids_limit: Threads of each sandbox's process on the host, not of its guest.
        io_limit_mib_s: What each reads, and what it writes, of its disk, in MiB a second.
        io_limit_ops: Operations of each on its disk, each way, in a second.
        bandwidth_limit_mbit: What goes over each sandbox's network, each way, in millions of bits a
            second.
        network: What each may reach: "none", "internet", "host", "deny-all", or rules such as
            `["example.com:443", "192.0.2.0/24:80,443/tcp"]`; True for "host".
        hold_egress: Whether each may reach nothing until that is changed.
        secrets: Names of secrets that each uses: the host puts them into its requests.
        deadline_s: Time each has until its agent has answered.
        ttl_s: Each is ended after this time.
        wait: Wait for a snapshot that is being written, instead of raising `Conflict`.
    """

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
    secrets: list[str] | None
    deadline_s: float | None
    ttl_s: float | None
    wait: bool


class LimitOptions(TypedDict, total=False):
    """What a running sandbox may take of its host; what is left out, or None, stays as it is.

    Attributes:
        memory_limit_mib: As of `ForkOptions`.
        cpu_limit: As of `ForkOptions`.
        cpu_weight: As of `ForkOptions`.
        pids_limit: As of `ForkOptions`.
        io_limit_mib_s: As of `ForkOptions`.
        io_limit_ops: As of `ForkOptions`.
        bandwidth_limit_mbit: As of `ForkOptions`, for one that has a network.
    """

    memory_limit_mib: int | None
    cpu_limit: float | None
    cpu_weight: int | None
    pids_limit: int | None
    io_limit_mib_s: int | None
    io_limit_ops: int | None
    bandwidth_limit_mbit: int | None


class BranchOptions(TypedDict, total=False):
    """How siblings of a running sandbox are made; they have the limits and network it has.

    Attributes:
        deadline_s: Time each has until its agent has answered.
        ttl_s: Each is ended after this time.
        network: What each may reach, if not what the source may, as of a fork.
        hold_egress: Whether each may reach nothing until it is promoted.
    """

    deadline_s: float | None
    ttl_s: float | None
    network: bool | str | list[str] | None
    hold_egress: bool


class ExecOptions(TypedDict, total=False):
    """How a program runs; what is left out is as the image says.

    Attributes:
        env: Variables added to the image's.
        cwd: Where it starts.
        user: Who it runs as: a name, or `uid[:gid]`.
    """

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
        field = ".".join(str(part) for part in first["loc"]) or "request"
        raise InvalidRequest(f"{field}: {first['msg']}", field=field) from None


def fork(tag: str, n: int, options: ForkOptions, *, all_or_nothing: bool) -> v2.SandboxCreate:
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


def _wire(options: ForkOptions | BranchOptions) -> dict[str, Any]:
    """Return options under the names that they have on the wire."""
    members: dict[str, Any] = dict(options)
    members["deadline_secs"] = members.pop("deadline_s", None)
    members["ttl_secs"] = members.pop("ttl_s", None)
    return members


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


def program(args: object) -> list[str]:
    """Return the arguments of a program as a list.

    Raises:
        InvalidRequest: They are one string, which would need a shell to be split.
    """
    if isinstance(args, str | bytes):
        raise InvalidRequest(
            'args must be a list, such as ["ls", "-l"]; for a shell: ["sh", "-c", "ls | wc"]',
            field="args",
        )
    return [str(each) for each in args]  # type: ignore[attr-defined]  # Iterable, or TypeError
