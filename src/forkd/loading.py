"""Load a program without the cyclic garbage collector.

Importing makes some two hundred thousand objects that live as long as the process.  To collect
among them takes a fifth of the time in which a program starts, and finds nothing; and each full
collection later would walk them again, in the middle of somebody's fork.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Collect nothing within the block, and never look at what was made in it."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
