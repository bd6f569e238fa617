"""While a program is loaded nothing is collected; afterwards what is new, and all of it rarely."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from forkd.loading import without_collecting
with without_collecting():
    assert not gc.isenabled()
    loaded = [[] for _ in range(100_000)]
assert gc.isenabled()
assert gc.get_freeze_count() > len(loaded)
assert len(gc.get_objects()) < len(loaded)
"""

RARELY = """
import gc
from forkd.loading import THRESHOLDS, without_collecting

def full_collections(count):
    before = gc.get_stats()[2]["collections"]
    kept = [[] for _ in range(count)]
    return gc.get_stats()[2]["collections"] - before

with without_collecting():
    pass
youngest, middle, eldest = THRESHOLDS
assert full_collections(youngest * middle * eldest // 2) == 0
assert full_collections(youngest * middle * eldest * 2) > 0
"""


def test_what_was_loaded_is_never_looked_at_again_and_the_collector_is_on() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)  # noqa: S603 - our own


def test_a_full_collection_takes_a_million_new_containers() -> None:
    subprocess.run([sys.executable, "-c", RARELY], check=True)  # noqa: S603 - our own
