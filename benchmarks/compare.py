"""Compare two builds, A and B, on one machine in one run: `python -m benchmarks.compare --help`.

Each build bakes its own snapshot; then forks of A and of B take turns, so that whatever else
the machine does hits both.  Printed are the median and the 99th percentile of each, and how B
relates to A.  In the helper machine:

    tools/in-machine .venv/bin/python -m benchmarks.compare old/bin new/bin --work /var/lib/forkd
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks import bed, questions
from benchmarks.harness import quantile
from forkd import programs
from forkd.errors import ForkdError
from forkd.host import proc
from forkd.machine.kernel import default_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent

Samples = dict[str, list[float]]

console = Console(highlight=False)


async def compare(options: argparse.Namespace) -> tuple[Samples, Samples]:
    """Measure both builds in turns; return the samples of A and of B.

    Raises:
        ForkdError: A build could not be measured.
    """
    proc.raise_open_files_limit()
    samples: tuple[Samples, Samples] = ({}, {})
    async with contextlib.AsyncExitStack() as stack:
        beds = []
        for folder in (options.a, options.b):
            console.print(f"baking with {folder}", markup=False)
            built = bed.Programs(folder / programs.VMM, folder / programs.AGENT, Path())
            host = stack.enter_context(bed.settings(built, options.cache, options.work))
            baked = await bed.bake(host, options.recipe, lambda _: None)
            beds.append(await stack.enter_async_context(bed.zygote(baked)))
        for number in range(options.repeat + 1):
            console.print(f"round {number} of {options.repeat}")
            for one, kept in zip(beds, samples, strict=True):
                taken = await measure(one, options.n)
                if number > 0:  # the first round is cold
                    for name, values in taken.items():
                        kept.setdefault(name, []).extend(values)
    return samples


async def measure(one: bed.Bed, n: int) -> Samples:
    """Fork `n` children twice, and return what took how long, in milliseconds."""
    async with one.fork(n) as herd:
        answered = herd.answered_ms
        trips = await questions.round_trips(herd.children[0].guest, rounds=20)
    async with one.fork(n, questions.numpy) as herd:
        first = [child.asked_ms or 0.0 for child in herd.children]
    return {
        f"{n} answered": [answered],
        "first eval": first,
        "eval": [trips["eval"]["p50_ms"]],
        "exec": [trips["exec"]["p50_ms"]],
    }


def show(a: Samples, b: Samples) -> None:
    """Print both, and their ratios."""
    table = Table()
    for name in ("ms", "A p50", "A p99", "B p50", "B p99", "B : A, p50"):
        table.add_column(name, justify="left" if name == "ms" else "right")
    for name, values in a.items():
        cells = [quantile(v, percent) for v in (values, b[name]) for percent in (50, 99)]
        table.add_row(name, *(f"{cell:.2f}" for cell in cells), f"{cells[2] / cells[0]:.3f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("a", type=Path, help="folder with forkd-vmm and forkd-agent")
    parser.add_argument("b", type=Path, help="the other one")
    parser.add_argument("-n", type=int, default=10, help="children of one fork")
    parser.add_argument("--repeat", type=int, default=10, help="rounds, after a cold one")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "python-numpy")
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--work", type=Path, default=Path("/var/lib/forkd"))
    options = parser.parse_args(arguments)
    for name in ("a", "b", "recipe"):
        setattr(options, name, getattr(options, name).absolute())
    try:
        show(*asyncio.run(compare(options)))
    except ForkdError as error:
        console.print(f"error: {error} ({error.code})", markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
