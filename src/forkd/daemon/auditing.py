"""What the audit log has of each request.

An action is an operation of ours by its id, or a method and the template of a path; never the path
itself, which a client has chosen.  Ids are those that the service has looked up or made.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from fastapi.routing import RouteContext, iter_route_contexts
from starlette.routing import Mount

from forkd import errors
from forkd.daemon.errors import STATUS, status_of
from forkd.daemon.peers import CALLER, OPEN_PATHS, PEER_PID, PEER_UID
from forkd.host import files
from forkd.host.faults import kernel_call
from forkd.telemetry.audit import AuditLog, Entry, Result

if TYPE_CHECKING:
    import re
    from collections.abc import Generator, Iterable, Iterator
    from typing import Protocol

    from starlette.routing import BaseRoute
    from starlette.types import Scope

    from forkd.daemon.settings import Settings
    from forkd.model.caller import Caller, Request

    class Answer(Protocol):
        """How much of an answer was sent."""

        status: int | None
        ended: bool


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
READS = frozenset({"GET", "HEAD", "OPTIONS"})

OURSELVES = "forkd"
"""Principal of what the daemon does by itself."""


class Actions:
    """Names what a request is about.

    Args:
        routes: Those of the application.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes = tuple(_named(tuple(routes)))

    def of(self, scope: Scope) -> str:
        """Return the action of a request, routed or not."""
        method = None if scope["type"] == "websocket" else str(scope["method"])
        path = str(scope["path"])
        for prefix, pattern, methods, name in self._routes:
            has_method = methods is None if method is None else method in (methods or ())
            if has_method and path.startswith(prefix) and pattern.match(path[len(prefix) :]):
                return name
        said = "WEBSOCKET" if method is None else method if method in METHODS else "OTHER"
        return f"{said} *"


def _named(
    routes: tuple[BaseRoute, ...], prefix: str = ""
) -> Iterator[tuple[str, re.Pattern[str], frozenset[str] | None, str]]:
    """Yield each route, also those of what is mounted: prefix, pattern, methods, action."""
    for route in iter_route_contexts(routes):
        if hasattr(route, "path_regex"):
            yield prefix, route.path_regex, _methods(route), _name(route)
    for mount in routes:
        if isinstance(mount, Mount):
            yield from _named(tuple(mount.routes), prefix + mount.path)


def _methods(route: RouteContext) -> frozenset[str] | None:
    methods = getattr(route, "methods", None)
    return None if methods is None else frozenset(methods)


def _name(route: RouteContext) -> str:
    operation = getattr(route, "operation_id", None)
    if operation:
        return str(operation)
    methods = _methods(route)
    kind = "WEBSOCKET" if methods is None else min(methods - {"HEAD"} or methods)
    return f"{kind} {getattr(route, 'path', '*')}"


class Auditor:
    """Writes down requests, and what happens to the daemon.

    Args:
        log: Where to; None for nowhere.
    """

    def __init__(self, log: AuditLog | None = None) -> None:
        self.log = log
        self._actions = Actions(())

    def name_by(self, routes: Iterable[BaseRoute]) -> None:
        """Have requests named by these routes."""
        self._actions = Actions(routes)

    def check(self, scope: Scope) -> None:
        """Return if a request may be served that will be written down.

        Raises:
            CapacityError: It changes something, and nothing can be written down.
        """
        if self.log is None or scope["path"] in OPEN_PATHS:
            return
        if scope["type"] == "websocket" or scope["method"] not in READS:
            self.log.check()

    @contextlib.contextmanager
    def request(
        self, scope: Scope, request: Request, answer: Answer
    ) -> Generator[None, None, None]:
        """Write down the request that the block serves, when it is over."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            caller: Caller | None = scope.get(CALLER)
            result = _result(request.error, answer, is_known=caller is not None)
            # Whether we live is asked all the time, by anybody, and changes nothing.
            if self.log is not None and (scope["path"] not in OPEN_PATHS or result != Result.OK):
                entry = Entry(
                    action=self._actions.of(scope),
                    result=result,
                    request=request.id,
                    principal=None if caller is None else caller.principal,
                    tenant=None if caller is None else caller.tenant,
                    remote=_remote(scope),
                    objects=tuple(request.objects),
                    error=request.error,
                    status=answer.status,
                    latency_ms=round((time.monotonic() - began_s) * 1_000, 3),
                )
                self.log.note(entry)

    def event(self, action: str, error: str | None = None, *objects: str) -> None:
        """Write down what happened to the daemon itself."""
        if self.log is not None:
            result = Result.OK if error is None else Result.FAILED
            entry = Entry(action, result, principal=OURSELVES, objects=objects, error=error)
            self.log.note(entry)

    def denied(self, action: str, remote: str, error: str) -> None:
        """Write down that somebody was turned away before a request could be read."""
        if self.log is not None:
            self.log.note(Entry(action, Result.DENIED, remote=remote, error=error))

    def reopen(self) -> None:
        """Go on in the file that has the name now.

        Raises:
            ForkdError: It cannot be used; the old one stays in use.
        """
        if self.log is not None:
            with kernel_call(f"open the audit log {self.log.path}"):
                self.log.reopen()


@contextlib.contextmanager
def audit_log(settings: Settings) -> Generator[AuditLog | None, None, None]:
    """Have the audit log that an operator wants, for the block.

    Raises:
        InvalidRequest: Others may read the file, or it is none.
        HostError: The kernel refused.
    """
    path = settings.audit_path
    if path is None:
        yield None
        return
    files.make_folder(path.parent, parents=True, exist_ok=True)
    with kernel_call(f"open the audit log {path}"):
        log = AuditLog(path, settings.audit_full)
    with contextlib.closing(log):
        yield log


def _codes(kind: type[errors.ForkdError]) -> Generator[tuple[str, int], None, None]:
    yield kind.code, status_of(kind)
    for each in kind.__subclasses__():
        yield from _codes(each)


_STATUS_OF_CODE = dict(_codes(errors.ForkdError))

_DENIED = frozenset({STATUS[errors.Denied], STATUS[errors.Forbidden]})


def _result(error: str | None, answer: Answer, *, is_known: bool) -> Result:
    """Return how a request ended: an error may come after a status that promised none.

    Who was refused before anybody knew who it is, such as after too many failed log-ins, was
    denied.
    """
    if error is not None:
        status = _STATUS_OF_CODE[error]
    elif not answer.ended or answer.status is None:
        return Result.CANCELLED
    else:
        status = answer.status
    if status in _DENIED or (status == STATUS[errors.CapacityError] and not is_known):
        return Result.DENIED
    if status < STATUS[errors.RequestError]:
        return Result.OK
    # A host that is full refuses, and breaks nothing.
    is_refused = status < STATUS[errors.ForkdError] or status == STATUS[errors.CapacityError]
    return Result.REFUSED if is_refused else Result.FAILED


def _remote(scope: Scope) -> str:
    state: dict[str, Any] = scope.get("state", {})
    if state.get(PEER_UID) is not None:
        return f"unix:uid={state[PEER_UID]},pid={state[PEER_PID]}"
    host, port = scope.get("client") or ("", 0)
    return host_and_port(host, port)


def host_and_port(host: str, port: int) -> str:
    """Return an address as URLs have it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
