"""From what the daemon answered to the error it meant: the same class, message and context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from forkd.errors import Denied, ForkdError, RequestError
from forkd.sdk._requests import argument
from forkd.wire.v2 import ErrorBody

if TYPE_CHECKING:
    from collections.abc import Iterator

MESSAGE_CHARS_MAX = 500
"""How much we repeat of an answer that is not the daemon's."""


def from_body(body: ErrorBody) -> ForkdError:
    """Return the error that `body` describes; a code we do not know becomes the root's class."""
    context = dict(body.context)
    said = body.error
    if body.field is not None:
        context["field"] = argument(body.field)
        if said.startswith(f"{body.field}:"):
            said = said.replace(body.field, argument(body.field), 1)
    kind = _BY_CODE.get(body.code)
    if kind is None:
        return ForkdError(said, **{**context, "code": body.code})
    return kind(said, **context)


def from_answer(status: int, text: bytes) -> ForkdError:
    """Return the error in an answer that was not a success, whoever wrote it."""
    try:
        return from_body(ErrorBody.model_validate_json(text))
    except ValidationError:
        pass
    shown = text[:MESSAGE_CHARS_MAX].decode(errors="replace")
    kind = _BY_STATUS.get(status, RequestError if status < SERVER_ERROR else ForkdError)
    return kind(f"HTTP {status}: {shown}", status=status)


SERVER_ERROR = 500

_BY_STATUS: dict[int, type[ForkdError]] = {401: Denied, 403: Denied}


def _walk(kind: type[ForkdError]) -> Iterator[type[ForkdError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _walk(each)


_BY_CODE = {each.code: each for each in _walk(ForkdError)}
