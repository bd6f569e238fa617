"""Measures one part of the benchmark over the fake VMM of the tests, here, without any KVM."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import bed, report
from benchmarks.harness import Json, machine
from benchmarks.teller import Teller
from tests.support.service_host import make_host

if TYPE_CHECKING:
    from typing import Protocol

    from forkd.model.ids import Tag
    from forkd.service.settings import HostSettings

    class Measure(Protocol):
        """What measures a part."""

        async def __call__(
            self, host: HostSettings, tag: Tag, teller: Teller, *, quick: bool
        ) -> Json:
            """Serve a host on which there is a snapshot, measure, and return the figures."""


def main(part: str, about: str | None, measure: Measure, steps: tuple[int, int]) -> int:
    """Measure over the fake VMM, and show the figures; the program of a part.

    Args:
        part: What it is called.
        about: What its help says.
        measure: Measures it.
        steps: How many steps are told: in full, and if it is to be quick.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{part}", description=about)
    parser.add_argument("--quick", action="store_true", help="measure less")
    quick = parser.parse_args().quick
    figures = asyncio.run(_measured(measure, Teller(steps[quick]), quick=quick))
    said = {"machine": machine("this host, over the fake VMM"), part: figures}
    sys.stdout.write(json.dumps(said) + "\n")
    report.show(said)
    return 0


async def _measured(measure: Measure, teller: Teller, *, quick: bool) -> Json:
    with (
        tempfile.TemporaryDirectory(prefix="fkc-", dir="/tmp") as run_dir,
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
    ):
        host = make_host(Path(folder), Path(run_dir))
        await bed.bake(host.settings, host.recipe(), lambda _: None)
        return await measure(host.settings, bed.TAG, teller, quick=quick)
