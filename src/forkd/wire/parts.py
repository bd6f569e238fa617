"""What requests and answers of the REST API have in common: their bases, and types of members.

The rules are those of `wire.v2`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError, PydanticKnownError

from forkd import limits
from forkd.wire.text import Arg

DEFAULT_TTL: Literal["default"] = "default"
"""The `ttl_secs` of whoever leaves the time to the daemon."""

Tag = Annotated[str, Field(pattern=limits.TAG_PATTERN, description="Name of a snapshot.")]
Recipe = Annotated[
    str,
    Field(
        min_length=1,
        max_length=limits.PATH_BYTES_MAX,
        description="Name of a recipe of the daemon's host, absolute path in one of its folders of "
        "recipes, or the `recipe` that an upload answered.",
    ),
]
ImageName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=limits.PATH_BYTES_MAX,
        description="An image of a registry, such as `python:3.12-slim`; or the `recipe` that an "
        "upload answered, or the name of a recipe of the daemon's host, which goes first.",
    ),
]
RunLine = Annotated[str, Field(min_length=1, max_length=limits.RUN_LINE_CHARS_MAX)]
MemoryMib = Annotated[int, Field(ge=limits.MEMORY_MIB_MIN, le=limits.MEMORY_MIB_MAX)]
Vcpus = Annotated[int, Field(ge=1, le=limits.VCPUS_MAX)]
DiskMib = Annotated[int, Field(ge=limits.DISK_MIB_MIN, le=limits.DISK_MIB_MAX)]
SecretName = Annotated[str, Field(pattern=limits.NAME_PATTERN)]
Number = Annotated[float, Field(allow_inf_nan=False)]


def _network(given: object) -> object:
    """Refuse what is no policy at all with one error, instead of one for each kind it may be."""
    rules = given if isinstance(given, list) else [given]
    if not isinstance(given, bool) and not all(isinstance(rule, str) for rule in rules):
        raise ValueError("true, false, a rule, or a list of rules")
    return given


Network = Annotated[bool | str | list[str], BeforeValidator(_network)]
TimeoutSecs = Annotated[Number, Field(ge=0.001, le=limits.EXEC_TIMEOUT_S_MAX)]


class Request(BaseModel):
    """What a client sends: frozen, strict, without members we do not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Query(BaseModel):
    """A request's query string: text, so `strict` has no place here."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Answer(BaseModel):
    """What a client receives."""

    model_config = ConfigDict(frozen=True)


class Page(Query):
    """Which part of a list; without `limit`, all of it."""

    limit: int | None = Field(
        default=None,
        ge=1,
        le=limits.LIST_LIMIT_MAX,
        description="Most elements of the answer; a header `Forkd-Next` says if there are more.",
    )
    after: str | None = Field(
        default=None,
        min_length=1,
        max_length=limits.CURSOR_CHARS_MAX,
        description="What `Forkd-Next` said: go on from there.",
    )


def _ttl(given: object) -> float | Literal["default"]:
    if given == DEFAULT_TTL:
        return DEFAULT_TTL
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise PydanticCustomError("ttl", "must be a number of seconds, or `default`")
    if given < limits.TTL_S_MIN:
        raise PydanticKnownError("greater_than_equal", {"ge": limits.TTL_S_MIN})
    if not given <= limits.TTL_S_MAX:
        raise PydanticKnownError("less_than_equal", {"le": limits.TTL_S_MAX})
    return float(given)


def _labels(given: object) -> dict[str, str]:
    """Take an object of text; the daemon checks what is in it, with one error that names it."""
    if not isinstance(given, dict) or not all(
        isinstance(each, str) for pair in given.items() for each in pair
    ):
        raise PydanticCustomError("labels", "must be an object whose values are text")
    if len(given) > limits.LABELS_MAX:
        raise ValueError(f"has {len(given)} labels; at most {limits.LABELS_MAX} are possible")
    return given


def _label_changes(given: object) -> dict[str, str | None]:
    """Take an object of text and null, likewise."""
    if not isinstance(given, dict) or not all(
        isinstance(key, str) and (value is None or isinstance(value, str))
        for key, value in given.items()
    ):
        raise PydanticCustomError("labels", "must be an object whose values are text or null")
    if len(given) > limits.LABELS_MAX:
        raise ValueError(f"has {len(given)} labels; at most {limits.LABELS_MAX} are possible")
    return given


SandboxName = Annotated[str, Field(pattern=limits.SANDBOX_NAME_PATTERN)]
IdleTtlSecs = Annotated[Number, Field(ge=limits.TTL_S_MIN, le=limits.TTL_S_MAX)]
TtlSecs = Annotated[
    float | Literal["default"],
    PlainValidator(_ttl),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": limits.TTL_S_MIN, "maximum": limits.TTL_S_MAX},
                {"type": "string", "const": DEFAULT_TTL},
            ]
        }
    ),
]
Labels = Annotated[
    dict[str, str],
    PlainValidator(_labels),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": limits.LABELS_MAX,
            "propertyNames": {"minLength": 1, "maxLength": limits.LABEL_KEY_CHARS_MAX},
            "additionalProperties": {"type": "string", "maxLength": limits.LABEL_VALUE_CHARS_MAX},
        }
    ),
]
LabelChanges = Annotated[
    dict[str, str | None],
    PlainValidator(_label_changes),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": limits.LABELS_MAX,
            "propertyNames": {"minLength": 1, "maxLength": limits.LABEL_KEY_CHARS_MAX},
            "additionalProperties": {
                "anyOf": [
                    {"type": "string", "maxLength": limits.LABEL_VALUE_CHARS_MAX},
                    {"type": "null"},
                ]
            },
        }
    ),
]
Env = Annotated[dict[str, Arg], Field(max_length=limits.EXEC_ENV_MAX)]
