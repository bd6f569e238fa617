"""`forkd fork`, `ls`, `inspect`, `limits`, `kill`, `logs`: sandboxes from outside."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from forkd.cli import complete, render, tables
from forkd.cli.context import EXIT_ERROR, shared
from forkd.cli.names import filters, pairs
from forkd.cli.options import (
    Bandwidth,
    Cpus,
    CpuWeight,
    Disk,
    Env,
    HoldEgress,
    Id,
    IdleTtl,
    Io,
    IoOps,
    Json,
    Label,
    Memory,
    Name,
    Network,
    NoTrunc,
    OfTag,
    Output,
    Pids,
    Secret,
    Tag,
    Ttl,
    WithLabel,
)
from forkd.cli.sandbox_info import COLUMNS, details, limits_shown, outcomes
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

    from forkd.cli.help_text import Commands
    from forkd.sdk import Sandbox
    from forkd.sdk._requests import ForkOptions, LimitOptions
    from forkd.wire.v2 import SandboxFailure

T = TypeVar("T")

Status = Literal["starting", "running", "paused", "stopping", "exited"]

KILLERS_MAX = 16
"""Sandboxes killed at once."""


def register(app: Commands) -> None:
    """Add the commands of this file."""
    for name, command in (
        ("fork", fork),
        ("ls", list_),
        ("ps", list_),
        ("inspect", inspect),
        ("limits", limits),
        ("kill", kill),
        ("rm", kill),
        ("logs", logs),
    ):
        app.command(name)(command)


def fork(  # noqa: PLR0913 - one for each option
    tag: Tag,
    n: Annotated[int, typer.Option("-n", "--n", metavar="N", help="Number of sandboxes.")] = 1,
    *,
    name: Name = None,
    label: Label = None,
    env: Env = None,
    network: Network = None,
    hold_egress: HoldEgress = False,
    secret: Secret = None,
    ttl: Ttl = None,
    idle_ttl: IdleTtl = None,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Fail at once if the snapshot is still being written.")
    ] = False,
    all_or_nothing: Annotated[
        bool, typer.Option("--all-or-nothing", help="If one fork fails, delete all of them.")
    ] = False,
    memory: Memory = None,
    disk: Disk = None,
    cpus: Cpus = None,
    cpu: Annotated[float | None, typer.Option("--cpu", hidden=True)] = None,
    cpu_weight: CpuWeight = None,
    pids: Pids = None,
    io: Io = None,
    io_ops: IoOps = None,
    bandwidth: Bandwidth = None,
    json: Json = False,
) -> None:
    """Start sandboxes from a snapshot and print their ids.

    Examples:
      forkd fork numpy
      forkd fork numpy -n 100 --memory 512m --ttl 1h --idle-ttl 5m
      forkd fork numpy --name db --label team=search -e MODE=test
      forkd fork numpy --network pypi.example.org:443 --network 192.0.2.0/24
    """
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
        "labels": pairs(label, "--label") or None,
        "env": pairs(env, "--env") or None,
        "ttl_s": ttl,
        "idle_ttl_s": idle_ttl,
        "wait": not no_wait,
    }
    if name is not None and n != 1:
        raise InvalidRequest(f"--name is for one sandbox, not for {n}", field="name")
    ready: Sequence[Sandbox]
    failed: list[SandboxFailure] = []
    with shared.client(as_json=json) as client:
        start = time.perf_counter()
        if name is not None:
            ready = [client.sandbox(tag, name=name, **options)]
        elif all_or_nothing:
            ready = client.fork(tag, n, **options)
        else:
            ready, failed = client.try_fork(tag, n, **options)
        wall_s = time.perf_counter() - start
    if json:
        render.document(outcomes(ready, failed))
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


def list_(  # noqa: PLR0913 - one for each filter
    tag: OfTag = None,
    *,
    label: WithLabel = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only the sandbox of this name.")
    ] = None,
    status: Annotated[Status | None, typer.Option(help="Only sandboxes in this state.")] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print whole ids and nothing else.")
    ] = False,
    no_trunc: NoTrunc = False,
    output: Output = None,
    json: Json = False,
) -> None:
    """List sandboxes.

    `forkd ps` is the same command.

    Examples:
      forkd ls
      forkd ls --tag numpy -o wide
      forkd ls --label team=search --status running
      forkd ls -q --tag numpy | xargs forkd kill
      forkd ls -o '{id} {snapshot_tag}'
    """
    form = tables.chosen(output, as_json=json)
    with shared.client(as_json=json) as client:
        wanted = client.sandboxes.list(tag, name=name, status=status, labels=filters(label))
        found = [each.info for each in wanted]
    if quiet:
        for each in found:
            typer.echo(each.id)
    else:
        tables.show(found, COLUMNS, form, whole_ids=no_trunc)


def inspect(
    sandbox: Id,
    *,
    output: Output = None,
    json: Json = False,
) -> None:
    """Describe one sandbox.

    Examples:
      forkd inspect sb-7q66th9abcde
      forkd inspect sb-7q66th9abcde -o '{guest_addr}'
    """
    form = tables.chosen(output, as_json=json)
    with shared.client(as_json=json) as client:
        found = client.sandboxes.get(sandbox).info
    tables.detail(found, details(found), form)


def limits(  # noqa: PLR0913 - one for each option
    sandbox: Id,
    *,
    memory: Memory = None,
    cpus: Cpus = None,
    cpu_weight: CpuWeight = None,
    pids: Pids = None,
    io: Io = None,
    io_ops: IoOps = None,
    bandwidth: Bandwidth = None,
    json: Json = False,
) -> None:
    """Show or change the limits of a running sandbox.

    With options it changes these limits at once and shows them all.

    Examples:
      forkd limits sb-7q66th9abcde
      forkd limits sb-7q66th9abcde --memory 1g --cpus 0.5
    """
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
        render.document(found.info)
    else:
        form = tables.Format()
        tables.detail(found.info, limits_shown(found.info) or [("Limits", "none")], form)


def kill(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SANDBOX",
            help="Sandboxes: their ids, beginnings of ids, or names.",
            autocompletion=complete.sandboxes,
        ),
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option(
            metavar="TAG",
            help="All sandboxes of this snapshot.",
            autocompletion=complete.snapshots,
        ),
    ] = None,
    *,
    all_: Annotated[bool, typer.Option("--all", help="All sandboxes.")] = False,
    json: Json = False,
) -> None:
    """Delete sandboxes, with their memory and disks.

    The id of each sandbox that was deleted is printed.  `forkd rm` is the same command.

    Examples:
      forkd kill sb-7q66th9abcde
      forkd kill --tag numpy
      forkd kill --all
    """
    if bool(ids) + bool(tag) + all_ != 1:
        raise InvalidRequest("name sandboxes: by SANDBOX, by --tag TAG or by --all", field="ids")
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
        for name in killed:
            typer.echo(name)
        for name, error in failed.items():
            render.note(f"{name} not killed: {error} ({error.code})")
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
    """Print a sandbox's console log.

    Examples:
      forkd logs sb-7q66th9abcde
      forkd logs -f sb-7q66th9abcde
    """
    with shared.client(as_json=json) as client:
        found = client.sandboxes.get(sandbox)
        if json:
            render.document({"id": found.id, "log": found.logs().decode(errors="replace")})
            return
        for piece in found.follow_logs() if follow else [found.logs()]:
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
