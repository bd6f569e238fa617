"""What a tenant may have, and what it has."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest
from forkd.limits import NAME_CHARS_MAX, NAME_PATTERN, QUOTA_MAX
from forkd.model.caller import Tenant
from forkd.model.checks import in_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_NAME = re.compile(NAME_PATTERN.removesuffix("$"))


def parse_name(text: str, *, field: str) -> str:
    """Return `text` as the name of a tenant or a token.

    Raises:
        InvalidRequest: It is none; `context["field"]` is `field`.
    """
    if _NAME.fullmatch(text) is None:
        raise InvalidRequest(
            f"{field} must be a lower-case letter or digit, then up to {NAME_CHARS_MAX - 1} of "
            f"these, '.', '_' and '-': {text[:80]!r}",
            field=field,
        )
    return text


def parse_tenant(text: str, *, field: str = "tenant") -> Tenant:
    """Return `text` as a tenant; raises as `parse_name`."""
    return Tenant(parse_name(text, field=field))


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much of each thing that has a quota.

    Attributes:
        sandboxes: Sandboxes that have not ended.
        vcpus: Virtual CPUs of these, and of machines that are baked.
        memory_mib: Memory that these may use: their limit, or what their guests have.  The memory
            of zygotes and of seeds besides, and what a build of an image may use.
        disk_mib: Private disk that these may use: their limit, or the size of their disk.
        snapshot_mib: What snapshots and uploaded recipes take in the store.
        forks_per_minute: Sandboxes forked or branched within the last minute.
    """

    sandboxes: int = 0
    vcpus: int = 0
    memory_mib: int = 0
    disk_mib: int = 0
    snapshot_mib: int = 0
    forks_per_minute: int = 0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(*(getattr(self, name) + getattr(other, name) for name in QUOTAS))

    def __mul__(self, count: int) -> Amounts:
        return Amounts(*(getattr(self, name) * count for name in QUOTAS))

    def __sub__(self, other: Amounts) -> Amounts:
        return Amounts(*(getattr(self, name) - getattr(other, name) for name in QUOTAS))


QUOTAS = tuple(field.name for field in fields(Amounts))
"""What has a quota, by name."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """The most of each thing that a tenant may have; None for no limit.

    Raises:
        InvalidRequest: One is negative, or more than `QUOTA_MAX`.
    """

    sandboxes: int | None = None
    vcpus: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    snapshot_mib: int | None = None
    forks_per_minute: int | None = None

    def __post_init__(self) -> None:
        for name in QUOTAS:
            value = getattr(self, name)
            if value is not None:
                in_range(name, value, 0, QUOTA_MAX)

    def exceeded(self, used: Amounts, asked: Amounts) -> Iterator[tuple[str, int, int, int]]:
        """Yield name, what was asked for, the limit and what is in use, of each exceeded quota."""
        for name in QUOTAS:
            limit, more = getattr(self, name), getattr(asked, name)
            in_use = getattr(used, name)
            if limit is not None and more > 0 and in_use + more > limit:
                yield name, more, limit, in_use


@dataclass(frozen=True, slots=True)
class QuotasChange:
    """Which quotas of a tenant are to become different.

    Attributes:
        limits: New limits by the quota's name; None lifts the limit.

    Raises:
        InvalidRequest: There is none; or one is negative, or more than `QUOTA_MAX`.
    """

    limits: Mapping[str, int | None]

    def __post_init__(self) -> None:
        if not self.limits:
            raise InvalidRequest(
                f"there is nothing to change: give {', '.join(QUOTAS[:-1])} or {QUOTAS[-1]}",
                field=QUOTAS[0],
            )
        self.of(Quotas())

    def of(self, quotas: Quotas) -> Quotas:
        """Return quotas with what is to become different."""
        return replace(quotas, **self.limits)


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """A tenant, what it may have and what it has."""

    name: Tenant
    quotas: Quotas
    used: Amounts
