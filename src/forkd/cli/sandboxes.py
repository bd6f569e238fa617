"""`forkd fork`, `ls`, `limits`, `kill`, `logs`: sandboxes from outside."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from forkd.cli import render
from forkd.cli.context import EXIT_ERROR, Json, shared
from forkd.errors import (
    Denied,
    Forbidden,
    ForkdError,
    InvalidRequest,
    NotFound,
    TransportError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from forkd.sdk import Sandbox
    from forkd.sdk._requests import ForkOptions, LimitOptions
    from forkd.wire.v2 import SandboxFailure, SandboxInfo

T = TypeVar("T")

KILLERS_MAX = 16
"""Sandboxes killed at once."""

Id = Annotated[str, typer.Argument(help="Id of a sandbox.", show_default=False)]


CpuWeight = Annotated[
    int | None,
    typer.Option(help="Share of CPU time relative to other sandboxes, 1 to 10000 (default: 100)."),
]
Pids = Annotated[int | None, typer.Option(help="Limit of the VMM process's threads on the host.")]
Io = Annotated[int | None, typer.Option(help="Limit of disk reads, and of writes, in MiB/s.")]
IoOps = Annotated[int | None, typer.Option(help="Limit of disk operations per second, each way.")]
Bandwidth = Annotated[
    int | None, typer.Option(help="Limit of a sandbox's network, each way, in Mbit/s.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    for name, command in (
        ("fork", fork),
        ("ls", list_),
        ("limits", limits),
        ("kill", kill),
        ("logs", logs),
    ):
        app.command(name)(command)


def fork(  # noqa: PLR0913 - one for each option
    tag: Annotated[str, typer.Argument(help="Name of a snapshot.", show_default=False)],
    n: Annotated[int, typer.Option("-n", "--n", help="Number of sandboxes.")] = 1,
    *,
    memory: Annotated[int | None, typer.Option(help="Memory limit of each, in MiB.")] = None,
    disk: Annotated[int | None, typer.Option(help="Limit of each private disk, in MiB.")] = None,
    cpus: Annotated[float | None, typer.Option(help="CPU limit of each, in cores.")] = None,
    cpu: Annotated[float | None, typer.Option("--cpu", hidden=True)] = None,
    cpu_weight: CpuWeight = None,
    pids: Pids = None,
    io: Io = None,
    io_ops: IoOps = None,
    bandwidth: Bandwidth = None,
    network: Annotated[
        list[str] | None,
        typer.Option(
            help="What each may reach: none, internet, host, deny-all, or a rule such as "
            "example.com:443 or 192.0.2.0/24:80,443/tcp; may be repeated."
        ),
    ] = None,
    hold_egress: Annotated[
        bool,
        typer.Option(
            "--hold-egress",
            help="Refuse all of each one's connections until `forkd network --release`.",
        ),
    ] = False,
    secret: Annotated[
        list[str] | None,
        typer.Option(help="Secret that each may use (see `forkd secret`); may be repeated."),
    ] = None,
    ttl: Annotated[float | None, typer.Option(help="Delete each after this many seconds.")] = None,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Fail at once if the snapshot is still being written.")
    ] = False,
    all_or_nothing: Annotated[
        bool, typer.Option("--all-or-nothing", help="If one fork fails, delete all of them.")
    ] = False,
    json: Json = False,
) -> None:
    """Fork sandboxes from a snapshot; their ids are printed, one a line."""
    options: ForkOptions = {
        "memory_limit_mib": memory,
        "disk_limit_mib": disk,
        "cpu_limit": cpu if cpus is None else cpus,
        "cpu_weight": cpu_weight,
        "pids_limit": pids,
        "io_limit_mib_s": io,
        "io_limit_ops": io_ops,
        "bandwidth_limit_mbit": bandwidth,
        "network": network or None,
        "hold_egress": hold_egress,
        "secrets": secret or None,
        "ttl_s": ttl,
        "wait": not no_wait,
    }
    failed: list[SandboxFailure] = []
    with shared.client(as_json=json) as client:
        start = time.perf_counter()
        if all_or_nothing:
            ready = client.fork(tag, n, **options)
        else:
            ready, failed = client.try_fork(tag, n, **options)
        wall_s = time.perf_counter() - start
    if json:
        render.document([*(each.info for each in ready), *failed])
    else:
        _show_fork(ready, failed, wall_s)
    if failed:
        raise typer.Exit(EXIT_ERROR)


def _show_fork(ready: Sequence[Sandbox], failed: Sequence[SandboxFailure], wall_s: float) -> None:
    for each in ready:
        typer.echo(each.id)
    for failure in failed:
        render.note(f"{failure.id} failed in {failure.stage}: {failure.error} ({failure.code})")
    times = [each.info.fork_ms.total for each in ready if each.info.fork_ms is not None]
    typical = f", {statistics.median(times):.1f} ms each (median)" if times else ""
    render.note(f"{len(ready)} ready, {len(failed)} failed in {wall_s:.2f} s{typical}")


def list_(
    tag: Annotated[str | None, typer.Option(help="Only sandboxes of this snapshot.")] = None,
    *,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print ids only.")] = False,
    json: Json = False,
) -> None:
    """List sandboxes."""
    with shared.client(as_json=json) as client:
        found = [each.info for each in client.sandboxes.list(tag)]
    if json:
        render.document(found)
    elif quiet:
        for each in found:
            typer.echo(each.id)
    else:
        columns = ("id", "snapshot", "status", "pid", "address", "limits", "age", "ended by")
        rows = [
            (
                each.id,
                each.snapshot_tag,
                each.status,
                each.pid,
                each.guest_addr,
                _limits(each),
                render.age(each.created_at_unix),
                each.exit_reason,
            )
            for each in found
        ]
        render.table(columns, rows)


def limits(  # noqa: PLR0913 - one for each option
    sandbox: Id,
    *,
    memory: Annotated[int | None, typer.Option(help="Limit of memory, in MiB.")] = None,
    cpus: Annotated[float | None, typer.Option(help="Limit of CPU time, in cores.")] = None,
    cpu_weight: CpuWeight = None,
    pids: Pids = None,
    io: Io = None,
    io_ops: IoOps = None,
    bandwidth: Bandwidth = None,
    json: Json = False,
) -> None:
    """Show the limits of a sandbox; with options, change them while it runs."""
    asked: LimitOptions = {
        "memory_limit_mib": memory,
        "cpu_limit": cpus,
        "cpu_weight": cpu_weight,
        "pids_limit": pids,
        "io_limit_mib_s": io,
        "io_limit_ops": io_ops,
        "bandwidth_limit_mbit": bandwidth,
    }
    with shared.client(as_json=json) as client:
        found = client.sandboxes.get(sandbox)
        if any(limit is not None for limit in asked.values()):
            found.set_limits(**asked)
    if json:
        render.document(found.info.model_dump(mode="json"))
    else:
        typer.echo(_limits(found.info) or "none")


def _limits(sandbox: SandboxInfo) -> str | None:
    """Return a sandbox's limits in a few words; None if it has none."""
    limits = (
        (sandbox.memory_limit_mib, "{} MiB memory"),
        (sandbox.disk_limit_mib, "{} MiB disk"),
        (sandbox.cpu_limit, "{:g} CPUs"),
        (sandbox.cpu_weight, "CPU weight {}"),
        (sandbox.pids_limit, "{} threads"),
        (sandbox.io_limit_mib_s, "{} MiB/s disk"),
        (sandbox.io_limit_ops, "{} disk operations/s"),
        (sandbox.bandwidth_limit_mbit, "{} Mbit/s"),
    )
    return ", ".join(words.format(limit) for limit, words in limits if limit is not None) or None


