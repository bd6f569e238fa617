"""Every error forkd raises on purpose.

ForkdError
├── RequestError             the caller can fix it; nothing was changed
│   ├── InvalidRequest       a field is malformed or out of range
│   ├── Denied               the caller is unknown: no token, or not a valid one
│   ├── Forbidden            the caller is known, and may not do this
│   ├── QuotaExceeded        the tenant may not have so much
│   ├── NotFound             no such sandbox, snapshot, recipe, file or program
│   ├── Conflict             the object exists but its state forbids this
│   │   └── BudgetError      its tree may not grow any more
│   ├── IdempotencyMismatch  another request came with the same Idempotency-Key
│   ├── PackError            a pack is damaged, hostile, unsigned or not trusted
│   └── ClientClosed         the client was closed before this call (SDK only)
├── CapacityError            the host is full; the same call may work later
│   └── Busy                 the sandbox is; nothing was started
├── BuildError               an image or a bake failed for a reason of its own
│   └── WarmUpError          the warm-up failed, or never became ready
├── StoreError               bytes on disk are missing, damaged or too new
│   └── ChainError           a snapshot's parents do not lead to a base
├── EngineError              a VMM or guest agent misbehaved
│   ├── EngineTimeout        it did not answer before the deadline
│   ├── EngineExited         its process is gone
│   │   └── SandboxLost      a task's sandbox ended before the task did (SDK only)
│   └── GuestError           the guest's agent refused an operation, with a code of its own
│       ├── ExecTimeout      a program or code ran out of time (SDK only)
│       ├── CommandError     a program exited with a code other than 0 (SDK only)
│       └── TaskError        a task raised what cannot be raised again here (SDK only)
├── HostError                the kernel refused us (netlink, cgroup, KVM)
└── TransportError           a client could not reach the daemon (SDK only)

Catch the narrowest class you can act on, `ForkdError` at a boundary, and never
`Exception`.  A bare `AssertionError` or `TypeError` is our bug: let it escape.

Each class carries a `code`, which is what travels on the wire and what clients
match on.  Codes are never renamed; messages may be reworded at any time.
"""

from __future__ import annotations

from typing import Any, ClassVar

HINTS = {
    "not_found:sandbox": "`client.sandboxes.list()` has every sandbox that is left",
    "not_found:tag": "`client.snapshots.list()` has every snapshot; `create()` makes one",
    "not_found:secret": "`client.secrets.list()` has every secret",
    "not_found:program": "name a program of the image; `sandbox.run()` takes a line for the shell",
    "denied": "pass `Client(token=…)`, or set FORKD_TOKEN",
    "forbidden": "use a token that has the scope, or ask the operator for one",
    "quota": "end or delete something of the tenant's, or ask the operator for a larger quota",
    "capacity": "the same call may work later",
    "busy": "the same call may work later",
    "host": "`forkd doctor` on the daemon's host checks what the host can do",
    "client_closed": "make the call before the client's block ends, or make another client",
    "sandbox_lost": "run the task again, or pass `ForkExecutor(…, retries=1)` if it may run twice",
    "exec_timeout": "pass a longer `timeout_s`, or `check=False` to have the output as a result",
}
"""What a program can do about an error, by its code, or by its code and a key of its context."""


class ForkdError(Exception):
    """Root of the tree of errors; raise one of its leaves instead.

    Attributes:
        code: Stable name of the class on the wire.
        retryable: Whether the same call may succeed later, unchanged.
        context: Ids and numbers that belong to the message, never secrets.  The
            key `field` names the request field at fault, where there is one.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, /, **context: str | int) -> None:
        super().__init__(message)
        self.context = context

    @property
    def hint(self) -> str | None:
        """What to do about it; None if the message says all that is known."""
        keys = [*(f"{self.code}:{each}" for each in self.context), self.code]
        return next((HINTS[each] for each in keys if each in HINTS), None)


class RequestError(ForkdError):
    """The request cannot be carried out as written."""

    code = "request"


class InvalidRequest(RequestError):
    """A field is malformed or out of range; `context["field"]` names it."""

    code = "invalid_request"


class Denied(RequestError):
    """The caller is unknown: there is no bearer token, or not a valid one."""

    code = "denied"


class Forbidden(RequestError):
    """The caller may not do this; `context` names the missing `scope` or the wrong `header`."""

    code = "forbidden"


class QuotaExceeded(RequestError):
    """The tenant may not have so much; `context` has `quota`, `asked`, `limit` and `used`."""

    code = "quota"


class NotFound(RequestError):
    """The named sandbox, snapshot, recipe, file or program does not exist."""

    code = "not_found"


class Conflict(RequestError):
    """The object exists, but its state forbids this."""

    code = "conflict"


class IdempotencyMismatch(RequestError):
    """Another request has come with the same Idempotency-Key; nothing was done for this one."""

    code = "idempotency_mismatch"


class PackError(RequestError):
    """A pack is damaged, hostile, unsigned or not trusted; `context["reason"]` says which."""

    code = "pack"


class ClientClosed(RequestError):
    """The client was closed before this call; nothing was sent."""

    code = "client_closed"


class BudgetError(Conflict):
    """The sandbox's tree has used up a budget; `context["budget"]` names it."""

    code = "budget"


class CapacityError(ForkdError):
    """The host is out of memory, disk, slots or addresses."""

    code = "capacity"
    retryable = True


class Busy(CapacityError):
    """The sandbox runs as much at once as it can; nothing of this was started."""

    code = "busy"


class BuildError(ForkdError):
    """An image could not be built, or a machine not baked."""

    code = "build"


class WarmUpError(BuildError):
    """The warm-up raised, or did not become ready in time."""

    code = "warm_up"


class StoreError(ForkdError):
    """Bytes on disk are missing, damaged or too new."""

    code = "store"


class ChainError(StoreError):
    """A snapshot's parents do not lead to a base."""

    code = "chain"


class EngineError(ForkdError):
    """A VMM or a guest agent misbehaved."""

    code = "engine"


class EngineTimeout(EngineError):
    """It did not answer before the deadline."""

    code = "engine_timeout"


class EngineExited(EngineError):
    """Its process is gone."""

    code = "engine_exited"


class SandboxLost(EngineExited):
    """A task's sandbox ended, or was not reached any more, before the task had ended."""

    code = "sandbox_lost"


class GuestError(EngineError):
    """The guest's agent refused an operation; `context["guest_code"]` says why."""

    code = "guest"


class ExecTimeout(GuestError):
    """A program or code ran out of time and was ended; `result` has its output so far.

    Attributes:
        result: The `ExecResult` or `EvalResult` up to that moment.
    """

    code = "exec_timeout"

    def __init__(
        self,
        message: str,
        /,
        *,
        result: Any = None,  # noqa: ANN401 - of the SDK, which is above this module
        **context: str | int,
    ) -> None:
        super().__init__(message, **context)
        self.result = result


class CommandError(GuestError):
    """A program exited with a code other than 0; `result` has its output.

    Attributes:
        result: The `ExecResult`.
    """

    code = "command"

    def __init__(
        self,
        message: str,
        /,
        *,
        result: Any = None,  # noqa: ANN401 - of the SDK, which is above this module
        **context: str | int,
    ) -> None:
        super().__init__(message, **context)
        self.result = result


class TaskError(GuestError):
    """A task raised an exception, or returned a value, that cannot be made again here."""

    code = "task"


class HostError(ForkdError):
    """The kernel refused us: netlink, cgroup, KVM."""

    code = "host"


class TransportError(ForkdError):
    """The client could not reach the daemon."""

    code = "transport"
    retryable = True
