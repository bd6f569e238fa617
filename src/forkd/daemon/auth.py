"""Who talks to the daemon.

A Unix socket is guarded by its mode; the kernel says which user has opened it.  TCP is guarded by
bearer tokens: those that were made with scopes and a tenant, and one in a file, which may do
anything.  Without one of the operator's the daemon makes that, in a file that only its user can
read.

`/healthz` and `/readyz` answer anybody: they say that the daemon lives and serves, nothing more.

A browser is a client that any web page can use.  It does not send the token by itself, and it says
which name it was told to reach (`Host`) and which page told it (`Origin`): both must be names under
which this daemon is served, or a page whose name was pointed at this address would be one of ours.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import re
import secrets
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from forkd.daemon.peers import ANYBODY, END, HELD, OPEN_PATHS, PEER_UID
from forkd.errors import CapacityError, Denied, Forbidden, InvalidRequest
from forkd.host import files, users
from forkd.model.caller import ALL_SCOPES, DEFAULT_TENANT, TENANT_SCOPES, Caller
from forkd.telemetry import names

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator
    from contextlib import ExitStack
    from pathlib import Path

    from starlette.types import Scope

    from forkd.daemon.logins import FailedLogins
    from forkd.daemon.settings import Settings
    from forkd.service.tokens import Tokens

TOKEN_CHARS_MIN = 16
"""Shorter tokens are refused: they can be guessed."""

TOKEN_BYTES_MAX = 4096
"""A token file longer than this is not a token file."""

TOKEN_FILE = "token"  # noqa: S105 - where it is, not what it is
"""Where the daemon keeps a token of its own, in the state folder."""

OTHERS = 0o077
"""Permission bits of everybody but a file's owner."""

PLACEHOLDER = re.compile(r"(REPLACE|CHANGE)[_-]?(ME|THIS)", re.IGNORECASE)
"""Begins what an example has where a token belongs."""

AUTHORITY = re.compile(r"(?P<host>\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[0-9]+)?")
"""A name or an address, and a port."""


def new_token() -> str:
    """Return a token nobody can guess: 256 random bits."""
    return secrets.token_urlsafe(32)


def token_path(settings: Settings) -> Path:
    """Return where the token of TCP is: in the operator's file, or in the daemon's own."""
    return settings.token_file or settings.state_dir / TOKEN_FILE


def obtain_token(settings: Settings) -> str:
    """Return the token of TCP; the daemon's own is made if it is missing, and kept.

    Raises:
        InvalidRequest: The file holds no usable token, or others may read it.
    """
    path = token_path(settings)
    if settings.token_file is None and not files.is_there(path):
        files.write_atomic(path, new_token().encode(), mode=0o600)
    return read_token(path)


def read_token(path: Path) -> str:
    """Return the token in a file, without the white space around it.

    Raises:
        InvalidRequest: The file is missing, holds no usable token, or others may read it.
    """
    found = files.read_with_mode(path, TOKEN_BYTES_MAX)
    if found is None:
        raise _unusable(path, "does not exist")
    data, mode = found
    if mode & OTHERS:
        raise _unusable(path, f"may be read by others (mode {mode:04o}); run: chmod 600 {path}")
    token = data.decode("ascii", errors="replace").strip()
    if len(token) < TOKEN_CHARS_MIN or not token.isascii() or not token.isprintable():
        raise _unusable(path, f"must hold one word of {TOKEN_CHARS_MIN} characters or more")
    if " " in token or PLACEHOLDER.match(token):
        raise _unusable(path, "holds an example, not a token")
    return token


def _unusable(path: Path, problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"token file {path} {problem}. Without FORKD_TOKEN_FILE the daemon makes a token itself.",
        field="token_file",
    )


class ServedNames:
    """The names and addresses under which a TCP address is served.

    Args:
        bound: What it was bound to.
        others: What the operator lists.
    """

    def __init__(self, bound: str, others: Collection[str]) -> None:
        self._names = {"localhost", bound.lower(), *others}

    def check(self, scope: Scope) -> None:
        """Return if a request names this daemon, and so does the page that sent it, if one did.

        Raises:
            Forbidden: A web page may have sent it.
        """
        headers = Headers(scope=scope)
        host = _host_of(headers.get("host", ""))
        if not self._has(host, scope):
            raise Forbidden(
                f"this daemon is not served as {host!r}; if it should be, list it in FORKD_HOSTS",
                header="host",
            )
        origin = headers.get("origin")
        if origin is not None and not self._has(_host_of(origin.partition("://")[2]), scope):
            raise Forbidden(f"pages of {origin!r} may not use this daemon", header="origin")

    def _has(self, name: str, scope: Scope) -> bool:
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # Bound to every address, it is served under that which the client has reached.
        reached, _ = scope.get("server") or ("", None)
        return address.is_loopback or name == reached


