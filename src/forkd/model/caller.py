"""Who asks: the first argument of every use case.

Rights and ownership are decided in `forkd.service` from this value alone, so that they can be
tested without HTTP.  The daemon makes one for each request.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from forkd.errors import Forbidden

Tenant = NewType("Tenant", str)

DEFAULT_TENANT = Tenant("default")
"""Whose everything is on a host where nobody made tenants."""


class Scope(StrEnum):
    """What a caller may do."""

    READ = "read"
    RUN = "run"
    SNAPSHOTS = "snapshots"
    METRICS = "metrics"
    ADMIN = "admin"


ALL_SCOPES = frozenset(Scope)

TENANT_SCOPES = ALL_SCOPES - {Scope.ADMIN, Scope.METRICS}
"""What tells and changes nothing of other tenants."""

OBJECTS_MAX = 20_000
"""Most objects that are remembered of one request: a fork and a branch of the most sandboxes."""


@dataclass(slots=True)
class Request:
    """What one request to a front end is about.

    Attributes:
        id: For logs, unique.
        objects: Sandboxes, snapshots and others that it touched or made, in that order.
        error: Code of the error that was its answer, or the end of its answer.
    """

    id: str
    objects: dict[str, None] = field(default_factory=dict)
    error: str | None = None


current_request: ContextVar[Request | None] = ContextVar("current_request", default=None)
"""The request on whose behalf a task runs; tasks inherit it."""


def request_id() -> str | None:
    """Return the id of the request on whose behalf this runs; None if there is none."""
    request = current_request.get()
    return None if request is None else request.id


def touch(subject: str) -> None:
    """Note that the request touches or makes an object, for the audit log."""
    request = current_request.get()
    if request is not None and len(request.objects) < OBJECTS_MAX:
        request.objects[subject] = None


def note_error(code: str) -> None:
    """Note that the request's answer is, or ends with, an error, for the audit log."""
    request = current_request.get()
    if request is not None:
        request.error = code


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a sandbox or a snapshot is.

    Attributes:
        tenant: Who may see and touch it.
        principal: Who made it: a token's name, a user, or `forkd` itself.
    """

    tenant: Tenant = DEFAULT_TENANT
    principal: str = "forkd"


DEFAULT_OWNER = Owner()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what for.

    Attributes:
        principal: Who: a token's name, or a user of this host.
        tenant: On whose behalf.
        scopes: What it may do; `admin` includes the others.
        request_id: For logs, unique.
    """

    principal: str
    tenant: Tenant
    scopes: frozenset[Scope]
    request_id: str

    @property
    def owner(self) -> Owner:
        """Whose things are that this caller makes."""
        return Owner(self.tenant, self.principal)

    @property
    def is_admin(self) -> bool:
        """Whether it sees and touches what belongs to any tenant."""
        return Scope.ADMIN in self.scopes

    def require(self, scope: Scope) -> None:
        """Return if the caller has a scope.

        Raises:
            Forbidden: It has not.
        """
        if scope not in self.scopes and not self.is_admin:
            raise Forbidden(
                f"{self.principal} lacks the scope {scope}; it has "
                f"{', '.join(sorted(self.scopes)) or 'none'}",
                scope=scope,
            )

    def may_touch(self, owner: Owner) -> bool:
        """Whether what belongs to `owner` exists for this caller."""
        return self.is_admin or owner.tenant == self.tenant


def local_caller(request_id: str = "local") -> Caller:
    """Return a caller that may do anything: whoever runs this process."""
    return Caller("forkd", DEFAULT_TENANT, ALL_SCOPES, request_id)
