"""`make bench`: measure in one go where KVM works, show the figures, keep them.

    python -m benchmarks [--quick] [--only PART,…] [--recipes NAME,…] [--recipe FOLDER]
                         [--possible-cpus N] [--output FILE]

Where this host's KVM runs a stock guest the measuring happens here, else in the helper machine.
The image is built here in either case.  What is written: `build/bench.json`, and beside it
plots of what was measured, `bench*.svg` and `bench*.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import pools, recipes, report, tuning
from benchmarks.run import APART, PARTS
from forkd import programs
from forkd.errors import EngineError, ForkdError, HostError, InvalidRequest
from forkd.machine import Machine
from forkd.machine.build import build_image
from forkd.machine.kernel import default_cache
from forkd.machine.lifecycle import why_not_native
from tools import gen_executor_times, gen_host_times, gen_recipe_times, in_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
FLOOR = "forkd-floor"

PLACE_HELPER = "helper machine"
WORK_HELPER = "/var/lib/forkd"
"""The helper machine's disk; its other folders are memory."""

console = Console(stderr=True, highlight=False)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure forkd.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and no thousand")
    parser.add_argument("--only", metavar="PART,…", help=f"of {', '.join((*PARTS, *APART))}")
    parser.add_argument(
        "--recipes",
        type=recipes.parse_names,
        default=recipes.everything(),
        metavar="NAME,…",
        help="of the part recipes, these alone; the others keep their figures",
    )
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "python-numpy")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench.json")
    parser.add_argument(
        "--possible-cpus", type=int, metavar="N",
        help="processors that the helper machine's kernel makes room for",
    )  # fmt: skip
    options = parser.parse_args()
    # A machine that was booted for this run ends with it, also if somebody ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        measured = recipes.folders(options.recipes) if of_recipes(options) else []
        bench = measure(
            [options.recipe.absolute(), *measured], chosen(options), options.possible_cpus
        )
    except ForkdError as error:
        console.print(f"error: {error} ({error.code})", markup=False)
        return 1
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(bench, indent=2) + "\n")
    report.show(bench)
    if of_recipes(options) and not options.quick:
        recipes.publish(bench, gen_recipe_times.FIGURES)
        console.print(f"written: {gen_recipe_times.FIGURES}; `make gen` makes a page of it")
    if "executor" in bench and not options.quick:
        pools.publish(bench, gen_executor_times.FIGURES)
        console.print(f"written: {gen_executor_times.FIGURES}; `make gen` makes tables of it")
    if "host" in bench and not options.quick:
        tuning.publish(bench, gen_host_times.FIGURES)
        console.print(f"written: {gen_host_times.FIGURES}; `make gen` makes a table of it")
    plots = report.plot(bench, options.output.parent)
    console.print(f"written: {options.output}, {', '.join(path.name for path in plots)}")
    return 0


