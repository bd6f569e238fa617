"""Options and arguments that several commands take, so that each is the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

from forkd.cli import complete
from forkd.cli.names import network_rule
from forkd.cli.units import duration, rate_mbit, size_mib, time_to_live

LIMITS = "Limits"
"""The section of the help that has what a sandbox may take of its host."""

Url = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Address of the daemon: http[s]://HOST:PORT or unix:///PATH (FORKD_URL unless set).",
    ),
]
Token = Annotated[
    str | None, typer.Option(metavar="TOKEN", help="Bearer token (FORKD_TOKEN unless set).")
]
ContextName = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="NAME",
        help="A daemon by its name; see `forkd context`.",
        autocompletion=complete.contexts,
    ),
]
CaFile = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="CA certificates that verify the daemon's (FORKD_CA_FILE unless set).",
    ),
]

Id = Annotated[
    str,
    typer.Argument(
        metavar="SANDBOX",
        help="A sandbox: its id, the beginning of its id, or its name.",
        autocompletion=complete.sandboxes,
    ),
]
Ids = Annotated[
    list[str],
    typer.Argument(
        metavar="SANDBOX",
        help="Sandboxes: their ids, beginnings of ids, or names.",
        autocompletion=complete.sandboxes,
    ),
]
Tag = Annotated[
    str,
    typer.Argument(
        metavar="TAG", help="The name of a snapshot.", autocompletion=complete.snapshots
    ),
]
NewTag = Annotated[str, typer.Argument(metavar="TAG", help="The new snapshot's name.")]
Tags = Annotated[
    list[str],
    typer.Argument(
        metavar="TAG", help="The names of snapshots.", autocompletion=complete.snapshots
    ),
]
OfTag = Annotated[
    str | None,
    typer.Option(
        "--tag",
        metavar="TAG",
        help="Only sandboxes of this snapshot.",
        autocompletion=complete.snapshots,
    ),
]

Ttl = Annotated[
    float | None,
    typer.Option(
        "--ttl",
        metavar="DURATION",
        parser=time_to_live,
        help="End each sandbox after this time (never unless set); `default` is the daemon's "
        "default.",
    ),
]
IdleTtl = Annotated[
    float | None,
    typer.Option(
        "--idle-ttl",
        metavar="DURATION",
        parser=duration,
        help="End each sandbox once nobody has used it for this time (never unless set).",
    ),
]
Name = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="A name for the sandbox, beside its id."),
]
Label = Annotated[
    list[str] | None,
    typer.Option("--label", "-l", metavar="KEY=VALUE", help="Label each sandbox."),
]
WithLabel = Annotated[
    list[str] | None,
    typer.Option(
        "--label", "-l", metavar="KEY[=VALUE]", help="Only sandboxes that have this label."
    ),
]
Memory = Annotated[
    int | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        parser=size_mib,
        rich_help_panel=LIMITS,
        help="Memory limit per sandbox (MiB without a unit).",
    ),
]
Disk = Annotated[
    int | None,
    typer.Option(
        "--disk",
        metavar="SIZE",
        parser=size_mib,
        rich_help_panel=LIMITS,
        help="Limit of each private disk (MiB without a unit).",
    ),
]
Cpus = Annotated[
    float | None,
    typer.Option("--cpus", rich_help_panel=LIMITS, help="CPU limit per sandbox, in cores."),
]
CpuWeight = Annotated[
    int | None,
    typer.Option(
        "--cpu-weight",
        rich_help_panel=LIMITS,
        help="Share of CPU time relative to other sandboxes, 1 to 10000 (100 unless set).",
    ),
]
Pids = Annotated[
    int | None,
    typer.Option(
        "--pids",
        rich_help_panel=LIMITS,
        help="Maximum host threads of the sandbox's VM process (not guest processes).",
    ),
]
Io = Annotated[
    int | None,
    typer.Option(
        "--io",
        metavar="SIZE",
        parser=size_mib,
        rich_help_panel=LIMITS,
        help="Disk bandwidth limit per direction and second (MiB without a unit).",
    ),
]
IoOps = Annotated[
    int | None,
    typer.Option(
        "--io-ops",
        rich_help_panel=LIMITS,
        help="Disk operations per second and direction.",
    ),
]
Bandwidth = Annotated[
    int | None,
    typer.Option(
        "--bandwidth",
        metavar="RATE",
        parser=rate_mbit,
        rich_help_panel=LIMITS,
        help="Network bandwidth limit per direction (Mbit/s without a unit).",
    ),
]
Network = Annotated[
    list[str] | None,
    typer.Option(
        "--network",
        metavar="RULE",
        parser=network_rule,
        help="What each sandbox may reach: none, internet, host, deny-all, or a rule such as "
        "example.com:443 or 192.0.2.0/24:80,443/tcp.",
    ),
]
HoldEgress = Annotated[
    bool,
    typer.Option(
        "--hold-egress",
        help="Start with all egress blocked; lift the block with "
        "`forkd network SANDBOX --release`.",
    ),
]
Secret = Annotated[
    list[str] | None,
    typer.Option(
        "--secret",
        metavar="NAME",
        help="A secret that each sandbox may use; see `forkd secret`.",
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="NAME=VALUE", help="Set an environment variable."),
]
Cwd = Annotated[
    str | None, typer.Option("--cwd", "-w", metavar="PATH", help="Directory to run in.")
]
User = Annotated[
    str | None,
    typer.Option("--user", "-u", metavar="USER", help="User to run as: a name, or UID[:GID]."),
]
Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe's name, folder or TOML file.",
        autocompletion=complete.recipes,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FORMAT",
        help="wide, json, jsonl (one document per line), or a template such as '{id} {status}'.",
        autocompletion=complete.formats,
    ),
]
NoTrunc = Annotated[
    bool, typer.Option("--no-trunc", help="Print ids whole instead of 12 characters.")
]
