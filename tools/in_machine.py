"""Keep one helper machine for development, and run commands in it.

    tools/in-machine CMD…           run CMD there, from this working directory
    tools/in_machine.py up          start the machine (any run does, too)
    tools/in_machine.py down        stop it
    tools/in_machine.py shell       an interactive shell

Inside, the checkout is at its own path, read-only, and shows changes at once;
so is the cache of kernels and images.  The virtual environment and the rest of
the host's root are as they were when the machine started, under a layer that
forgets.  The host's /tmp is at /host/tmp; /var/lib/forkd is a disk that lasts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import ForkdError, NotFound
from forkd.machine import Machine, MachineConfig, Share, find_kernel
from forkd.machine.kernel import default_cache
from forkd.machine.terminal import run_in_terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "build" / "machine"

ENVIRONMENT_PASSED = ("PATH", "TERM", "LANG", "VIRTUAL_ENV", "CI")
"""Variables that a command inside gets from ours, beside those with a prefix below."""

ENVIRONMENT_PREFIXES = ("FORKD_", "PYTHON", "PYTEST_", "RUST_")


def main() -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["up", "down", "run", "shell"])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = [word for word in arguments.command[:1] if word != "--"] + arguments.command[1:]
    try:
        return act(arguments.action, command)
    except ForkdError as error:
        say(f"error: {error} ({error.code})")
        return 125


def act(action: str, command: list[str]) -> int:
    """Carry out one action."""
    if action == "down":
        if not Machine.end(STATE):
            say("no machine runs")
        return 0
    machine = development_machine()
    if action == "up":
        return 0
    return run(machine, ["bash", "-l"] if action == "shell" else command)


def development_machine() -> Machine:
    """Return the machine of this checkout, started if need be."""
    try:
        return Machine.attach(STATE)
    except NotFound:
        return Machine.start(STATE, checkout_config(), progress=say)


def checkout_config(*, changing: bool = True) -> MachineConfig:
    """Return a machine that sees this checkout, its cache, and the host's /tmp.

    Args:
        changing: Whether checkout and cache change while it runs.  If not, it remembers what it
            read of them, and starts a daemon in four fifths of the time.
    """
    kernel = find_kernel()
    venv, cache = ROOT / ".venv", default_cache()
    cache.mkdir(parents=True, exist_ok=True)
    shares = (
        Share(ROOT, str(ROOT), changing=changing),
        Share(venv, str(venv), changing=False),
        Share(cache, str(cache), changing=changing),
        Share(Path(tempfile.gettempdir()), "/host/tmp"),
    )
    return MachineConfig(
        kernel.image, kernel.modules, kernel.release, shares=shares, whole_host=True
    )


def run(machine: Machine, command: list[str]) -> int:
    """Run `command` with our streams and, within the checkout, our working directory."""
    compile_sources()
    here = Path.cwd()
    cwd = str(here) if here.is_relative_to(ROOT) else str(ROOT)
    if sys.stdin.isatty() and sys.stdout.isatty():
        return run_in_terminal(machine, command, env=environment(), cwd=cwd)
    return run_with_streams(machine, command, cwd=cwd)


def run_with_streams(machine: Machine, command: list[str], *, cwd: str) -> int:
    """Run `command` with our standard streams; return its exit code."""
    return machine.run(
        command, env=environment(), cwd=cwd, stdin=sys.stdin.fileno(),
        on_stdout=_writer(sys.stdout.fileno()), on_stderr=_writer(sys.stderr.fileno()),
    )  # fmt: skip


def compile_sources() -> None:
    """Write the bytecode that the machine, to which the checkout is read-only, cannot write."""
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "src", "tests", "tools"],
        cwd=ROOT, check=False, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def environment() -> dict[str, str]:
    """Return the part of our environment that is passed on."""
    return passed(os.environ)


def passed(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that a command in a machine gets."""
    return {
        name: value for name, value in variables.items()
        if name in ENVIRONMENT_PASSED or name.startswith(ENVIRONMENT_PREFIXES)
    }  # fmt: skip


def say(text: str) -> None:
    """Tell the person at the terminal."""
    sys.stderr.write(f"{text}\n")


def _writer(descriptor: int) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    return write


if __name__ == "__main__":
    sys.exit(main())
