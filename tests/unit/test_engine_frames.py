"""Frames are cut where the contract says, however they arrive, and nothing else is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forkd.engine.frames import (
    FRAME_PAYLOAD_MAX,
    HEADER_BYTES,
    FrameDecoder,
    Kind,
    encode,
    encode_json,
)
from forkd.errors import EngineError, InvalidRequest

PROTOCOL = Path(__file__).parents[2] / "protocol"
VECTORS = [
    json.loads(path.read_text())
    for folder in ("guest", "control")
    for path in sorted((PROTOCOL / folder / "vectors").glob("*.json"))
]
VALID = [vector for vector in VECTORS if vector["valid"]]
NO_FRAME = [vector for vector in VECTORS if vector.get("error") == "protocol"]
NO_JSON = [vector for vector in VECTORS if vector.get("reason") == "bad_json"]


def name_of(vector: dict[str, Any]) -> str:
    return str(vector["name"])


@pytest.mark.parametrize("vector", VALID, ids=name_of)
def test_a_golden_frame_decodes_to_its_payload_and_encodes_to_its_bytes(
    vector: dict[str, Any],
) -> None:
    raw = bytes.fromhex(vector["hex"])

    (frame,) = FrameDecoder().feed(raw)

    assert frame.kind.name.lower() == vector["kind"]
    if "bytes_hex" in vector["payload"]:
        assert frame.payload.hex() == vector["payload"]["bytes_hex"]
        assert encode(frame.kind, frame.payload) == raw
    else:
        assert frame.members() == vector["payload"]
        assert encode_json(frame.kind, vector["payload"]) == raw


@pytest.mark.parametrize("vector", NO_FRAME, ids=name_of)
def test_bytes_that_break_the_contract_are_no_frame(vector: dict[str, Any]) -> None:
    raw = bytes.fromhex(vector["hex"])
    if vector["reason"] == "truncated":
        assert FrameDecoder().feed(raw) == []
        return

    with pytest.raises(EngineError):
        FrameDecoder().feed(raw)


@pytest.mark.parametrize("vector", NO_JSON, ids=name_of)
def test_a_payload_that_is_no_json_object_is_refused(vector: dict[str, Any]) -> None:
    (frame,) = FrameDecoder().feed(bytes.fromhex(vector["hex"]))

    with pytest.raises(EngineError):
        frame.members()


def test_frames_are_found_in_a_stream_that_arrives_byte_by_byte() -> None:
    raw = encode(Kind.STDOUT, b"one") + encode(Kind.STDIN_EOF) + encode(Kind.STDOUT, b"two")
    decoder = FrameDecoder()

    frames = [frame for byte in raw for frame in decoder.feed(bytes([byte]))]

    assert [(frame.kind, frame.payload) for frame in frames] == [
        (Kind.STDOUT, b"one"),
        (Kind.STDIN_EOF, b""),
        (Kind.STDOUT, b"two"),
    ]


def test_a_payload_at_the_limit_is_sent_and_one_past_it_is_not() -> None:
    assert len(encode(Kind.DATA, bytes(FRAME_PAYLOAD_MAX))) == FRAME_PAYLOAD_MAX + HEADER_BYTES

    with pytest.raises(EngineError):
        encode(Kind.DATA, bytes(FRAME_PAYLOAD_MAX + 1))


def test_text_that_utf8_cannot_say_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequest):
        encode_json(Kind.REQUEST, {"args": ["\ud800"]})
