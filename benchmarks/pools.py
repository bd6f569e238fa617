"""What forks cost beside processes, for tasks and for tests: the part `executor`.

`executor` and `testing` measure; this serves a daemon for them, and keeps what the documentation
shows.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks import executor, testing
from benchmarks.clients import served
from forkd.host import proc

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.harness import Json
    from benchmarks.teller import Teller
    from forkd.model.ids import Tag
    from forkd.service.settings import HostSettings

STEPS = executor.STEPS + testing.STEPS


def measure(host: HostSettings, tag: Tag, teller: Teller, *, quick: bool) -> Json:
    """Serve a host on which there is a snapshot, measure, and return the figures.

    Raises:
        EngineError: The daemon did not start, or a run of tests failed.
    """
    proc.raise_open_files_limit()
    with served(host) as (_, socket, _):
        url = f"unix://{socket}"
        rounds = executor.ROUNDS_QUICK if quick else executor.ROUNDS
        tasks = {**executor.measured(tag, url, rounds, teller.begin), "rounds": rounds}
        rounds = testing.ROUNDS_QUICK if quick else testing.ROUNDS
        tests = testing.measure(tag, url, rounds, teller.begin)
    return {"executor": tasks, "testing": tests}


def publish(bench: Json, path: Path) -> None:
    """Write the figures of a run to the file that pages of the documentation are made of."""
    machine = bench["machine"]
    kept = {
        "cpus": machine["cpus"],
        "place": machine["place"],
        "started_at": bench["started_at"],
        "executor": bench["executor"],
        "testing": bench["testing"],
    }
    path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")
