"""Statuses of errors on `/v1`, where they are not those of `/v2`; the body is the same.

The reference has `{"error": sentence}`; we say `code`, `field` and `context` beside it, which its
clients hand on with the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd import errors
from forkd.daemon import errors as ours

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

STATUS: dict[type[errors.ForkdError], int] = {
    errors.EngineError: 500,
    errors.BuildError: 500,
}
"""Whatever fails behind its daemon is a 500 there."""


def status_of(kind: type[errors.ForkdError]) -> int:
    """Return the HTTP status of an error class."""
    own = (STATUS[each] for each in kind.__mro__ if each in STATUS)
    return next(own, ours.status_of(kind))


def install(app: FastAPI) -> None:
    """Make every answer of `app` that is not a success an error of the reference."""
    ours.install(app)
    app.add_exception_handler(errors.ForkdError, _forkd_error)


def _forkd_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, errors.ForkdError)  # noqa: S101 - what `install` registered
    return ours.render(error, status_of(type(error)))
