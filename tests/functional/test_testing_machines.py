"""`pytest --forkd` on real machines: a real package, whose tests end as they do without forks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tarfile
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.support.docs import ROOT
from tests.support.real_daemon import daemon_of
from tests.support.real_host import REAL, TAG

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.real_host import RealHost

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.soak(only=True)]

PACKAGE = ROOT / "build/package"
"""Where `make soak` has the source of a package, as a tar archive."""

TESTS_MIN = 500

LONG = (
    "test_primes or test_roundtrip or test_concurrent or test_nth_prime or test_all_orderings"
    " or test_vs_statistics_median or test_large or test_lcg"
)
"""Tests that compute for seconds on a real processor, which take minutes on an emulated one."""


def ends(project: Path, *args: str, url: str = "") -> tuple[int, dict[str, str]]:
    """Return the exit code, and how each test ended."""
    options = ("-rA", "-q", "-p", "no:cacheprovider", "-k", f"not ({LONG})", *args)
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(  # noqa: S603 - our own interpreter
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=project,
        env={**os.environ, "FORKD_URL": url, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    lines = [each.split(" ", 1) for each in done.stdout.splitlines() if "::" in each]
    found = {rest.partition(" - ")[0]: word for word, rest in lines if word.isupper()}
    assert found, done.stdout + done.stderr
    return done.returncode, found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (archive,) = PACKAGE.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    (found,) = tmp_path.iterdir()
    (found / "pytest.ini").write_text("[pytest]\n")  # its folder is the project's
    return found


async def test_the_tests_of_a_package_end_in_forks_as_they_do_without(
    real_host: RealHost, project: Path, tell: Callable[[str], None]
) -> None:
    async with daemon_of(real_host) as url:
        expected, found = await asyncio.gather(
            asyncio.to_thread(ends, project),
            asyncio.to_thread(ends, project, "--forkd", TAG, url=url),
        )

    assert found == expected
    assert len(found[1]) >= TESTS_MIN
    tell(f"{len(found[1])} tests end as without forks: {Counter(found[1].values())}")
