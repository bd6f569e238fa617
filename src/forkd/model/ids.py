"""Names of things: sandbox ids, which we make, and tags, which users choose.

Both end up in paths, cgroup names and logs, so both are checked where they
enter, and a value of these types has passed the check.
"""

from __future__ import annotations

import base64
import re
import secrets
from typing import TYPE_CHECKING, NewType

from forkd.errors import InvalidRequest, NotFound
from forkd.limits import SANDBOX_ID_PATTERN, SANDBOX_NAME_PATTERN
from forkd.model.listing import some

if TYPE_CHECKING:
    from collections.abc import Iterable

SandboxId = NewType("SandboxId", str)
SandboxName = NewType("SandboxName", str)
Tag = NewType("Tag", str)

TAG_CHARS_MAX = 64
"""Longest tag; room for a suffix remains in a file name of 255 bytes."""

SANDBOX_ID_PREFIX = "sb-"
"""Begins every id of a sandbox."""

_SANDBOX_ID = re.compile(SANDBOX_ID_PATTERN.removesuffix("$"))
_SANDBOX_NAME = re.compile(SANDBOX_NAME_PATTERN.removesuffix("$"))
_SANDBOX_ID_START = re.compile(r"[a-z2-7]{1,26}")
_TAG = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{TAG_CHARS_MAX - 1}}}")
_ID_BYTES = 16


def new_sandbox_id() -> SandboxId:
    """Return an id that nobody can guess: 128 random bits."""
    text = base64.b32encode(secrets.token_bytes(_ID_BYTES)).decode().rstrip("=").lower()
    return SandboxId(f"sb-{text}")


def parse_sandbox_id(text: str, *, field: str = "id") -> SandboxId:
    """Return `text` as an id.

    Raises:
        InvalidRequest: It is none; `context["field"]` is `field`.
    """
    if _SANDBOX_ID.fullmatch(text) is None:
        raise InvalidRequest(
            f"{field} is not a sandbox id (sb- and 26 of a-z, 2-7): {text[:80]!r}", field=field
        )
    return SandboxId(text)


def parse_sandbox_name(text: str, *, field: str = "name") -> SandboxName:
    """Return `text` as the name of a sandbox.

    Raises:
        InvalidRequest: It is none, or is an id; `context["field"]` is `field`.
    """
    if _SANDBOX_NAME.fullmatch(text) is None:
        raise InvalidRequest(
            f"{field} must be a lower-case letter or digit, then up to 62 of these, '.', '_' and "
            f"'-': {text[:80]!r}",
            field=field,
        )
    if is_sandbox_id(text):
        raise InvalidRequest(f"{field} is an id of a sandbox, not a name: {text}", field=field)
    return SandboxName(text)


def parse_sandbox_ref(text: str, *, field: str = "id") -> SandboxId | SandboxName:
    """Return `text` as the id of a sandbox if it is one, and else as a name.

    Raises:
        InvalidRequest: It is neither; `context["field"]` is `field`.
    """
    if is_sandbox_id(text):
        return SandboxId(text)
    if _SANDBOX_NAME.fullmatch(text) is None:
        raise InvalidRequest(
            f"{field} is neither a sandbox id (sb- and 26 of a-z, 2-7) nor the name of a sandbox: "
            f"{text[:80]!r}",
            field=field,
        )
    return SandboxName(text)


def parse_sandbox_start(text: str, *, field: str = "id") -> str:
    """Return the beginning of an id, with `sb-` before it; a whole id is one, too.

    Raises:
        InvalidRequest: No id begins so; `context["field"]` is `field`.
    """
    start = text.removeprefix(SANDBOX_ID_PREFIX)
    if _SANDBOX_ID_START.fullmatch(start) is None:
        raise InvalidRequest(
            f"{field} is not the beginning of a sandbox id (sb- and 26 of a-z, 2-7): {text[:80]!r}",
            field=field,
        )
    return f"{SANDBOX_ID_PREFIX}{start}"


def may_begin_sandbox_id(text: str) -> bool:
    """Whether `text` can be the beginning of an id, with or without its `sb-`."""
    return _SANDBOX_ID_START.fullmatch(text.removeprefix(SANDBOX_ID_PREFIX)) is not None


def only_sandbox(start: str, ids: Iterable[SandboxId]) -> SandboxId:
    """Return the only one of the `ids`, all of which begin with `start`.

    Raises:
        NotFound: There is none.
        InvalidRequest: There are several; the message names some.
    """
    found = sorted(ids)
    if not found:
        raise NotFound(f"no sandbox {start}", sandbox=start)
    if len(found) > 1:
        raise InvalidRequest(f"{len(found)} ids begin with {start}: {some(found)}", field="id")
    return found[0]


def is_sandbox_id(text: str) -> bool:
    """Whether `text` is an id of a sandbox; it would be a tag as well."""
    return _SANDBOX_ID.fullmatch(text) is not None


def parse_tag(text: str, *, field: str = "tag") -> Tag:
    """Return `text` as a tag: a letter, digit or `_`, then up to 63 of these, `.` and `-`.

    Raises:
        InvalidRequest: It is none, or holds `..`; `context["field"]` is `field`.
    """
    if _TAG.fullmatch(text) is None or ".." in text:
        raise InvalidRequest(
            f"{field} must be a letter, digit or _, then up to {TAG_CHARS_MAX - 1} letters, "
            f"digits, _, . or - without '..': {text[:80]!r}",
            field=field,
        )
    return Tag(text)
