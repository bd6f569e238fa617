"""While a program is loaded nothing is collected; afterwards everything new is."""

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


def test_what_was_loaded_is_never_looked_at_again_and_the_collector_is_on() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)  # noqa: S603 - our own
