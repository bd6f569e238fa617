"""Run one pickled task in a guest.

`forkd.executor` sends the source of this module to the warm runtime, where it is the module
`_forkd_tasks`.  So it imports the standard library and cloudpickle alone, and what it returns is
data that JSON can represent.
"""

from __future__ import annotations

import base64
import importlib
import json
import pickle
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

TEXT_CHARS_MAX = 16_384
"""Longest message, and longest traceback; the end of a traceback is kept."""


def install(version: str, sources: Mapping[str, str]) -> None:
    """Make cloudpickle's modules, unless the guest has the same version of it.

    Args:
        version: The caller's.
        sources: The source of each module, by its name; a package comes after what it imports.
    """
    try:
        if importlib.import_module("cloudpickle").__version__ == version:
            return
    except Exception:  # noqa: BLE001, S110 - one that cannot be imported is replaced
        pass
    for name in sources:
        module = sys.modules[name] = types.ModuleType(name)
        module.__package__ = name.partition(".")[0]
        if name == module.__package__:
            module.__path__ = []
    for name, source in sources.items():
        exec(compile(source, f"<{name}>", "exec"), sys.modules[name].__dict__)  # noqa: S102 - the caller's own


def run(
    task: str | None,
    path: str | None,
    *,
    as_json: bool,
    inline_bytes_max: int,
    result_bytes_max: int,
) -> dict[str, Any]:
    """Run a task, which never raises; return how it ended.

    Args:
        task: The pickled task, in base64; None if it is in a file.
        path: That file, which is removed.
        as_json: Return the value as JSON, and the exception as text alone.
        inline_bytes_max: A longer value or exception is returned in a file.
        result_bytes_max: A longer one is an error.
    """
    stage = "load"
    try:
        function, args, kwargs = pickle.loads(_taken(task, path))  # noqa: S301 - the caller's own task
        stage = "call"
        value = function(*args, **kwargs)
        stage = "return"
        data = json.dumps(value).encode() if as_json else _pickled(value)
        _check_length(len(data), result_bytes_max)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the task's outcome
        return {"stage": stage, **_failed(error, inline_bytes_max, as_json=as_json)}
    return {"stage": "done", "error": None, **_given(data, inline_bytes_max)}


def _check_length(length: int, most: int) -> None:
    if length > most:
        raise ValueError(
            f"the result has {length} bytes, more than the {most} that may be returned; write it "
            "to a file in the sandbox, or return a part of it"
        )


def _taken(task: str | None, path: str | None) -> bytes:
    if path is None:
        return base64.b64decode(task or "")
    data = Path(path).read_bytes()
    Path(path).unlink()
    return data


def _pickled(value: object) -> bytes:
    import cloudpickle  # noqa: PLC0415 - it is installed after this module

    data: bytes = cloudpickle.dumps(value)
    return data


def _failed(error: BaseException, inline_bytes_max: int, *, as_json: bool) -> dict[str, Any]:
    """Describe an exception, without the frames of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    said = {
        "type": type(error).__qualname__,
        "message": _text(error)[:TEXT_CHARS_MAX],
        "traceback": "".join(lines)[-TEXT_CHARS_MAX:],
    }
    data = None
    if not as_json:
        try:
            data = _pickled(error)
            pickle.loads(data)  # noqa: S301 - not every exception can be made again
        except Exception:  # noqa: BLE001 - whatever a class's own pickling raises
            data = None
    if data is None or len(data) > inline_bytes_max:
        return {"error": said, "data": None, "path": None}
    return {"error": said, **_given(data, inline_bytes_max)}


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a class's own
        return "(its text cannot be made)"


def _given(data: bytes, inline_bytes_max: int) -> dict[str, Any]:
    """Return bytes as members of an answer, in a file if they are many."""
    if len(data) <= inline_bytes_max:
        return {"data": base64.b64encode(data).decode(), "path": None}
    with tempfile.NamedTemporaryFile(prefix="forkd-result-", delete=False) as file:
        file.write(data)
    return {"data": None, "path": file.name}