def _host_of(authority: str) -> str:
    """Return the name or address of `host[:port]`, in lower case; empty if it is none."""
    found = AUTHORITY.fullmatch(authority.lower())
    return "" if found is None else found["host"].strip("[]")


class BySocket:
    """Tells who asks over the Unix socket: the kernel says which user has opened it.

    Root and the daemon's own user may do anything.  Others, who can open it only if its mode lets
    them, may do all that is about one tenant.
    """

    async def __call__(self, scope: Scope, request_id: str) -> Caller:
        """Return who asks."""
        uid = scope["state"].get(PEER_UID)
        if uid is None:  # it has left already
            raise Denied("the kernel does not say who opened this connection")
        is_admin = uid in {0, users.user_id()}
        scopes = ALL_SCOPES if is_admin else TENANT_SCOPES
        return Caller(f"user:{users.user_name(uid)}", DEFAULT_TENANT, scopes, request_id)


class FileToken:
    """The token of the operator's file, which may be another one after a SIGHUP.

    Args:
        secret: The token.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._users: set[Callable[[], object]] = set()

    def is_it(self, secret: str) -> bool:
        """Whether a secret is the token, told in a time that does not say how alike they are."""
        return hmac.compare_digest(secret.encode("utf-8", "surrogateescape"), self._secret)

    @contextlib.contextmanager
    def in_use(self, end: Callable[[], object]) -> Generator[None, None, None]:
        """Have `end` called if the token changes within the block."""
        self._users.add(end)
        try:
            yield
        finally:
            self._users.discard(end)

    def change(self, secret: str) -> None:
        """Have another token from now on; what the old one has begun is ended."""
        if self.is_it(secret):
            return
        self._secret = secret.encode()
        for end in tuple(self._users):
            end()


class ByToken:
    """Tells who asks over TCP, by a bearer token.

    Args:
        file_token: The token of the operator's file, which may do anything.
        tokens: The others.
        names: Under which the address is served.
        failures: Slows down who has no valid token.
    """

    def __init__(
        self, file_token: FileToken, tokens: Tokens, names: ServedNames, failures: FailedLogins
    ) -> None:
        self._file_token = file_token
        self._tokens = tokens
        self._names = names
        self._failures = failures

    async def __call__(self, scope: Scope, request_id: str) -> Caller:
        """Return who asks.

        Raises:
            Denied: The token is missing, another, or has expired.
            Forbidden: A web page may have sent it.
            CapacityError: Too many failed from the same address.
        """
        self._names.check(scope)
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return Caller(ANYBODY, DEFAULT_TENANT, frozenset(), request_id)
        address, _ = scope["client"] or ("", 0)
        secret = _bearer(Headers(scope=scope).get("authorization", ""))
        try:
            self._failures.check(address, secret)
            caller = self._caller(scope, request_id, secret)
        except CapacityError:
            self._tokens.telemetry.count(names.LOGINS_DENIED)
            raise
        except Denied:
            self._tokens.telemetry.count(names.LOGINS_DENIED)
            async with self._failures.slowed_down(address):
                raise
        self._failures.note_success(address, secret)
        return caller

    def _caller(self, scope: Scope, request_id: str, secret: str) -> Caller:
        held: ExitStack = scope[HELD]
        end: Callable[[], object] = scope[END]
        if self._file_token.is_it(secret):
            held.enter_context(self._file_token.in_use(end))
            return Caller("token-file", DEFAULT_TENANT, ALL_SCOPES, request_id)
        token = self._tokens.find(secret)
        held.enter_context(self._tokens.in_use(token.name, end))
        if token.expires_at is not None:
            held.callback(self._tokens.clock.call_at(token.expires_at, end).cancel)
        return Caller(f"token:{token.name}", token.tenant, token.scopes, request_id)


def _bearer(header: str) -> str:
    """Return the token of an `Authorization` header; empty if it has none."""
    kind, _, secret = header.partition(" ")
    return secret.strip() if kind.lower() == "bearer" else ""
