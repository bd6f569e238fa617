"""A registry that is busy or away for a moment is asked again, and one that is not there is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from forkd.errors import BuildError
from forkd.model.reference import parse_reference
from forkd.registry import limits
from forkd.registry.attempts import JITTER, Attempts, may_repeat
from forkd.registry.client import Registry, digest_of
from forkd.registry.session import Fault, Kind, Trust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IMAGE = parse_reference("hub.example/tool:1")
BLOB = bytes(range(256)) * 8
DIGEST = digest_of(BLOB)


class Asking:
    """A client of a registry whose answers a test gives, one for each request.

    Attributes:
        requests: What was asked.
        waited_s: How long it waited each time before it asked again.
        faults: What went wrong for good.
    """

    def __init__(self, *answers: Callable[[], httpx.Response]) -> None:
        self.requests: list[httpx.Request] = []
        self.waited_s: list[float] = []
        self.faults: list[Fault] = []
        self._answers = iter(answers)
        self.registry = Registry(
            IMAGE,
            "image",
            ("application/json",),
            None,
            trust=Trust.TLS,
            explain=self._explained,
            transport=httpx.MockTransport(self._answer),
            wait=self.waited_s.append,
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return next(self._answers)()

    def _explained(self, fault: Fault) -> Exception:
        self.faults.append(fault)
        return BuildError(fault.text)

    @property
    def ranges(self) -> list[str | None]:
        """From which byte on a blob was asked for each time."""
        return [request.headers.get("Range") for request in self.requests]


def says(status: int, data: bytes = b"", **headers: str) -> Callable[[], httpx.Response]:
    said = {name.replace("_", "-"): text for name, text in headers.items()}
    return lambda: httpx.Response(status, headers=said, stream=httpx.ByteStream(data))


def breaks(data: bytes, status: int = 200) -> Callable[[], httpx.Response]:
    """An answer of which no more than this comes."""

    class Broken(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield data
            raise httpx.RemoteProtocolError("peer closed connection")

    return lambda: httpx.Response(status, stream=Broken())


def fails(error: Exception) -> Callable[[], httpx.Response]:
    def answer() -> httpx.Response:
        raise error

    return answer


REFUSED = fails(httpx.ConnectError("[Errno 111] Connection refused"))


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_registry_that_is_busy_is_asked_again(status: int) -> None:
    asking = Asking(says(status), says(status), says(200, BLOB))

    assert asking.registry.blob(DIGEST, len(BLOB)) == BLOB

    first, second = asking.waited_s
    assert 0.5 <= first <= 0.5 * (1 + JITTER)
    assert 1.0 <= second <= 1.0 * (1 + JITTER)


def test_one_that_says_when_is_asked_then() -> None:
    asking = Asking(says(429, Retry_After="7"), says(200, BLOB))

    assert asking.registry.blob(DIGEST, len(BLOB)) == BLOB

    assert asking.waited_s == [7.0]


def test_one_that_wants_a_longer_time_than_a_limit_has_failed() -> None:
    most = int(limits.REGISTRY_PAUSE_S_MAX)
    asking = Asking(says(429, Retry_After=str(most)), says(429, Retry_After=str(most + 1)))

    with pytest.raises(BuildError, match="answered 429"):
        asking.registry.blob(DIGEST, len(BLOB))

    assert asking.waited_s == [most]


@pytest.mark.parametrize("said", ["", "soon", "-1", "1.5", "Wed, 21 Oct 2026 07:28:00 GMT", "²"])
def test_a_time_that_is_no_number_of_seconds_is_left_out(said: str) -> None:
    assert (Attempts().pause_s({"Retry-After": said}) or 0) <= 0.5 * (1 + JITTER)


def test_it_is_asked_so_often_and_no_more() -> None:
    asking = Asking(*[says(503, b"")] * limits.REGISTRY_ATTEMPTS_MAX)

    with pytest.raises(BuildError, match="answered 503"):
        asking.registry.manifest("1")

    assert len(asking.requests) == limits.REGISTRY_ATTEMPTS_MAX
    assert len(asking.waited_s) == limits.REGISTRY_ATTEMPTS_MAX - 1


def test_a_registry_that_was_never_reached_is_not_asked_again() -> None:
    asking = Asking(REFUSED)

    with pytest.raises(BuildError, match=r"cannot reach hub\.example"):
        asking.registry.manifest("1")

    assert asking.waited_s == []


def test_one_that_answered_before_is_asked_again() -> None:
    asking = Asking(says(200, b"{}"), REFUSED, REFUSED, says(200, BLOB))

    asking.registry.manifest("1")

    assert asking.registry.blob(DIGEST, len(BLOB)) == BLOB
    assert len(asking.waited_s) == 2


def test_what_may_be_done_once_only_is_not_asked_for_twice_unless_it_was_not_sent() -> None:
    assert may_repeat("GET", httpx.ReadError("reset"))
    assert may_repeat("HEAD", httpx.ReadTimeout("60 s"))
    assert may_repeat("PUT", httpx.ConnectError("refused"))
    assert not may_repeat("PUT", httpx.ReadError("reset"))
    assert not may_repeat("POST", httpx.WriteError("reset"))
    assert not may_repeat("GET", httpx.TooManyRedirects("6"))

    asking = Asking(says(404), says(202, Location="/u"), fails(httpx.ReadError("reset")))
    with pytest.raises(BuildError, match="cannot reach"):
        asking.registry.put_blob(BLOB)
    assert asking.waited_s == []


@pytest.mark.parametrize("honours", [True, False])
def test_the_rest_of_a_layer_is_asked_for_when_its_answer_breaks(*, honours: bool) -> None:
    rest = says(206, BLOB[100:]) if honours else says(200, BLOB)
    asking = Asking(breaks(BLOB[:100]), rest)

    assert asking.registry.blob(DIGEST, len(BLOB)) == BLOB

    assert asking.ranges == [None, "bytes=100-"]


def test_a_layer_that_was_there_when_its_answer_broke_is_not_asked_for_again() -> None:
    asking = Asking(breaks(BLOB))

    assert asking.registry.blob(DIGEST, len(BLOB)) == BLOB

    assert asking.waited_s == []


def test_a_rest_that_is_of_another_layer_is_a_change() -> None:
    asking = Asking(breaks(BLOB[:100]), says(206, BLOB[101:] + b"x"))

    with pytest.raises(BuildError, match="was changed"):
        asking.registry.blob(DIGEST, len(BLOB))

    assert asking.faults[0].kind is Kind.CHANGED


def test_a_layer_whose_answers_bring_little_is_given_up() -> None:
    pieces = [breaks(BLOB[:1]), *[breaks(BLOB[at : at + 1], 206) for at in range(1, 9)]]
    asking = Asking(*pieces)

    with pytest.raises(BuildError, match=r"cannot reach hub\.example .*peer closed connection"):
        asking.registry.blob(DIGEST, len(BLOB))

    assert len(asking.requests) == limits.REGISTRY_ATTEMPTS_MAX
    assert asking.faults[0].kind is Kind.UNREACHABLE


def test_attempts_count_together_whether_an_answer_breaks_or_the_registry_is_busy() -> None:
    asking = Asking(breaks(BLOB[:1]), says(503), breaks(BLOB[1:2], 206), *[says(503)] * 9)

    with pytest.raises(BuildError, match="answered 503"):
        asking.registry.blob(DIGEST, len(BLOB))

    assert len(asking.requests) == limits.REGISTRY_ATTEMPTS_MAX


def test_a_manifest_whose_answer_breaks_is_asked_for_again() -> None:
    asking = Asking(breaks(b"{"), says(200, b"{}"))

    assert asking.registry.manifest("1") == (b"{}", digest_of(b"{}"))

    assert len(asking.waited_s) == 1


def test_answers_that_bring_much_are_not_counted() -> None:
    piece = bytes(limits.REGISTRY_PROGRESS_BYTES)
    often = limits.REGISTRY_ATTEMPTS_MAX + 3
    blob = piece * often
    asking = Asking(breaks(piece), *[breaks(piece, 206)] * (often - 1))

    assert asking.registry.blob(digest_of(blob), len(blob)) == blob

    assert asking.ranges[-1] == f"bytes={len(blob) - len(piece)}-"
    assert max(asking.waited_s) <= 0.5 * (1 + JITTER)


def test_a_layer_that_grows_while_it_is_asked_for_again_ends_at_its_limit() -> None:
    much = bytes(limits.REGISTRY_ANSWER_BYTES_MAX + 1)
    asking = Asking(breaks(BLOB[:100]), says(206, much))

    with pytest.raises(BuildError, match="answered with more than"):
        asking.registry.blob(DIGEST, len(BLOB))
