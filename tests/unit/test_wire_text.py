"""Words of any bytes on the wire: strings where they are UTF-8, base64 where not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from forkd.engine.frames import Kind, encode_json
from forkd.errors import InvalidRequest
from forkd.wire import v2, v2_files

BYTES = "\udcff\udcfe"
ON_WIRE = {"b64": "//4="}


def test_a_request_has_bytes_where_it_needs_them() -> None:
    request = v2.Exec(args=["printf", BYTES, "grüß"], env={"V": BYTES}, cwd="/x")

    said = json.loads(request.model_dump_json())

    assert said["args"] == ["printf", ON_WIRE, "grüß"]
    assert (said["env"], said["cwd"]) == ({"V": ON_WIRE}, "/x")
    assert v2.Exec.model_validate(said) == request


@pytest.mark.parametrize(
    "bad",
    [{"b64": "/w="}, {"b64": 7}, {"b64": "//4=", "more": 1}, {}, 7, None, ["x"], "a\0", "\ud800"],
)
def test_what_is_no_text_is_refused_in_words_that_can_be_sent(bad: Any) -> None:  # noqa: ANN401
    with pytest.raises(ValidationError) as refused:
        v2.Exec.model_validate({"args": ["x", bad]})

    assert refused.value.errors()[0]["loc"] == ("args", 1)
    refused.value.errors()[0]["msg"].encode()


def test_a_query_has_exactly_one_path() -> None:
    assert v2_files.FilePath.model_validate({"path_b64": "L//+"}).path == f"/{BYTES}"
    assert v2_files.FilePath.model_validate({"path": "/x"}).path == "/x"
    for bad in ({}, {"path": "/x", "path_b64": "L3g="}, {"path_b64": "?"}, {"path": ""}):
        with pytest.raises(ValidationError):
            v2_files.FilePath.model_validate(bad)


def test_a_frame_to_an_agent_has_bytes_where_it_needs_them() -> None:
    frame = encode_json(Kind.REQUEST, {"args": ["a", BYTES, "grüß"], "env": {"V": BYTES}, "n": 1})

    assert json.loads(frame[8:]) == {
        "args": ["a", ON_WIRE, "grüß"],
        "env": {"V": ON_WIRE},
        "n": 1,
    }
    with pytest.raises(InvalidRequest):
        encode_json(Kind.REQUEST, {"args": ["\ud800"]})
    with pytest.raises(InvalidRequest):
        encode_json(Kind.REQUEST, {"env": {BYTES: "x"}})
