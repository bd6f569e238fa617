"""Import what the tests of a job import, and see that the environment is whole.

A job copies its project into a fork, and branches the fork once for each worker.  What is imported
here, no worker imports again.
"""

import http.server
import json
import sqlite3
import subprocess
import urllib.request

import numpy as np
import pytest

CHECK = "/srv/check"


def check():
    """Run the tests of the environment itself; return pytest's exit code."""
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "--capture=sys", CHECK]))


if check() != 0:
    raise RuntimeError(f"the environment is not whole: the tests in {CHECK} fail")
