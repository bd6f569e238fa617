"""The names of the reference's Python package, so that code written for it goes on.

`Controller` asks `/v1`, which is that implementation's protocol, and hands on what it answers;
`Sandbox` is one sandbox of it, made through our own client.  A daemon is found as `discover` finds
it.  docs/howto/move-from-forkd.md says what differs.  New code wants `Client`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias
from urllib.parse import quote

from forkd.errors import ForkdError, InvalidRequest
from forkd.sdk._endpoint import discover
from forkd.sdk._sync.client import Client
from forkd.sdk._transport import sync_http, timeout, transport_errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

BranchMode: TypeAlias = Literal["full", "diff", "live"]
"""What the reference can do for a branch; here each is the same."""

TAG_DEFAULT = "pyagent"
"""The snapshot of a `Sandbox` that names none, unless `FORKD_TAG` does."""

SANDBOX_LIFE_S = 3_600.0
"""How long a `Sandbox` lives if nobody ends it, as there."""

TIMEOUT_MARGIN_S = 30.0
"""Time the daemon has beyond a program's own timeout."""

ERROR_STATUS = 400
NOT_FOUND = 404

Info: TypeAlias = dict[str, Any]
"""An object of the protocol, as JSON has it."""


class ControllerError(RuntimeError):
    """The daemon refused.

    Attributes:
        status: The HTTP status.
        body: What it answered: an object with `error`, or text.
        url: What was asked.
    """

    def __init__(self, status: int, body: Any, url: str) -> None:  # noqa: ANN401 - any JSON
        super().__init__(f"{url}: HTTP {status}: {body}")
        self.status = status
        self.body = body
        self.url = url


class Controller:
    """A daemon's snapshots and sandboxes.

    Args:
        base_url: Where it is; without one it is found as `Client` finds it.
        token: Its bearer token, over TCP.
        timeout: Seconds that an answer may take; programs have their own besides.
    """

    def __init__(
        self, base_url: str | None = None, token: str | None = None, timeout: float = 60.0
    ) -> None:
        self._endpoint = discover(base_url, token)
        self.base_url = self._endpoint.url.rstrip("/")
        self.token = self._endpoint.token
        self.timeout = timeout

    def list_snapshots(self) -> list[Info]:
        """Return every snapshot."""
        found: list[Info] = self._ask("GET", "/snapshots")
        return found

    def delete_snapshot(self, tag: str) -> None:
        """Remove a snapshot."""
        self._ask("DELETE", f"/snapshots/{quote(tag, safe='')}")

    def spawn_sandboxes(  # noqa: PLR0913, PLR0917 - the reference's
        self,
        snapshot_tag: str,
        n: int = 1,
        per_child_netns: bool = False,  # noqa: FBT001, FBT002 - the reference's
        memory_limit_mib: int | None = None,
        prewarm: bool = False,  # noqa: FBT001, FBT002 - likewise
        live_fork: bool = False,  # noqa: FBT001, FBT002 - likewise
        hugepages: bool = False,  # noqa: FBT001, FBT002 - likewise
    ) -> list[Info]:
        """Fork `n` sandboxes: all of them, or an error and none.

        With `per_child_netns` each has a network.  The last three options have no effect.
        """
        body = {
            "snapshot_tag": snapshot_tag,
            "n": n,
            "per_child_netns": per_child_netns,
            "memory_limit_mib": memory_limit_mib,
            "prewarm": prewarm,
            "live_fork": live_fork,
            "hugepages": hugepages,
        }
        made: list[Info] = self._ask("POST", "/sandboxes", body)
        return made

    def list_sandboxes(self) -> list[Info]:
        """Return every sandbox that has not ended."""
        found: list[Info] = self._ask("GET", "/sandboxes")
        return found

    def get_sandbox(self, sandbox_id: str) -> Info:
        """Return one sandbox."""
        found: Info = self._ask("GET", _path(sandbox_id))
        return found

    def kill_sandbox(self, sandbox_id: str) -> None:
        """End a sandbox."""
        self._ask("DELETE", _path(sandbox_id))

    def branch_sandbox(  # noqa: PLR0913, PLR0917 - the reference's
        self,
        sandbox_id: str,
        tag: str | None = None,
        diff: bool = False,  # noqa: FBT001, FBT002 - the reference's
        measure_diff: bool = False,  # noqa: FBT001, FBT002 - likewise
        mode: BranchMode | None = None,
        wait: bool = True,  # noqa: FBT001, FBT002 - likewise
    ) -> Info:
        """Write a running sandbox down as a snapshot; it goes on.

        `diff` is ignored beside `mode`.  `wait` may be false only if `mode` is `live`.
        """
        body = {
            "tag": tag,
            "mode": mode,
            "diff": diff and mode is None,
            "measure_diff": measure_diff,
            "wait": wait,
        }
        made: Info = self._ask("POST", f"{_path(sandbox_id)}/branch", body)
        return made

    def exec_command(self, sandbox_id: str, args: list[str], timeout_secs: int = 30) -> Info:
        """Run a program; return `stdout`, `stderr` and `exit_code`."""
        body = {"args": list(args), "timeout_secs": timeout_secs}
        wait_s = max(self.timeout, timeout_secs + TIMEOUT_MARGIN_S)
        ran: Info = self._ask("POST", f"{_path(sandbox_id)}/exec", body, wait_s)
        return ran

    def eval_code(self, sandbox_id: str, code: str) -> Info:
        """Run code in the warm runtime; return `result`, `error` and `exit_code`."""
        gave: Info = self._ask("POST", f"{_path(sandbox_id)}/eval", {"code": code})
        return gave

    def ping_sandbox(self, sandbox_id: str) -> Info:
        """Ask the agent in the guest how it is."""
        said: Info = self._ask("POST", f"{_path(sandbox_id)}/ping")
        return said

    def _ask(
        self, method: str, path: str, body: Info | None = None, wait_s: float | None = None
    ) -> Any:  # noqa: ANN401 - whatever the route answers
        """Return what one route answers.

        Raises:
            ControllerError: It refused.
            TransportError: It did not answer.
        """
        path = f"/v1{path}"
        wait = timeout(self.timeout if wait_s is None else wait_s)
        with transport_errors(self._endpoint), sync_http(self._endpoint) as http:
            answer = http.request(method, path, json=body, timeout=wait)
        if answer.status_code >= ERROR_STATUS:
            raise ControllerError(answer.status_code, _parsed(answer.content), self.base_url + path)
        return _parsed(answer.content) if answer.content else None