def kill(
    ids: Annotated[list[str] | None, typer.Argument(help="Ids of sandboxes.")] = None,
    tag: Annotated[str | None, typer.Option(help="All sandboxes of this snapshot.")] = None,
    *,
    all_: Annotated[bool, typer.Option("--all", help="All sandboxes.")] = False,
    json: Json = False,
) -> None:
    """Delete sandboxes, with their memory and disks."""
    if bool(ids) + bool(tag) + all_ != 1:
        raise InvalidRequest("name sandboxes by ids, by --tag TAG or by --all", field="ids")
    with shared.client(as_json=json) as client:
        missing: dict[str, ForkdError] = {}
        if ids:
            named, missing = at_once(client.sandboxes.get, ids)
            chosen = list(named.values())
        else:
            chosen = client.sandboxes.list(tag)
        killed, failed = kill_each(chosen)
    failed = {**missing, **failed}
    if json:
        members = [{"id": name, **render.error_members(error)} for name, error in failed.items()]
        render.document({"killed": killed, "failed": members})
    else:
        for name, error in failed.items():
            render.note(f"{name} not killed: {error} ({error.code})")
        if not ids:
            render.note(f"{len(killed)} killed")
    if failed:
        raise typer.Exit(EXIT_ERROR)


def kill_each(chosen: Iterable[Sandbox]) -> tuple[list[str], dict[str, ForkdError]]:
    """Kill sandboxes; return the ids of those killed, and why others were not."""
    by_id = {each.id: each for each in chosen}

    def end(id_: str) -> None:
        with contextlib.suppress(NotFound):  # it is gone by now
            by_id[id_].kill()

    ended, failed = at_once(end, by_id)
    return list(ended), failed


def at_once(
    work: Callable[[str], T], names: Iterable[str]
) -> tuple[dict[str, T], dict[str, ForkdError]]:
    """Do `work` for each name, several at a time; return results and errors by name.

    Raises:
        TransportError, Denied, Forbidden: What concerns all of them.
    """
    results: dict[str, T] = {}
    errors: dict[str, ForkdError] = {}
    with ThreadPoolExecutor(KILLERS_MAX) as pool:
        doing = {name: pool.submit(work, name) for name in dict.fromkeys(names)}
    for name, future in doing.items():
        try:
            results[name] = future.result()
        except (TransportError, Denied, Forbidden):
            raise
        except ForkdError as error:
            errors[name] = error
    return results, errors


def logs(
    sandbox: Id,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until the sandbox ends.")
    ] = False,
    json: Json = False,
) -> None:
    """Print the guest's console log."""
    with shared.client(as_json=json) as client:
        found = client.sandboxes.get(sandbox)
        if json:
            render.document({"id": found.id, "log": found.logs().decode(errors="replace")})
            return
        for piece in found.follow_logs() if follow else [found.logs()]:
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
