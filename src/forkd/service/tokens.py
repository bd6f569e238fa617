"""Who may use this host over the network: bearer tokens.

A token's secret is told once, when it is made; the database has its SHA-256, from which nobody
finds 256 random bits.  All tokens are in memory, so that looking one up costs no query, and a
change holds from the next request on.  What a request under way does for a token that is removed
is ended.
"""

from __future__ import annotations

import contextlib
import secrets
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING

from forkd.errors import CapacityError, Conflict, Denied, InvalidRequest, NotFound
from forkd.limits import TOKENS_MAX
from forkd.model.caller import Scope, touch
from forkd.model.token import NewToken, Token
from forkd.service.clock import WallClock
from forkd.service.use_case import use_case
from forkd.store import rights

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from forkd.model.caller import Caller
    from forkd.model.token import TokenRequest
    from forkd.service.records import Records
    from forkd.telemetry.telemetry import Telemetry

SECRET_PREFIX = "fkd_"  # noqa: S105 - what every secret begins with, so that scanners find them
SECRET_BYTES = 32


class Tokens:
    """The tokens of one host; `forkd.service.api.Tokens` documents what a caller may ask.

    Attributes:
        clock: By which they expire.
    """

    def __init__(
        self, telemetry: Telemetry, records: Records, clock: WallClock | None = None
    ) -> None:
        self.telemetry = telemetry
        self.clock = clock or WallClock()
        self._records = records
        self._by_digest: dict[str, Token] = {}
        self._users: dict[str, set[Callable[[], object]]] = {}

    async def load(self) -> None:
        """Read the tokens that there are."""
        self._by_digest = await self._records.ask(rights.tokens)

    @use_case("create_token", Scope.ADMIN)
    async def create(self, caller: Caller, request: TokenRequest) -> NewToken:
        """Make a token."""
        now = datetime.now(UTC)
        if request.expires_at is not None and request.expires_at <= now:
            raise InvalidRequest("expires_at is in the past", field="expires_at")
        if len(self._by_digest) >= TOKENS_MAX:
            raise CapacityError(f"there are {TOKENS_MAX} tokens already")
        if self._named(request.name) is not None:
            raise Conflict(f"token {request.name} exists", token=request.name)
        token = Token(request.name, request.tenant, request.scopes, now, request.expires_at)
        secret = SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
        digest = _digest(secret)
        # In memory first: nobody knows the secret yet, and the name is taken from now on.
        self._by_digest[digest] = token
        try:
            await self._records.ask(lambda db: rights.put_token(db, token, digest))
        except BaseException:
            del self._by_digest[digest]
            raise
        touch(f"token:{token.name}")
        return NewToken(token, secret)

    @use_case("list_tokens", Scope.ADMIN)
    async def list(self, caller: Caller) -> tuple[Token, ...]:
        """Return every token, by name."""
        return tuple(sorted(self._by_digest.values(), key=lambda token: token.name))

    @use_case("remove_token", Scope.ADMIN)
    async def remove(self, caller: Caller, name: str) -> None:
        """Remove a token; it is refused from now on."""
        digest = self._named(name)
        if digest is None:
            raise NotFound(f"no token {name!r}", token=name)
        await self._records.ask(lambda db: rights.remove_token(db, name))
        self._by_digest.pop(digest, None)
        touch(f"token:{name}")
        for end in tuple(self._users.pop(name, ())):
            end()

    def find(self, secret: str) -> Token:
        """Return the token that has a secret.

        Raises:
            Denied: There is none, or it has expired.
        """
        token = self._by_digest.get(_digest(secret))
        if token is None:
            raise Denied("missing or invalid bearer token")
        if token.expires_at is not None and token.expires_at <= datetime.now(UTC):
            raise Denied(f"the token {token.name} expired at {token.expires_at:%Y-%m-%dT%H:%M:%SZ}")
        return token

    @contextlib.contextmanager
    def in_use(self, name: str, end: Callable[[], object]) -> Generator[None, None, None]:
        """Have `end` called if the token is removed within the block."""
        users = self._users.setdefault(name, set())
        users.add(end)
        try:
            yield
        finally:
            users.discard(end)
            if not users and self._users.get(name) is users:
                del self._users[name]

    def _named(self, name: str) -> str | None:
        """Return the digest of the token of a name."""
        found = (digest for digest, token in self._by_digest.items() if token.name == name)
        return next(found, None)


def _digest(secret: str) -> str:
    return sha256(secret.encode(errors="surrogatepass")).hexdigest()
