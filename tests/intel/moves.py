"""Take a snapshot of an AMD processor to an Intel one, and one of Intel's to AMD's.

    python -m tests.intel.moves

Both are baked for portable guests, by `tests/functional/test_moved_machines.py`, which then forks
what it is given or expects to be told what is missing.  Three machines, one after the other: the
helper machine, Bochs with the pack of the first, and the helper machine with the pack of Bochs.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

from forkd.errors import ForkdError
from forkd.machine import find_kernel
from tests.functional.test_moved_machines import FROM, PACK, TO
from tests.intel import bochs
from tests.intel.machine import RESULTS, Job, run_job
from tests.intel.run import BUILD, end, images, script, show
from tests.machine.run import Images, build_images, fresh_machine
from tests.support.real_host import RECIPES
from tools import in_machine, trixie

TESTS = ("--soak", "-v", "--log-cli-level=INFO", "tests/functional/test_moved_machines.py")

INSIDE = "/var/lib/forkd/moved"
"""Where the helper machine puts its pack."""

DEADLINE_S = 2 * 3600.0


def main() -> int:
    """Run the tests in the three machines; return the first exit status that is not 0."""
    signal.signal(signal.SIGTERM, end)
    in_machine.compile_sources()
    build_images(Images(RECIPES))
    # Where the helper machine sees it.
    with tempfile.TemporaryDirectory(prefix="test-moves-", dir=tempfile.gettempdir()) as name:
        packs = {kind: Path(name) / kind for kind in ("amd", "intel")}
        for folder in packs.values():
            folder.mkdir()
        try:
            return (
                on_amd(None, packs["amd"])
                or on_intel(packs["amd"], packs["intel"])
                or on_amd(packs["intel"], None)
            )
        except ForkdError as error:
            in_machine.say(f"error: {error} ({error.code})")
            return 125


def on_amd(source: Path | None, target: Path | None) -> int:
    """Run the tests in a helper machine, with the packs in `source`; fetch its pack."""
    os.environ.pop(FROM, None)
    if source is not None:
        os.environ[FROM] = str(Path("/host/tmp") / source.relative_to(tempfile.gettempdir()))
    os.environ[TO] = INSIDE
    with fresh_machine() as machine:
        command = [sys.executable, "-m", "pytest", "--strict-needs", "-p", "no:cacheprovider"]
        status = in_machine.run_with_streams(
            machine, [*command, "--timeout=1200", *TESTS], cwd=str(in_machine.ROOT)
        )
        if status == 0 and target is not None:
            with (target / PACK).open("wb") as file:
                machine.run(["cat", f"{INSIDE}/{PACK}"], on_stdout=file.write)
    return status


def on_intel(source: Path, target: Path) -> int:
    """Run the tests on Bochs, with the packs in `source`; fetch its pack."""
    emulator = trixie.fetch(BUILD / "bochs", bochs.PROGRAM, in_machine.say)
    variables = os.environ | {FROM: str(source), TO: RESULTS}
    outcome = run_job(
        Job(script(list(TESTS), variables), in_machine.ROOT, (*images(), source)), find_kernel(),
        emulator=emulator, folder=BUILD / "moves", deadline_s=DEADLINE_S,
        say=in_machine.say, on_output=show,
    )  # fmt: skip
    if outcome.status == 0:
        (target / PACK).write_bytes(outcome.files[PACK])
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())
