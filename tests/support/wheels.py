"""The wheels of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.docs import ROOT

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 240


def built(kind: str, folder: Path) -> Path:
    """Build a wheel, and return where it is."""
    words = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    environ = {**os.environ, "FORKD_WHEEL": kind}
    subprocess.run(  # noqa: S603 - our own
        words, cwd=ROOT, env=environ, check=True, capture_output=True, timeout=TIMEOUT_S
    )
    (wheel,) = folder.glob("*.whl")
    return wheel
