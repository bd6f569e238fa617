"""Put what settings of a host are worth to forks into the page about forks, from a run's figures.

    python -m tools.gen         writes it, with everything else that is generated

`make bench ARGS="--only host"` measures, and writes `docs/assets/host-times.json`.
"""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

from tools.gen_executor_times import ROOT, with_part

if TYPE_CHECKING:
    from pathlib import Path

FIGURES = ROOT / "docs/assets/host-times.json"
PAGE = ROOT / "docs/explanation/spawn.md"

BEGIN = "<!-- Begin of what tools/gen_host_times.py generates - do not edit -->\n"
END = "<!-- End of what tools/gen_host_times.py generates -->\n"

SETTINGS = (
    ("as distributions set it", "plain"),
    ("cgroups with `favordynmods`", "favordynmods"),
    ("`KVM_PRE_FAULT_MEMORY`", "prefault"),
    ("`favordynmods` and `KVM_PRE_FAULT_MEMORY`", "favordynmods_prefault"),
    ("`kvm.nx_huge_pages=never`", "never"),
    ("`never` and `KVM_PRE_FAULT_MEMORY`", "never_prefault"),
)
"""The rows, and the setting of each."""

MACHINE = (
    "Medians; in brackets the quarters below and above. Machine: {place}, {cpus}, Linux {kernel}, "
    "{day}; {rounds} rounds in which the settings take turns, those with `never` in a second "
    "machine after the first, by "
    '`FORKD_MACHINE_KERNEL=6.12 make bench ARGS="--only host"`. The helper machine emulates its '
    "processor: **compare the figures with each other, not with your host**."
)

PROSE_CHARS_MAX = 120
"""Where lines of pages are wrapped."""


def outputs() -> dict[Path, str]:
    """Return the page with its contents; nothing before the first measurement."""
    if not FIGURES.exists():
        return {}
    measured = json.loads(FIGURES.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    return {PAGE: with_part(page, table(measured), BEGIN, END)}


def table(measured: dict[str, Any]) -> str:
    """Return the table, and what it was measured on."""
    host = measured["host"]
    lines = [
        "| setting | one fork | | 100 forks | | page faults until the agent answers |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    plain = host["settings"]["plain"]
    for words, name in SETTINGS:
        each = host["settings"][name]
        cells = [words]
        for figure in ("one_ms", "hundred_ms"):
            ratio = each[figure]["p50"] / plain[figure]["p50"]
            cells += [ms(each[figure]), "" if name == "plain" else f"{ratio:.2f}"]
        cells.append("" if each["guest_faults"] is None else f"{each['guest_faults']:,}")
        lines.append(f"| {' | '.join(cells)} |")
    day = measured["started_at"].partition("T")[0]
    cpus = f"{measured['cpus']} CPU{'' if measured['cpus'] == 1 else 's'}"
    said = MACHINE.format(
        place=measured["place"], cpus=cpus, kernel=measured["kernel"], day=day,
        rounds=host["rounds"],
    )  # fmt: skip
    prose = textwrap.fill(said, PROSE_CHARS_MAX, break_on_hyphens=False, break_long_words=False)
    return "\n".join([*lines, "", prose, ""])


def ms(found: dict[str, float]) -> str:
    """Return a median with its quarters in words."""
    return f"{found['p50']:,.0f} ms ({found['p25']:,.0f} to {found['p75']:,.0f})"