def of_recipes(options: argparse.Namespace) -> bool:
    """Return whether recipes are measured."""
    return "recipes" in (options.only or "").split(",")


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the words that tell a run what to measure."""
    only = ["--only", options.only] if options.only else []
    names = ["--recipes", ",".join(options.recipes)]
    return [*only, *names, *(["--quick"] if options.quick else [])]


def measure(
    images: list[Path], chosen: list[str], possible_cpus: int | None = None
) -> dict[str, Any]:
    """Build the images of recipes, measure where KVM works, and return the figures.

    Args:
        images: The recipe that most parts are measured on, and others.
        chosen: What to measure.
        possible_cpus: For how many processors the helper machine's kernel makes room.

    Raises:
        InvalidRequest: So many processors are asked of this host, or of no kernel; this host
            is to be set otherwise, or more than that is asked for.
        ForkdError: Something is missing, or the measuring failed.
    """
    parts = chosen[1].split(",") if chosen[:1] == ["--only"] else []
    of_host = "host" in parts
    if of_host and len(parts) > 1:
        raise InvalidRequest("the part host is measured alone, in two machines", field="only")
    with _progress() as bar:
        for each in images:
            build_image(each, lambda step: bar.tell(step.message, None))
        bar.tell("looking for a usable KVM", None)
        reason = why_not_native()
        if of_host and reason is None:
            raise InvalidRequest(
                "the part host remounts cgroups: it is for the helper machine, and here the "
                "measuring is on this host",
                field="only",
            )
        if reason is None and possible_cpus is not None:
            raise InvalidRequest(
                "--possible-cpus is for the helper machine; here the measuring is on this host",
                field="possible-cpus",
            )
        if reason is None:
            place, work = "this host", tempfile.gettempdir()
        else:
            place, work = PLACE_HELPER, WORK_HELPER
        command = [*_command(images[0], place, work), *chosen]
        if reason is None:
            follower = _Follower(bar.tell)
            _run_here(command, follower)
            return follower.result()

        def run_in_helper(*, tuned: bool) -> dict[str, Any]:
            told = _Follower(bar.tell)
            boot = _helper(lambda text: bar.tell(text, None), possible_cpus, tuned=tuned)
            with boot as machine:
                _run_inside(machine, command, told)
            return told.result()

        if not of_host:
            return run_in_helper(tuned=True)
        return tuning.joined(run_in_helper(tuned=False), run_in_helper(tuned=True))


def _command(recipe: Path, place: str, work: str) -> list[str]:
    vmm, agent = programs.find(programs.VMM), programs.find(programs.AGENT)
    return [
        *(sys.executable, "-m", "benchmarks.run", "--place", place, "--work", work),
        *("--vmm", str(vmm), "--agent", str(agent), "--floor", str(find_floor(vmm))),
        *("--cache", str(default_cache()), "--recipe", str(recipe)),
    ]


def find_floor(vmm: Path) -> Path:
    """Return the floor program that was built with `vmm`.

    Raises:
        HostError: It is nowhere.
    """
    for folder in (vmm.resolve().parent, ROOT / "build" / "bin"):
        if (folder / FLOOR).is_file():
            return folder / FLOOR
    raise HostError(f"{FLOOR} is not built: `make build` makes it", program=FLOOR)


def _run_here(command: list[str], follower: _Follower) -> None:
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:  # noqa: S603 - ours
        for line in process.stdout or ():
            follower.feed(line)


def _run_inside(machine: Machine, command: list[str], follower: _Follower) -> None:
    in_machine.compile_sources()
    machine.run(["mount", "-t", "debugfs", "debugfs", "/sys/kernel/debug"])  # for guests' faults
    complaints = bytearray()
    machine.run(
        command,
        cwd=str(ROOT),
        env={"PATH": os.environ.get("PATH", os.defpath)},
        on_stdout=follower.feed,
        on_stderr=complaints.extend,
    )
    if complaints:
        console.print(complaints.decode(errors="replace"), markup=False)


@contextmanager
def _helper(
    tell: Callable[[str], object], possible_cpus: int | None = None, *, tuned: bool = True
) -> Iterator[Machine]:
    """Boot a machine that nothing else disturbs; it is gone afterwards, its disk too."""
    with tempfile.TemporaryDirectory(prefix="forkd-bench-machine-") as folder:
        config = in_machine.checkout_config()
        config = replace(config, possible_cpus=possible_cpus, tuned=tuned)
        machine = Machine.start(Path(folder), config, progress=tell)
        try:
            yield machine
        finally:
            machine.stop()


class _Follower:
    """Reads the events of a run, piece by piece."""

    def __init__(self, tell: Callable[[str, float | None], object]) -> None:
        self._tell = tell
        self._rest = b""
        self._last: dict[str, Any] = {}

    def feed(self, data: bytes) -> None:
        """Take what the run wrote."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._last = json.loads(line)
            if self._last["event"] == "progress":
                self._tell(self._last["message"], self._last.get("fraction"))

    def result(self) -> dict[str, Any]:
        """Return the figures.

        Raises:
            EngineError: The run ended without any.
        """
        match self._last:
            case {"event": "result", "bench": dict(bench)}:
                return bench
            case {"event": "failed", "message": str(message)}:
                raise EngineError(f"measuring failed: {message}")
        raise EngineError("measuring ended without a result; what it said is above")


@dataclass(frozen=True, slots=True)
class _Bar:
    """A progress bar, or lines where there is no terminal."""

    progress: Progress
    task: Any

    def tell(self, message: str, fraction: float | None) -> None:
        """Show that `message` has begun."""
        if not console.is_terminal:
            console.print(message, markup=False)
        elif fraction is None:
            self.progress.update(self.task, description=message)
        else:
            self.progress.update(self.task, description=message, total=1.0, completed=fraction)


@contextmanager
def _progress() -> Iterator[_Bar]:
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, progress.add_task("", total=None))


if __name__ == "__main__":
    sys.exit(main())
