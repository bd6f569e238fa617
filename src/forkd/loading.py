"""Load a program without the cyclic garbage collector, and have it collect everything rarely.

Importing makes some two hundred thousand objects that live as long as the process.  To collect
among them takes a fifth of the time in which a program starts, and finds nothing; and each full
collection later would walk them again, in the middle of somebody's fork.

A full collection stops the whole process: 75 to 290 ms of a daemon with some hundred clients on a
busy host.  With the interpreter's thresholds such a daemon made one every four seconds.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


THRESHOLDS = (5_000, 10, 20)
"""New containers until the youngest are collected; how often until their elders are, and then all.

A million more containers than there were start a full collection: 69 MiB of empty lists, 223 MiB of
dictionaries with one member.
"""


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Collect nothing within the block, and never look at what was made in it.

    After it everything is collected as `THRESHOLDS` say.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
        gc.enable()
