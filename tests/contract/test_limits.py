"""Limits that two languages, or two contracts, both have are the same on both sides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forkd import limits
from forkd.engine import frames, guest
from forkd.model import ids
from forkd.packs import limits as packs

RUST = Path(__file__).parents[2] / "crates/proto/src"


def in_rust(name: str) -> float:
    """Return a constant of the protocols, as the Rust side has it."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(RUST.rglob("*.rs")))
    (expression,) = re.findall(rf"pub const {name}: \w+ = ([^;]+);", text)
    parts = [float(part.replace("_", "")) for part in expression.split("<<")]
    return parts[0] if len(parts) == 1 else parts[0] * 2 ** parts[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FRAME_PAYLOAD_MAX", frames.FRAME_PAYLOAD_MAX),
        ("FRAME_HEADER_BYTES", frames.HEADER_BYTES),
        ("AGENT_PORT", guest.AGENT_PORT),
        ("ENTRIES_MAX", 10_000),
        ("ARGS_MAX", limits.EXEC_ARGS_MAX),
        ("CHILDREN_MAX", limits.FORK_COUNT_MAX),
        ("TIMEOUT_MAX_S", limits.EXEC_TIMEOUT_S_MAX),
        ("FORK_DEADLINE_DEFAULT_S", limits.FORK_DEADLINE_S_DEFAULT),
        ("MEMORY_FILES_MAX", limits.CHAIN_DEPTH_MAX + 1),
    ],
)
def test_a_limit_of_the_protocols_is_the_same_in_both_languages(name: str, value: float) -> None:
    assert in_rust(name) == value


def test_a_request_trusts_as_many_keys_as_a_trust_list_holds() -> None:
    assert packs.TRUSTED_KEYS_MAX * len("0" * 64 + ",") == limits.TRUSTED_CHARS_MAX


def test_a_pack_has_as_many_links_as_a_chain() -> None:
    assert packs.PACK_LINKS_MAX == limits.CHAIN_DEPTH_MAX + 1


def test_the_longest_chain_has_a_zygote_for_each_link() -> None:
    assert limits.ZYGOTES_MIN == limits.CHAIN_DEPTH_MAX + 1


def test_an_id_is_no_longer_than_promised() -> None:
    assert len(ids.new_sandbox_id()) <= limits.ID_CHARS_MAX


def test_a_message_has_room_for_a_whole_frame_of_the_guest() -> None:
    assert frames.FRAME_PAYLOAD_MAX + 1 == limits.MESSAGE_BYTES_MAX
