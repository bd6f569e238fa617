"""The VMM processes of a daemon: those that live in its run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.engine.process import CONFIG_OPTION
from forkd.host import proc
from forkd.service import seeds

if TYPE_CHECKING:
    from pathlib import Path


def of(run_dir: Path) -> set[int]:
    """Return machines, zygotes, and whatever else is there.

    A retired seed belongs to the machines that go back to it, and is here only when there is
    none of these left.  It ends by itself then, so whoever counts may have to wait.
    """
    pids = {pid for pid in proc.processes() if proc.has_option_below(pid, CONFIG_OPTION, run_dir)}
    return pids - seeds.retired_for(pids)
