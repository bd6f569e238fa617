"""Text that a guest's kernel takes: any bytes without a zero, mostly UTF-8.

In Python such text is a `str` whose lone surrogates stand for bytes (PEP 383), as in `os.fsdecode`.
JSON has no bytes: what is not UTF-8 travels as `{"b64": "…"}` in the place of the string.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from forkd import limits

if TYPE_CHECKING:
    from collections.abc import Callable

MEMBER = "b64"


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can say `text`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encoded(text: str) -> str:
    """Return the bytes of `text` in base64.

    Raises:
        UnicodeEncodeError: It has surrogates that stand for no byte.
    """
    return base64.b64encode(text.encode(errors="surrogateescape")).decode()


def decoded(digits: str) -> str:
    """Return the text whose bytes are `digits` in base64.

    Raises:
        ValueError: It is not base64.
    """
    return base64.b64decode(digits, validate=True).decode(errors="surrogateescape")


def readable(text: str) -> str:
    """Return `text` with U+FFFD for what is not UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def on_wire(text: str) -> str | dict[str, str]:
    """Return `text` as JSON has it."""
    return text if is_utf8(text) else {MEMBER: encoded(text)}


def text_of(bytes_max: int, advice: str = "", *, bytes_min: int = 0) -> object:
    """Return the type of a text of so many bytes; `advice` says what to do if it is longer."""
    limit = f"has {{bytes}} bytes; at most {bytes_max} are possible{advice}"
    schema = {
        "anyOf": [
            {"type": "string", "minLength": bytes_min, "maxLength": bytes_max},
            {
                "type": "object",
                "properties": {MEMBER: {"type": "string", "contentEncoding": "base64"}},
                "required": [MEMBER],
                "additionalProperties": False,
            },
        ],
    }
    return Annotated[
        str,
        PlainValidator(_checked(bytes_min, bytes_max, limit)),
        PlainSerializer(on_wire, when_used="json"),
        WithJsonSchema(schema),
    ]


def _checked(bytes_min: int, bytes_max: int, limit: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        try:
            match value:
                case str():
                    text = value
                case {"b64": str(digits), **rest} if not rest:
                    text = decoded(digits)
                case _:
                    raise _refused("must be text, or an object with the one member b64")
            length = len(text.encode(errors="surrogateescape"))
        except binascii.Error:
            raise _refused("holds what is not base64") from None
        except UnicodeEncodeError:
            raise _refused("holds a surrogate that stands for no byte") from None
        if "\0" in text:
            raise _refused("holds a NUL, which no argument, variable or path can")
        if length < bytes_min:
            raise _refused("must not be empty")
        if length > bytes_max:
            raise PydanticCustomError("too_long", limit, {"bytes": length})
        return text

    return check


def _refused(words: str) -> PydanticCustomError:
    return PydanticCustomError("text", words)


if TYPE_CHECKING:
    Path: TypeAlias = str
    Arg: TypeAlias = str
else:
    Path = text_of(limits.PATH_BYTES_MAX, bytes_min=1)
    Arg = text_of(
        limits.EXEC_ARG_BYTES_MAX,
        " in one argument or variable: send it by `stdin`, or as a file by `files.write`",
    )


def few(args: object) -> object:
    """Refuse more arguments than there can be, with the way out."""
    if isinstance(args, list) and len(args) > limits.EXEC_ARGS_MAX:
        raise PydanticCustomError(
            "too_many",
            "has {count} arguments; at most {most} are possible: send them by `stdin`, or as a "
            "file by `files.write`",
            {"count": len(args), "most": limits.EXEC_ARGS_MAX},
        )
    return args
