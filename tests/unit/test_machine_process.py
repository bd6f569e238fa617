"""Processes by number and start time."""

from __future__ import annotations

import os
from dataclasses import replace

from forkd.machine.process import ProcessId


def test_this_process_is_alive() -> None:
    me = ProcessId.of(os.getpid())

    assert me is not None
    assert me.is_alive()


def test_another_process_with_our_number_is_not_us() -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None

    earlier = replace(me, start_ticks=me.start_ticks - 1)

    assert not earlier.is_alive()
    assert earlier.end((), grace_s=0)