def _path(sandbox_id: str) -> str:
    return f"/sandboxes/{quote(sandbox_id, safe='')}"


def _parsed(text: bytes) -> Any:  # noqa: ANN401 - any JSON
    try:
        return json.loads(text or b"{}")
    except ValueError:
        return text.decode(errors="replace")


@dataclass
class CommandResult:
    """What a program wrote, and its exit code; see `wire.v1.ExecResult`."""

    stdout: str
    stderr: str
    exit_code: int


class Commands:
    """The programs of a `Sandbox`."""

    def __init__(self, controller: Controller, sandbox_id: str) -> None:
        self._controller = controller
        self._id = sandbox_id

    def run(self, cmd: str | Sequence[str], timeout: int = 30) -> CommandResult:
        """Run a program to its end; a string is read by `sh`."""
        args = ["/bin/sh", "-c", cmd] if isinstance(cmd, str) else list(cmd)
        return CommandResult(**self._controller.exec_command(self._id, args, timeout))


class Sandbox:
    """One sandbox; as a context manager it is ended at the end.

    Args:
        tag: The snapshot to fork; `FORKD_TAG`, else `pyagent`.
        target: With `spawn` false, the sandbox to use: its id, or its `guest_addr`; `FORKD_TARGET`
            if it is left out.
        timeout: Seconds that an evaluation may take beyond its own time.
        spawn: Whether to fork one.

    Attributes:
        commands: Its programs.
        target: Its id.
    """

    DEFAULT_TAG = os.environ.get("FORKD_TAG", TAG_DEFAULT)

    def __init__(
        self,
        tag: str | None = None,
        target: str | None = None,
        timeout: int = 30,
        *,
        spawn: bool = True,
    ) -> None:
        self.tag = tag or self.DEFAULT_TAG
        self.timeout = timeout
        self._controller = Controller(timeout=timeout + TIMEOUT_MARGIN_S)
        self._is_ours = spawn
        self.target = _forked(self.tag) if spawn else self._found(target)
        self.commands = Commands(self._controller, self.target)

    @classmethod
    def create(cls, *args: Any, **options: Any) -> Self:  # noqa: ANN401 - those of the class
        """Return a new sandbox."""
        return cls(*args, **options)

    def eval(self, code: str) -> object:
        """Return the `repr` of the last expression of `code`; None without one.

        Raises:
            RuntimeError: The code raised, or its time ran out.
        """
        gave = self._controller.eval_code(self.target, code)
        if gave["error"] is not None:
            raise RuntimeError(f"forkd eval: {gave['error']}")
        return gave["result"]

    def ping(self) -> Info:
        """Ask the agent in the guest how it is."""
        return self._controller.ping_sandbox(self.target)

    def kill(self) -> None:
        """End it, if it was forked for this object; idempotent."""
        if not self._is_ours:
            return
        self._is_ours = False
        try:
            self._controller.kill_sandbox(self.target)
        except ControllerError as error:
            if error.status != NOT_FOUND:
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def _found(self, target: str | None) -> str:
        """Return the id of a sandbox that is there."""
        wanted = target or os.environ.get("FORKD_TARGET", "")
        every = self._controller.list_sandboxes()
        found = [each["id"] for each in every if wanted in {each["id"], each["guest_addr"]}]
        if not wanted or not found:
            raise InvalidRequest(f"no sandbox has the id or the address {wanted!r}", field="target")
        return str(found[0])


def _forked(tag: str) -> str:
    """Return the id of a new sandbox.

    Raises:
        RuntimeError: It could not be forked.
    """
    try:
        with Client() as client:
            (made,) = client.fork(tag, ttl_s=SANDBOX_LIFE_S)
    except ForkdError as error:
        raise RuntimeError(f"forkd could not fork {tag}: {error}") from error
    return made.id
