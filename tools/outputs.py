"""What other programs print, for the tools that make a release."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Failed(Exception):
    """A program ended with another status than 0; the message has what it said."""


def output(*words: str, environment: dict[str, str] | None = None) -> str:
    """Return what a program prints that runs in this checkout.

    Args:
        words: The program and its arguments.
        environment: Variables beside ours.

    Raises:
        Failed: It ended with another status than 0.
    """
    done = subprocess.run(  # noqa: S603 - of the toolchain, the lock files and git
        words,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise Failed(f"{' '.join(words[:4])} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
