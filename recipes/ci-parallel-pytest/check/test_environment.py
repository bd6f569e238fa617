"""What a job relies on; a snapshot in which this fails is not made."""

import sqlite3
import subprocess

import numpy as np


def test_git_is_there():
    assert subprocess.check_output(["git", "--version"]).startswith(b"git version")


def test_libraries_compute():
    assert np.arange(4).sum() == 6
    assert sqlite3.connect(":memory:").execute("SELECT 1 + 1").fetchone() == (2,)
