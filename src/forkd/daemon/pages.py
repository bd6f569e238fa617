"""Lists in pages, over HTTP: which part a query asks for, and the header that names the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from forkd.model.paging import PageRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fastapi import Response

    from forkd.model.image import CachedImage
    from forkd.model.paging import Key
    from forkd.model.sandbox import Sandbox
    from forkd.model.secret import Secret
    from forkd.model.tenant import TenantUsage
    from forkd.model.token import Token
    from forkd.wire.parts import Page

T = TypeVar("T")

NEXT = "Forkd-Next"
"""The header of an answer that is a part of a list: the `after` of the next part."""

FAR_FUTURE_S = 1e12
"""Later than any time of a file that people have."""

PAGED: dict[int | str, dict[str, Any]] = {
    200: {
        "headers": {
            NEXT: {
                "description": "The `after` of the next part, if there is more.",
                "schema": {"type": "string"},
            }
        }
    }
}
"""What OpenAPI says of such an answer."""


def page_of(
    items: Iterable[T], key: Callable[[T], Key], asked: Page, response: Response
) -> tuple[T, ...]:
    """Return the part of a list that is asked for, sorted; the header says where the next begins.

    Raises:
        InvalidRequest: `after` is no value of that header.
    """
    if asked.limit is None and asked.after is None:
        return tuple(items)
    found = PageRequest(asked.limit, asked.after).of(items, key)
    if found.next is not None:
        response.headers[NEXT] = found.next
    return found.items


def by_name(named: Token | TenantUsage) -> Key:
    """Return by what tokens and tenants are sorted."""
    return (named.name,)


def by_age(sandbox: Sandbox) -> Key:
    """Return by what sandboxes are sorted: the oldest first."""
    return f"{sandbox.created_at.timestamp():020.6f}", sandbox.id


def by_last_use(image: CachedImage) -> Key:
    """Return by what images are sorted: the one that was used last first."""
    return f"{FAR_FUTURE_S - image.used_at_s:020.6f}", image.key


def by_owner(secret: Secret) -> Key:
    """Return by what secrets are sorted."""
    return secret.tenant, secret.name
