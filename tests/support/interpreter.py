"""The Python of the fakes' guests."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def variables(given: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for a block; no others are as before it."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run(code: str, names: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Run code as the runtime does; return its two outputs, and the members of the answer."""
    out, err, value, error = io.StringIO(), io.StringIO(), None, None
    try:
        tree = ast.parse(code)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            exec(compile(tree, "<eval>", "exec"), names)  # noqa: S102 - a test's own code
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<eval>", "eval"), names)  # noqa: S307
    except Exception as raised:  # noqa: BLE001 - whatever the code raises is data
        kind, trace = type(raised).__name__, traceback.format_exc()
        error = {"type": kind, "message": str(raised), "traceback": trace}
    text = _json(value)
    return (
        out.getvalue(),
        err.getvalue(),
        {
            "has_value": value is not None,
            "repr": None if value is None else repr(value),
            "value": None if text is None else json.loads(text),
            "value_is_json": value is not None and text is not None,
            "error": error,
            "timed_out": False,
            **_results(value),
        },
    )


def _results(value: object) -> dict[str, object]:
    """Return a value's HTML and picture as the runtime does; nothing without them."""
    html, png = (getattr(type(value), name, None) for name in ("_repr_html_", "_repr_png_"))
    data = {} if html is None else {"text/html": html(value)}
    if png is not None:
        data["image/png"] = base64.b64encode(png(value)).decode()
    return {"results": [{"is_main": True, "data": data, "omitted": {}}]} if data else {}


def _json(value: object) -> str | None:
    """Return a value as JSON; None if it has none."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
