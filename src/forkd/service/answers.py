"""Requests that are done once, however often they come: by their Idempotency-Key.

    answer = await answers.once(caller, key, digest, work)
    with answer.followed():
        await answer.begun()            # raises what `work` raises before it begins
        async for piece in answer.pieces():
            ...

What is done for a request with a key is a task of its own, so that it is finished when the client
loses its connection: the client comes again, and gets the same answer.  If nobody comes for
`ABANDONED_S`, what is not finished yet is ended and undone, as without a key.

An answer that is final is kept for a day, sealed by a key that follows from the client's: who has
the database alone cannot read it, and one of a new token has its secret.  Which answers there are
is in memory, so that a request with a new key asks the database nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
import zlib
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from forkd.errors import ForkdError, IdempotencyMismatch, StoreError
from forkd.limits import (
    IDEMPOTENCY_BYTES_MAX,
    IDEMPOTENCY_KEPT_S,
    IDEMPOTENCY_KEYS_MAX,
    IDEMPOTENT_AT_ONCE_MAX,
    SHORT_RETRY_S,
)
from forkd.service.places import Places
from forkd.service.supervision import report
from forkd.store import answers as stored
from forkd.store.answers import KeptAnswer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator

    from forkd.model.caller import Caller, Tenant
    from forkd.service.records import Records

ABANDONED_S = 5.0
"""How long unfinished work goes on that has no client, until its client comes again."""

_NONCE_BYTES = 12
_KEY_BYTES = 32

log = logging.getLogger(__name__)

Headers = tuple[tuple[str, str], ...]


class Running(Protocol):
    """A task that was started; whoever awaits it gets what it raises."""

    def __await__(self) -> Generator[object, None, None]: ...

    async def cancel(self) -> None:
        """Cancel it."""
        ...


class Answer:
    """The answer to one request, as it comes; several clients may follow it.

    Attributes:
        digest: Of the request.
        replayed: Whether it was kept, and the request was done earlier.
        status: Of HTTP; 0 before it has begun.
        headers: Likewise.
        is_made: Whether all of it is there, and at most kept yet.
    """

    def __init__(self, digest: bytes, *, replayed: bool) -> None:
        self.digest = digest
        self.replayed = replayed
        self.status = 0
        self.headers: Headers = ()
        self.is_made = replayed
        self._abandon: Callable[[], None] = lambda: None
        self._pieces: list[bytes] = []
        self._held: list[bytes] = []
        self._ended = False
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._followers = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_followers(self) -> bool:
        """Whether a client waits for it."""
        return self._followers > 0

    def abandoned_by(self, abandon: Callable[[], None]) -> None:
        """Have `abandon` called when nobody has come for it for `ABANDONED_S`."""

        def leave() -> None:
            if not self.is_made:
                log.info("a request with a key was abandoned")
                abandon()

        self._abandon = leave

    def start(self, status: int, headers: Headers) -> None:
        """Begin."""
        self.status, self.headers = status, headers
        self._tell()

    def add(self, piece: bytes) -> None:
        """Have followers get a piece at once."""
        self._pieces.append(piece)
        self._tell()

    def hold(self, piece: bytes) -> None:
        """Have followers get a piece once the answer is kept."""
        self._held.append(piece)

    def end(self, error: Exception | None = None) -> None:
        """Have followers get what was held, and the end; or an error."""
        self._pieces += self._held
        self._held.clear()
        self._ended, self._error = True, error
        self._tell()

    @contextlib.contextmanager
    def followed(self) -> Generator[None, None, None]:
        """Have it waited for within the block: what it is the answer to is not abandoned."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._followers += 1
        try:
            yield
        finally:
            self._followers -= 1
            if self._followers == 0 and not self._ended:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(ABANDONED_S, self._abandon)

    async def begun(self) -> None:
        """Return once there is a status.

        Raises:
            Exception: What was raised before.
        """
        while self.status == 0 and not self._ended:
            await self._news.wait()
        if self.status == 0 and self._error is not None:
            raise self._error

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield its body as it comes.

        Raises:
            Exception: What was raised after it had begun.
        """
        seen = 0
        while True:
            while seen < len(self._pieces):
                yield self._pieces[seen]
                seen += 1
            if self._ended:
                break
            await self._news.wait()
        if self._error is not None:
            raise self._error

    def _tell(self) -> None:
        self._news.set()
        if not self._ended:
            self._news = asyncio.Event()


@dataclass(slots=True)
class _Held:
    """The answers that are kept of one tenant, the oldest first."""

    answers: OrderedDict[bytes, KeptAnswer] = field(default_factory=OrderedDict)
    size: int = 0

    def add(self, answer: KeptAnswer) -> None:
        self.remove(answer.id)
        self.answers[answer.id] = answer
        self.size += answer.size

    def remove(self, id_: bytes) -> None:
        found = self.answers.pop(id_, None)
        self.size -= 0 if found is None else found.size

    def surplus(self, now_s: float) -> list[bytes]:
        """Remove and return what is too old, or too much; never the newest."""
        gone = []
        while len(self.answers) > 1:
            oldest = next(iter(self.answers.values()))
            too_old = oldest.at_s + IDEMPOTENCY_KEPT_S <= now_s
            too_many = len(self.answers) > IDEMPOTENCY_KEYS_MAX
            if not (too_old or too_many or self.size > IDEMPOTENCY_BYTES_MAX):
                break
            self.remove(oldest.id)
            gone.append(oldest.id)
        return gone


class Answers:
    """The answers of one host to requests with a key.

    Args:
        records: Where they are kept.
        run: Starts a task that outlives the request, named.
        clock_s: The wall clock.
    """

    def __init__(
        self,
        records: Records,
        run: Callable[[Coroutine[object, object, None], str], Running],
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._records = records
        self._run = run
        self._clock_s = clock_s
        self._held: dict[Tenant, _Held] = {}
        self._making: dict[bytes, Answer] = {}
        self._attending: set[asyncio.Future[None]] = set()
        self._places = Places("requests with a key", IDEMPOTENT_AT_ONCE_MAX, SHORT_RETRY_S)

    async def load(self) -> None:
        """Read which answers are kept."""
        for each in await self._records.ask(stored.kept):
            self._held.setdefault(each.tenant, _Held()).add(each)

    async def _read(self, id_: bytes) -> bytes | None:
        return await self._records.ask(lambda database: stored.read(database, id_))

    async def _write(self, answer: KeptAnswer, sealed: bytes, forgotten: list[bytes]) -> None:
        await self._records.ask(lambda database: stored.put(database, answer, sealed, forgotten))

    async def once(
        self,
        caller: Caller,
        key: str,
        digest: bytes,
        work: Callable[[Answer], Awaitable[bytes | None]],
    ) -> Answer:
        """Return the answer to a request: being made, kept, or begun now.

        Args:
            caller: Whose key it is: its tenant's.
            key: The request's.
            digest: Of what is asked for, and how.
            work: Does it.  Starts the answer and holds or adds its pieces; returns the body that is
                kept, or None if the answer is not final.

        Raises:
            IdempotencyMismatch: Another request came with the key.
            CapacityError: Too many are being done.
        """
        id_ = _id(caller.tenant, key)
        known = self._making.get(id_)
        if known is not None:
            return _checked(known, digest)
        if (kept := self._find(caller.tenant, id_)) is not None:
            if kept.digest != digest:
                raise _mismatch()
            sealed = await self._read(id_)
            if sealed is not None:
                return _opened(kept, sealed, _cipher(caller.tenant, key))
            known = self._making.get(id_)
            if known is not None:
                return _checked(known, digest)
        return self._begin(caller, key, digest, work)

    def _find(self, tenant: Tenant, id_: bytes) -> KeptAnswer | None:
        held = self._held.get(tenant)
        found = None if held is None else held.answers.get(id_)
        if found is None or found.at_s + IDEMPOTENCY_KEPT_S <= self._clock_s():
            return None
        return found

    def _begin(
        self,
        caller: Caller,
        key: str,
        digest: bytes,
        work: Callable[[Answer], Awaitable[bytes | None]],
    ) -> Answer:
        id_ = _id(caller.tenant, key)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._places.take(caller))
            answer = Answer(digest, replayed=False)

            async def make() -> None:
                body = await work(answer)
                answer.is_made = True
                if body is not None:
                    await self._keep(caller.tenant, key, answer, body)

            running = self._run(make(), f"by {caller.principal}")
            self._making[id_] = answer
            stack.callback(self._making.pop, id_)
            answer.abandoned_by(lambda: self._attend(running.cancel()))
            self._attend(self._end(answer, running, stack.pop_all()))
            return answer

    async def _end(self, answer: Answer, running: Running, held: contextlib.ExitStack) -> None:
        """Tell whoever waits how the work has ended."""
        with held:
            try:
                await running
            except Exception as error:  # noqa: BLE001 - it belongs to who asked
                answer.end(error)
                if not answer.has_followers:
                    report(error, "a request with a key")
            else:
                answer.end()

    def _attend(self, waiting: Coroutine[object, object, None]) -> None:
        """Have something done for as long as a task of ours takes to end."""
        task = asyncio.ensure_future(waiting)
        self._attending.add(task)
        task.add_done_callback(self._attending.discard)

    async def _keep(self, tenant: Tenant, key: str, answer: Answer, body: bytes) -> None:
        """Keep an answer; one that cannot be is given all the same, since the work is done."""
        id_, cipher = _id(tenant, key), _cipher(tenant, key)
        head = json.dumps([answer.status, answer.headers]).encode()
        sealed = await asyncio.to_thread(_sealed, cipher, head + b"\n" + body)
        kept = KeptAnswer(id_, tenant, self._clock_s(), answer.digest, len(sealed))
        if kept.size > IDEMPOTENCY_BYTES_MAX:
            log.warning("answer too long to be kept", extra={"bytes": kept.size})
            return
        held = self._held.setdefault(tenant, _Held())
        held.add(kept)
        gone = held.surplus(kept.at_s)
        try:
            await self._write(kept, sealed, gone)
        except ForkdError as error:
            held.remove(id_)
            log.warning("answer not kept", extra={"error": str(error)})


def _checked(answer: Answer, digest: bytes) -> Answer:
    if answer.digest != digest:
        raise _mismatch()
    return answer


def _mismatch() -> IdempotencyMismatch:
    return IdempotencyMismatch(
        "Idempotency-Key: another request came with this key; use a new key for each request, and "
        "the same only to repeat a request without a change",
        field="Idempotency-Key",
    )


def _id(tenant: Tenant, key: str) -> bytes:
    return sha256(f"forkd answer\0{tenant}\0{key}".encode()).digest()


def _cipher(tenant: Tenant, key: str) -> AESGCM:
    derived = HKDF(hashes.SHA256(), _KEY_BYTES, salt=None, info=b"forkd answers")
    return AESGCM(derived.derive(f"{tenant}\0{key}".encode()))


def _sealed(cipher: AESGCM, text: bytes) -> bytes:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + cipher.encrypt(nonce, zlib.compress(text, 1), None)


def _opened(kept: KeptAnswer, sealed: bytes, cipher: AESGCM) -> Answer:
    try:
        text = zlib.decompress(cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None))
        head, _, body = text.partition(b"\n")
        status, headers = json.loads(head)
    except (InvalidTag, ValueError, zlib.error):
        raise StoreError("an answer in the database is damaged") from None
    answer = Answer(kept.digest, replayed=True)
    answer.start(int(status), tuple((str(name), str(value)) for name, value in headers))
    answer.hold(body)
    answer.end()
    return answer
