"""A step of a workflow runs in a fork: packaging/forkd-action on real machines."""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.daemon_program import PROGRAMS
from tests.support.docs import ROOT
from tests.support.real_daemon import daemon_of
from tests.support.real_host import REAL, TAG

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.real_host import RealHost

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.soak(only=True)]

SCRIPT = """
cat 'a file'
echo changed >'a file'
uname -n
exit 3
"""


async def test_a_step_runs_in_a_fork_with_a_copy_of_the_folder(
    real_host: RealHost, tmp_path: Path
) -> None:
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "a file").write_text("as it was\n")
    inputs = {"RUN": SCRIPT, "IMAGE": "", "SNAPSHOT": TAG, "FOLDER": str(folder),
              "NETWORK": "none", "TIMEOUT": "5m"}  # fmt: skip

    async with daemon_of(real_host) as url:
        done = await asyncio.to_thread(
            subprocess.run,
            [str(ROOT / "packaging/forkd-action/run")],
            env={
                "PATH": f"{PROGRAMS}{os.pathsep}{os.defpath}",
                "FORKD_URL": url,
                **{f"INPUT_{name}": value for name, value in inputs.items()},
            },
            capture_output=True,
            text=True,
            check=False,
        )

    assert done.returncode == 3, done.stderr
    text, name = done.stdout.splitlines()
    assert text == "as it was"
    assert name != os.uname().nodename
    assert (folder / "a file").read_text() == "as it was\n"
