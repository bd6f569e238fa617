"""Run pytest in a machine whose processor is Intel's, which Bochs emulates.

    python -m tests.intel.run [--deadline MINUTES] [--junit FILE] [pytest's …]

The counterpart of `tests.machine.run`, whose machine has a processor of AMD's: an unmet need fails
a test, too.  The tests are collected out here first, so that a wrong selection is refused at once,
and the images that they boot are built here, where the network is.  Output streams; the exit
status is pytest's; the JUnit file is brought back.  The machine is made for the run from this
host's programs and this checkout, and is gone afterwards.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from forkd.errors import ForkdError
from forkd.machine import find_kernel
from forkd.machine.build import build_image
from forkd.machine.kernel import default_cache
from tests.intel import bochs
from tests.intel.machine import RESULTS, Job, run_job
from tests.support.real_host import RECIPES
from tools import in_machine, trixie

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BUILD = in_machine.ROOT / "build"

DEADLINE_MINUTES = 120
"""How long a machine may run unless another time is asked for."""

TEST_TIMEOUT_S = 300
"""Deadline of one test inside, by the machine's clock, which runs with its instructions."""

JUNIT = "junit.xml"

STRICT = (
    "--strict-needs", "--waive-needs", "network", "-p", "no:cacheprovider",
    "-p", "tests.intel.attempts", "--long",
)  # fmt: skip


def main() -> int:
    """Run pytest inside; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--deadline", type=minutes, default=DEADLINE_MINUTES, metavar="MINUTES",
        help="how long the machine may run (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--junit", type=Path, help="where the JUnit file goes")
    options, arguments = parser.parse_known_args()
    # The machine ends with us, also if somebody ends us.
    signal.signal(signal.SIGTERM, end)
    in_machine.compile_sources()
    if (status := collect(arguments)) != 0:
        return status
    try:
        return run_pytest(arguments, options.deadline * 60.0, options.junit)
    except ForkdError as error:
        in_machine.say(f"error: {error} ({error.code})")
        return 125


def minutes(text: str) -> int:
    """Read a positive number of minutes."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes, such as 90")
    return int(text)


def end(number: int, _: object) -> NoReturn:
    """Leave by way of whoever cleans up, whom a second signal must not interrupt."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def collect(arguments: list[str]) -> int:
    """Collect the tests here; return pytest's exit status, and show why if it is not 0.

    Their bytecode, with pytest's assertions, is written on the way: making it costs an emulated
    processor a minute.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(  # noqa: S603 - ours
        [*pytest(STRICT), "--collect-only", "-q", *arguments],
        cwd=in_machine.ROOT, env=env, check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        in_machine.say(done.stdout + done.stderr)
    return done.returncode


def run_pytest(arguments: list[str], deadline_s: float, junit: Path | None) -> int:
    """Run pytest inside with `arguments`, and leave its JUnit file at `junit`."""
    emulator = trixie.fetch(BUILD / "bochs", bochs.PROGRAM, in_machine.say)
    outcome = run_job(
        Job(script(arguments, os.environ), in_machine.ROOT, tuple(images())), find_kernel(),
        emulator=emulator, folder=BUILD / "intel", deadline_s=deadline_s,
        say=in_machine.say, on_output=show,
    )  # fmt: skip
    if junit is not None and JUNIT in outcome.files:
        junit.parent.mkdir(parents=True, exist_ok=True)
        junit.write_bytes(outcome.files[JUNIT])
    return outcome.status


def images() -> Iterator[Path]:
    """Have the images that tests boot in the cache, and return where they are.

    Raises:
        BuildError: One cannot be built.
    """
    for recipe in RECIPES:
        built = build_image(recipe, lambda _: None)
        yield Path(built["rootfs"]).parent
        yield Path(built["initramfs"])


def script(arguments: list[str], environment: Mapping[str, str]) -> str:
    """Return the job: pytest with what of our environment is passed on, and with this cache."""
    passed = in_machine.passed(environment) | {"XDG_CACHE_HOME": str(default_cache().parent)}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in passed.items())
    color = f"--color={'yes' if sys.stdout.isatty() else 'no'}"
    inside = (color, "--timeout", str(TEST_TIMEOUT_S), f"--junitxml={RESULTS}/{JUNIT}")
    return f"{exports}exec {shlex.join([*pytest(STRICT), *inside, *arguments])}\n"


def pytest(options: tuple[str, ...]) -> list[str]:
    """Return pytest's command with `options`."""
    return [sys.executable, "-m", "pytest", *options]


def show(data: bytes) -> None:
    """Pass on what pytest prints."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
