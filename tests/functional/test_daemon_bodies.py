"""The bodies of all requests together take so much memory and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.limits import BODIES_BYTES_MAX, BODY_BYTES_MAX
from tests.support.callers import CALLER
from tests.support.raw_http import RawClient
from tests.support.served_host import REQUEST, served_host
from tests.support.service_host import until

if TYPE_CHECKING:
    from tests.support.service_host import FakeHost


def post(length: int) -> bytes:
    """Return the header of a fork with a body of so many bytes."""
    more = f"Content-Length: {length}\r\n\r\n"
    return REQUEST.format(method="POST", path="/v2/sandboxes", more=more).encode()


async def test_a_body_beyond_what_all_may_have_is_refused_until_another_was_answered(
    fake_host: FakeHost,
) -> None:
    async with served_host(fake_host) as served:
        room = served.app.state.bodies
        room.take(CALLER, BODIES_BYTES_MAX - BODY_BYTES_MAX)  # others'
        async with RawClient(served.url) as slow, RawClient(served.url) as other:
            slow.say(post(BODY_BYTES_MAX) + b" " * (BODY_BYTES_MAX - 1))
            await until(lambda: room.used_bytes == BODIES_BYTES_MAX - 1)
            other.say(post(2) + b"{}")
            refused = await other.answer()
            slow.say(b" ")
            answered = await slow.answer()
        again = await served.http.post("/v2/sandboxes", json={})

        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["code"] == "capacity"
        assert refused.json()["context"] == {
            "asked": 2,
            "limit": BODIES_BYTES_MAX,
            "used": BODIES_BYTES_MAX - 1,
            "retry_after_s": 1,
        }
        assert (answered.status, again.status_code) == (400, 400)
        assert "snapshot_tag" in again.json()["error"]
        await until(lambda: room.used_bytes == BODIES_BYTES_MAX - BODY_BYTES_MAX)


async def test_the_body_of_a_client_that_leaves_takes_no_room(fake_host: FakeHost) -> None:
    async with served_host(fake_host) as served:
        room = served.app.state.bodies
        async with RawClient(served.url) as leaving:
            leaving.say(post(1_000) + b" " * 999)
            await until(lambda: room.used_bytes == 999)

        await until(lambda: room.used_bytes == 0)
