"""Which HTTP status each error has: the only place that knows both.

A class that is not in the table has its parent's status, so a new leaf of the tree never
becomes a 500 by accident.  Whatever is not a `ForkdError` is our bug: `forkd.daemon.requests`
logs it with its traceback, and the client learns only that it happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from forkd import errors
from forkd.model.caller import note_error
from forkd.wire.v2 import ErrorBody

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from pydantic import ValidationError

STATUS: dict[type[errors.ForkdError], int] = {
    errors.ForkdError: 500,
    errors.RequestError: 400,
    errors.InvalidRequest: 400,
    errors.Denied: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.PackError: 422,
    errors.IdempotencyMismatch: 422,
    errors.QuotaExceeded: 429,
    errors.CapacityError: 503,
    errors.BuildError: 422,
    errors.WarmUpError: 422,
    errors.StoreError: 500,
    errors.EngineError: 502,
    errors.EngineTimeout: 504,
    errors.GuestError: 422,
    errors.HostError: 500,
}

CRASH = "forkd.crash"
"""Where a request's scope has what its handler raised that is no error of ours."""

JSON = "application/json"
"""Media type of every body but a file's; a browser sends it nowhere without asking first."""

CODES = {404: errors.NotFound.code, 413: errors.InvalidRequest.code}
"""Codes of answers that no error of ours stands behind; any other is a plain `RequestError`."""

INTERNAL = ErrorBody(error="forkd failed in a way it did not foresee; see its log", code="internal")


def status_of(kind: type[errors.ForkdError]) -> int:
    """Return the HTTP status of an error class: its own, or its nearest ancestor's."""
    return next(STATUS[each] for each in kind.__mro__ if each in STATUS)


def status_of_code(code: str) -> int:
    """Return the HTTP status of an error of that code; 500 of one that nobody knows."""
    waiting: list[type[errors.ForkdError]] = [errors.ForkdError]
    while waiting:
        kind = waiting.pop()
        if kind.code == code:
            return status_of(kind)
        waiting += kind.__subclasses__()
    return STATUS[errors.ForkdError]


def body_of(error: errors.ForkdError) -> ErrorBody:
    """Return what a client is told about `error`, which its request is known to have ended with."""
    note_error(error.code)
    context = {key: value for key, value in error.context.items() if key != "field"}
    field = error.context.get("field")
    return ErrorBody(
        error=str(error).encode(errors="backslashreplace").decode(),
        code=error.code,
        field=None if field is None else str(field),
        context=context,
    )


def invalid(problem: ValidationError | RequestValidationError) -> errors.InvalidRequest:
    """Return a validation's first complaint, naming the field as the client wrote it."""
    first = problem.errors()[0]
    places = first["loc"]
    if isinstance(problem, RequestValidationError):
        places = places[1:]  # the first says whether it is the query's, the path's or the body's
    where = [str(part) for part in places]
    field = (".".join(where) or "body").encode(errors="backslashreplace").decode()
    return errors.InvalidRequest(f"{field}: {first['msg']}", field=field)


def install(app: FastAPI) -> None:
    """Make every answer of `app` that is not a success an `ErrorBody`."""
    app.add_exception_handler(errors.ForkdError, _forkd_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)


def render(error: errors.ForkdError, status: int | None = None) -> JSONResponse:
    """Return `error` as an answer, with the status of its class unless there is another."""
    return _answer(body_of(error), status_of(type(error)) if status is None else status)


def plain(status: int, message: str) -> JSONResponse:
    """Return an answer to what did not get as far as an error of ours."""
    code = CODES.get(status, errors.RequestError.code)
    return _answer(ErrorBody(error=message, code=code), status)


def internal_error() -> JSONResponse:
    """Return the answer to a request whose handler crashed."""
    return _answer(INTERNAL, STATUS[errors.ForkdError])


def _answer(body: ErrorBody, status: int) -> JSONResponse:
    note_error(body.code)
    headers = {}
    if status == STATUS[errors.Denied]:
        headers["WWW-Authenticate"] = "Bearer"
    if "retry_after_s" in body.context:
        headers["Retry-After"] = str(body.context["retry_after_s"])
        headers["Connection"] = "close"
    return JSONResponse(body.model_dump(), status, headers=headers)


def _forkd_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, errors.ForkdError)  # noqa: S101 - what `install` registered
    return render(error)


def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - what `install` registered
    kind = request.headers.get("content-type", "")
    if request.method == "POST" and not kind.startswith(JSON):
        return render(
            errors.InvalidRequest(f"the body must be {JSON}, not {kind or 'nothing'}", field="body")
        )
    return render(invalid(error))


def _http_error(request: Request, error: Exception) -> JSONResponse:
    """Answer for the router: no such path, not this method, or a body that cannot be read."""
    assert isinstance(error, HTTPException)  # noqa: S101 - what `install` registered
    if isinstance(error.__cause__, errors.ForkdError):
        return render(error.__cause__)
    if error.status_code == STATUS[errors.InvalidRequest]:
        return render(errors.InvalidRequest("the body is not valid JSON", field="body"))
    answer = plain(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    answer.headers.update(error.headers or {})
    return answer


def _bug(request: Request, error: Exception) -> JSONResponse:
    request.scope[CRASH] = error  # the client may leave before it is raised again
    return internal_error()
