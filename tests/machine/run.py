"""Run pytest in the helper machine, where there is a real KVM.

    python -m tests.machine.run [--fresh | --claims FOLDER --sharers N] [--junit FILE] [pytest's …]

The same command as on the host, on the same read-only checkout, except that an
unmet need fails a test.  The images that tests boot are built first, out here, where
the network is.  Output streams; the exit status is pytest's; the JUnit file is brought
back.  Without `--fresh` or `--claims` the development machine is used.

With `--claims` this is one of N machines that share the tests among them, by a folder that all see
(`tests.machine.claims`), and the memory of one.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import uuid
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from forkd.errors import BuildError, ForkdError
from forkd.machine import Machine, Share
from forkd.machine.build import build_image
from tests.machine import recipes
from tests.support import container_image
from tests.support.real_host import RECIPES, SOAK_RECIPES
from tools import in_machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TEST_TIMEOUT_S = 300
"""Deadline of one test inside: five times the one outside, for an emulated processor."""

CLAIMS = "/host/claims"
"""Where a machine sees the folder of the claims."""

STRICT = (
    "--strict-needs",
    "--waive-needs",
    "network,invariant-tsc,pre-fault",
    "-p",
    "no:cacheprovider",
)


def main() -> int:
    """Run pytest inside; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--fresh", action="store_true", help="boot a machine for this run alone")
    where.add_argument("--claims", type=Path, help="so, and run what no other machine has claimed")
    parser.add_argument("--sharers", type=int, default=1, help="machines that share the memory")
    parser.add_argument("--cpus", type=int, help="of a machine for this run alone")
    parser.add_argument("--possible-cpus", type=int, help="that its kernel makes room for")
    parser.add_argument("--junit", type=Path, help="where the JUnit file goes")
    options, pytest_arguments = parser.parse_known_args()
    if not options.fresh and {options.cpus, options.possible_cpus} != {None}:
        parser.error("--cpus and --possible-cpus are for a machine of --fresh")
    # A machine that was booted for this run ends with it, also if somebody ends us.
    signal.signal(signal.SIGTERM, end)
    try:
        build_images(needed_images(pytest_arguments))
        in_machine.compile_sources()
        with chosen_machine(options) as machine:
            if options.claims is not None:
                pytest_arguments += ["-p", "tests.machine.claims", f"--claims={CLAIMS}"]
            return run_pytest(machine, pytest_arguments, options.junit)
    except ForkdError as error:
        in_machine.say(f"error: {error} ({error.code})")
        return 125


def end(number: int, _: object) -> NoReturn:
    """Leave by way of whoever cleans up, whom a second signal must not interrupt."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


@dataclass(frozen=True, slots=True)
class Images:
    """What is built before the machine boots.

    Attributes:
        recipes: Whose images.
        container: Whether the container image is among it.
    """

    recipes: Iterable[Path]
    container: bool = False


def needed_images(pytest_arguments: list[str]) -> Images:
    """Return the images that tests need: in a soak those of the tests that are selected alone."""
    if not {"--soak", "--long"} & set(pytest_arguments):
        return Images(RECIPES)
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", recipes.__name__]
    done = subprocess.run(  # noqa: S603 - our own
        [sys.executable, "-m", "pytest", *options, *pytest_arguments],
        cwd=in_machine.ROOT, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:  # what cannot be collected fails inside, too, and says why
        return Images(SOAK_RECIPES)
    lines = done.stdout.splitlines()
    names = {each.removeprefix(recipes.LINE) for each in lines if each.startswith(recipes.LINE)}
    baked = [each for each in SOAK_RECIPES if each.name in names]
    return Images(baked, container=recipes.CONTAINER in lines)


def build_images(wanted: Images) -> None:
    """Have the images that tests boot in the cache; whoever boots one that is missing fails."""
    if wanted.container:
        container_image.built()
    for recipe in wanted.recipes:
        try:
            build_image(recipe, lambda _: None)
        except BuildError as error:
            in_machine.say(f"no image of {recipe.name}: {error}")


def chosen_machine(options: argparse.Namespace) -> AbstractContextManager[Machine]:
    """Return the machine that the command line asks for."""
    if options.claims is not None:
        claims = Share(options.claims.resolve(), CLAIMS, writable=True)
        return fresh_machine(options.sharers, (claims,))
    if options.fresh:
        return fresh_machine(cpus=options.cpus, possible_cpus=options.possible_cpus)
    return development_machine()


@contextmanager
def development_machine() -> Iterator[Machine]:
    """Give the development machine, and leave it running."""
    yield in_machine.development_machine()


@contextmanager
def fresh_machine(
    sharers: int = 1,
    shares: tuple[Share, ...] = (),
    *,
    cpus: int | None = None,
    possible_cpus: int | None = None,
) -> Iterator[Machine]:
    """Boot a machine that nothing has touched; it is gone afterwards, its disk too.

    It has its part of the memory that `sharers` such machines may have together.
    """
    # Not by forkd's name in /tmp: tests that run here meanwhile would take it for a leak of theirs.
    with tempfile.TemporaryDirectory(prefix="test-machine-") as folder:
        config = in_machine.checkout_config(changing=False)
        memory_mib = config.memory_mib // sharers
        shares = (*config.shares, *shares)
        config = replace(
            config, memory_mib=memory_mib, shares=shares, cpus=cpus, possible_cpus=possible_cpus
        )
        machine = Machine.start(Path(folder), config, progress=in_machine.say)
        try:
            yield machine
        finally:
            machine.stop()


def run_pytest(machine: Machine, arguments: list[str], junit: Path | None) -> int:
    """Run pytest inside with `arguments`, and fetch its JUnit file to `junit`."""
    results = f"/tmp/junit-{uuid.uuid4().hex}.xml"
    command = [
        sys.executable, "-m", "pytest", *STRICT, f"--timeout={TEST_TIMEOUT_S}",
        f"--junitxml={results}", *arguments,
    ]  # fmt: skip
    status = in_machine.run_with_streams(machine, command, cwd=str(in_machine.ROOT))
    if junit is not None:
        data = bytearray()
        machine.run(["cat", results], on_stdout=data.extend)
        junit.parent.mkdir(parents=True, exist_ok=True)
        junit.write_bytes(data)
    return status


if __name__ == "__main__":
    sys.exit(main())
