"""Run pytest in the helper machine, where there is a real KVM.

    python -m tests.machine.run [--fresh] [--junit FILE] [pytest's arguments]

The same command as on the host, on the same read-only checkout, except that an
unmet need fails a test.  The images that tests boot are built first, out here, where
the network is.  Output streams; the exit status is pytest's; the JUnit file is brought
back.  Without `--fresh` the development machine is used.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import BuildError, ForkdError
from forkd.machine import Machine
from forkd.machine.build import build_image
from tests.support.real_host import RECIPES
from tools import in_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

TEST_TIMEOUT_S = 300
"""Deadline of one test inside: five times the one outside, for an emulated processor."""

STRICT = ("--strict-needs", "--waive-needs", "network", "-p", "no:cacheprovider")


def main() -> int:
    """Run pytest inside; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fresh", action="store_true", help="boot a machine for this run alone")
    parser.add_argument("--junit", type=Path, help="where the JUnit file goes")
    options, pytest_arguments = parser.parse_known_args()
    # A machine that was booted for this run ends with it, also if somebody ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        build_images()
        with fresh_machine() if options.fresh else development_machine() as machine:
            return run_pytest(machine, pytest_arguments, options.junit)
    except ForkdError as error:
        in_machine.say(f"error: {error} ({error.code})")
        return 125


def build_images() -> None:
    """Have the images that tests boot in the cache; whoever boots one that is missing fails."""
    for recipe in RECIPES:
        try:
            build_image(recipe, lambda _: None)
        except BuildError as error:
            in_machine.say(f"no image of {recipe.name}: {error}")


@contextmanager
def development_machine() -> Iterator[Machine]:
    """Give the development machine, and leave it running."""
    yield in_machine.development_machine()


@contextmanager
def fresh_machine() -> Iterator[Machine]:
    """Boot a machine that nothing has touched; it is gone afterwards, its disk too."""
    with tempfile.TemporaryDirectory(prefix="forkd-test-machine-") as folder:
        config = in_machine.checkout_config()
        machine = Machine.start(Path(folder), config, progress=in_machine.say)
        try:
            yield machine
        finally:
            machine.stop()


def run_pytest(machine: Machine, arguments: list[str], junit: Path | None) -> int:
    """Run pytest inside with `arguments`, and fetch its JUnit file to `junit`."""
    in_machine.compile_sources()
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
