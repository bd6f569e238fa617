"""The wire promises no more than the model takes, where both have a limit of a thing."""

from __future__ import annotations

import pytest

from forkd.model import ids
from forkd.model import limits as model
from forkd.model.sandbox import ForkOptions
from forkd.packs import limits as packs
from forkd.wire import limits as wire


@pytest.mark.parametrize(
    ("promised", "taken"),
    [
        (wire.FORK_COUNT_MAX, model.FORK_COUNT_MAX),
        (wire.FORK_DEADLINE_SECS_MAX, model.FORK_DEADLINE_S_MAX),
        (wire.FORK_DEADLINE_SECS_DEFAULT, ForkOptions().deadline_s),
        (wire.TTL_SECS_MIN, model.TTL_S_MIN),
        (wire.TTL_SECS_MAX, model.TTL_S_MAX),
        (wire.MEMORY_LIMIT_MIB_MIN, model.MEMORY_LIMIT_MIB_MIN),
        (wire.MEMORY_LIMIT_MIB_MAX, model.MEMORY_LIMIT_MIB_MAX),
        (wire.DISK_LIMIT_MIB_MAX, model.DISK_LIMIT_MIB_MAX),
        (wire.CPU_LIMIT_MAX, model.CPU_LIMIT_MAX),
        (wire.ARGS_MAX, model.EXEC_ARGS_MAX),
        (wire.TIMEOUT_SECS_MAX, model.EXEC_TIMEOUT_S_MAX),
        (wire.TTY_SIDE_MAX, model.TTY_CELLS_MAX),
        (wire.CODE_CHARS_MAX, model.EVAL_CODE_BYTES_MAX),
        (wire.PATH_CHARS_MAX, model.PATH_BYTES_MAX),
        (wire.TRUSTED_CHARS_MAX, packs.TRUSTED_KEYS_MAX * 65),
    ],
)
def test_a_limit_is_the_same_on_both_sides(promised: float, taken: float) -> None:
    assert promised == taken


def test_an_id_is_no_longer_than_promised() -> None:
    assert len(ids.new_sandbox_id()) <= wire.ID_CHARS_MAX


def test_a_message_has_room_for_a_whole_frame_of_the_guest() -> None:
    assert wire.MESSAGE_BYTES_MAX == (1 << 20) + 1
