"""Lists in pages: which part of a sorted list an answer has, and where the next one begins.

The cursor is the key of the last element of a page, so that pages stay right while elements come
and go: whoever follows it meets each element that is there all the time, once.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from forkd import limits
from forkd.errors import InvalidRequest
from forkd.model.checks import in_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

Key = tuple[str, ...]
"""By what a list is sorted: unique, and the same for as long as the element is there."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list.

    Attributes:
        items: What is in it.
        next: What to ask for to get the next part; None if this is the last.
    """

    items: tuple[T, ...]
    next: str | None = None


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Which part of a list is wanted.

    Attributes:
        limit: Most elements; None for all.
        after: The `next` of the part before; None for the first.

    Raises:
        InvalidRequest: `limit` is out of range, or `after` is no `next` of a page.
    """

    limit: int | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        if self.limit is not None:
            in_range("limit", self.limit, 1, limits.LIST_LIMIT_MAX)
        if self.after is not None:
            _decode(self.after)

    def of(self, items: Iterable[T], key: Callable[[T], Key]) -> Page[T]:
        """Return that part of `items`, sorted by `key`."""
        found = sorted(items, key=key)
        if self.after is not None:
            last = _decode(self.after)
            found = [each for each in found if key(each) > last]
        if self.limit is None or len(found) <= self.limit:
            return Page(tuple(found))
        page = tuple(found[: self.limit])
        return Page(page, _encode(key(page[-1])))


def _encode(key: Key) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def _decode(text: str) -> Key:
    try:
        padded = text + "=" * (-len(text) % 4)
        found = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise InvalidRequest(
            f"after must be what Forkd-Next said of the page before, not {text[:80]!r}",
            field="after",
        )
    return tuple(found)
