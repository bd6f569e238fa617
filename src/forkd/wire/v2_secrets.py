"""Secrets, on the wire: what is set, and what is told of it, which is never the value.

The rules are those of `wire.v2`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from forkd import limits
from forkd.wire.parts import Answer, Query, Request


class SecretSet(Request):
    """Set a secret, in the place of one of its name."""

    model_config = ConfigDict(hide_input_in_errors=True)

    value: str = Field(
        repr=False,
        min_length=limits.SECRET_VALUE_BYTES_MIN,
        max_length=limits.SECRET_VALUE_BYTES_MAX,
        description="Printable ASCII without line breaks; it is told to nobody.",
    )
    hosts: list[str] = Field(
        min_length=1,
        max_length=limits.SECRET_HOSTS_MAX,
        description="Names that it is for, such as `api.example.com`, `*.example.com:8443`; "
        "without a port, 443. It goes to them over TLS only.",
    )
    header: str = Field(
        default="Authorization",
        min_length=1,
        max_length=limits.SECRET_HEADER_CHARS_MAX,
        description="The header of a request in which it takes the place of its placeholder.",
    )
    env: Annotated[str | None, Field(pattern=limits.SECRET_ENV_PATTERN)] = Field(
        default=None, description="The variable that has its placeholder in sandboxes."
    )


class SecretOf(Query):
    """Whose secret is meant."""

    tenant: Annotated[str, Field(pattern=limits.NAME_PATTERN)] | None = Field(
        default=None, description="Another tenant than one's own, which takes `admin`."
    )


class SecretInfo(Answer):
    """A secret, without its value."""

    name: str
    tenant: str
    hosts: list[str]
    header: str
    env: str | None
    placeholder: str = Field(description="What a sandbox writes where the value belongs.")
    created_at_unix: int
