"""No answer of a guest or a VMM process gets past its type with a member that breaks it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forkd.engine import replies
from forkd.engine.frames import Frame, Kind
from forkd.errors import EngineError

DIGEST = "0" * 64
ENTRY = {
    "name": "x",
    "kind": "file",
    "size_bytes": 1,
    "mode": 0o644,
    "uid": 0,
    "gid": 0,
    "modified_at_ns": -1,
    "target": None,
}
CPU = {
    "model": "A CPU",
    "features": ["avx2"],
    "portable": True,
    "physical_bits": 46,
    "tsc_khz": 2_000_000,
}
DISK = {"top_bytes": 4096, "reads": 1, "writes": 2, "flushes": 0}
STAGES = {"clone": 1, "build": 2.5, "resume": 3, "agent": 4, "total": 10.5}

SAMPLES: dict[type[replies.Reply], dict[str, Any]] = {
    replies.Empty: {},
    replies.AgentError: {"code": "io", "message": "m", "field": "cwd"},
    replies.Pong: {"version": "0", "pid": 1, "uptime_s": 1.5, "runtime": "ready"},
    replies.GuestTime: {"realtime_ns": 1},
    replies.Echo: {"data": "x"},
    replies.Connected: {"event": "connected"},
    replies.EvalException: {"type": "T", "message": "m", "traceback": "t"},
    replies.Evaluated: {
        "has_value": True,
        "repr": "1",
        "value": 1,
        "value_is_json": True,
        "error": {"type": "T", "message": "m", "traceback": "t"},
        "timed_out": False,
        "results": [{"is_main": True, "data": {"text/html": "<b>"}, "omitted": {"x/y": 1}}],
        "more_results": 0,
    },
    replies.EvalForms: {"is_main": True, "data": {"text/html": "<b>"}, "omitted": {}},
    replies.Warmed: {"duration_s": 0.5},
    replies.ExecStarted: {"event": "started", "pid": 7},
    replies.ExecEnded: {"exit_code": 0, "signal": None, "timed_out": False, "duration_s": 1},
    replies.FileOpened: {"size_bytes": 1, "mode": 0o644},
    replies.FileWritten: {"bytes": 1},
    replies.ArchiveOpened: {"event": "archive"},
    replies.SkippedEntry: {"path": "a/pipe", "reason": "a pipe"},
    replies.ArchiveWritten: {"entries": 1, "bytes": 1, "skipped": [], "more_skipped": 0},
    replies.Entry: ENTRY,
    replies.Entries: {"entries": [ENTRY]},
    replies.Watched: {"longest_s": 0.1},
    replies.Booted: {"event": "booted", "version": "0"},
    replies.ControlError: {"code": "io", "message": "m"},
    replies.CpuSeen: CPU,
    replies.SavedFile: {"name": "disk.layer", "bytes": 1, "digest": DIGEST},
    replies.Saved: {"files": [{"name": "memory", "bytes": 1, "digest": DIGEST}], "cpu": CPU},
    replies.Branched: {"pid": 1, "pause_ms": 0.5},
    replies.Derived: {"pid": 1},
    replies.Retired: {"children": 0},
    replies.Timed: {"ms": 1.5},
    replies.SpawnStages: STAGES,
    replies.MachineStatus: {"state": "running", "pid": 1},
    replies.DiskMetrics: DISK,
    replies.Metrics: {"exits": 1, "rejected": {"bus": 0}, "disk": DISK},
    replies.ChildReady: {"event": "ready", "id": "sb", "pid": 1, "ms": STAGES, "attempts": 1},
    replies.ChildFailed: {
        "event": "failed",
        "id": "sb",
        "stage": "clone",
        "code": "io",
        "message": "m",
        "attempts": 3,
    },
    replies.MachineExited: {"event": "exited", "reason": "reset", "message": "m"},
    replies.FileDifference: {"path": "/x", "change": "added", "kind": "f", "size_bytes": 1},
    replies.Compared: {
        "changes": [{"path": "/x", "change": "added", "kind": "f", "size_bytes": 1}],
        "more": 0,
    },
}

NONSENSE: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**400,
    1 << 63,
    0.5,
    1e308,
    -1e308,
    "",
    "x" * (1 << 20),
    "\0",
    "../../etc/passwd",
    [],
    {},
    [[[[]]]],
    {"pid": {"pid": 1}},
)


MEMBERS = [
    pytest.param(kind, name, id=f"{kind.__name__}.{name}")
    for kind, sample in SAMPLES.items()
    for name in sample
]


def test_every_type_has_a_sample() -> None:
    assert set(replies.Reply.__subclasses__()) == set(SAMPLES)


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_a_sample_is_read_whatever_else_it_holds(kind: type[replies.Reply]) -> None:
    members: dict[str, Any] = {**SAMPLES[kind], "a member of the future": []}

    read = kind.read(members, "ask")

    assert read.model_dump(mode="json", exclude_unset=True) == SAMPLES[kind]


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_nonsense_is_refused_or_within_its_bounds(kind: type[replies.Reply], name: str) -> None:
    for value in NONSENSE:
        try:
            read = kind.read({**SAMPLES[kind], name: value}, "ask")
        except EngineError as error:
            assert name in str(error)  # noqa: PT017 - either outcome is fine
        else:
            _check_bounds(read.model_dump(mode="json"))


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_a_member_that_is_missing_is_named_or_has_a_default(
    kind: type[replies.Reply], name: str
) -> None:
    less = {key: value for key, value in SAMPLES[kind].items() if key != name}

    if kind.model_fields[name].is_required():
        with pytest.raises(EngineError, match=f"invalid: {name}: Field required"):
            kind.read(less, "ask")
    else:
        kind.read(less, "ask")


def test_a_number_of_401_digits_is_no_crash() -> None:
    frame = Frame(Kind.REPLY, b'{"longest_s": 1' + b"0" * 400 + b"}")

    with pytest.raises(EngineError, match="longest_s"):
        replies.Watched.read(frame.members(), "watched")


def test_a_number_of_5000_digits_is_no_crash() -> None:
    frame = Frame(Kind.REPLY, b'{"longest_s": 1' + b"0" * 5_000 + b"}")

    with pytest.raises(EngineError):
        replies.Watched.read(frame.members(), "watched")


def _check_bounds(value: object) -> None:
    """Fail if a number is beyond what SQLite and JSON readers elsewhere hold."""
    match value:
        case dict():
            for name, each in value.items():
                if name != "value":  # an evaluation's value is its code's to choose
                    _check_bounds(each)
        case list():
            for each in value:
                _check_bounds(each)
        case int():
            assert abs(value) < 1 << 63
    json.dumps(value)
