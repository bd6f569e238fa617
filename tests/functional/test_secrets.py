"""Secrets: what a guest asks goes out with values in the place of placeholders, and no other way.

Everything is as the daemon runs it but the machine: walls, resolver, proxy and a server that
records what arrives, in namespaces of the test.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import logging
import socket
import ssl
from typing import TYPE_CHECKING, TypeAlias

import pytest

from forkd.limits import PROXY_HEAD_BYTES_MAX
from forkd.model.caller import Tenant
from forkd.network import proxy as proxy_
from forkd.network import relay as relay_
from forkd.service.vault import Vault
from tests.support import certificates
from tests.support import outside as world
from tests.support.name_server import NameServer, serving_names
from tests.support.outside import PLAN, outside
from tests.support.proxied import (
    ADDRESS,
    ADDRESS_V6,
    HOST,
    OTHER_HOST,
    PLACEHOLDER,
    TENANT,
    VALUE,
    scenario,
    servers_certificate,
    trusting,
)
from tests.support.recorder import recording

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from tests.support.outside import Outside
    from tests.support.proxied import Proxied
    from tests.support.recorder import Recorder

    Run: TypeAlias = Callable[[Callable[[Proxied], Awaitable[None]]], None]

pytestmark = [pytest.mark.needs("root", "nft")]

BEARER = {"Authorization": f"Bearer {PLACEHOLDER}"}
FILLED = f"Bearer {VALUE}"
UNFILLED = f"Bearer {PLACEHOLDER}"


@pytest.fixture(scope="module")
def outer() -> Iterator[Outside]:
    with outside(1) as made:
        made.world.address("lo", f"{ADDRESS}/32")
        yield made


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Path, Path]]:
    """A CA's file, and a certificate that it signed."""
    return servers_certificate(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def recorder(outer: Outside, served: tuple[Path, tuple[Path, Path]]) -> Iterator[Recorder]:
    with recording(outer.world, ADDRESS, 443, served[1]) as made:
        yield made


@pytest.fixture
def run(outer: Outside, served: tuple[Path, tuple[Path, Path]], tmp_path: Path) -> Run:
    """Do something with a proxy that trusts the servers of this test."""
    return lambda work: scenario(outer, tmp_path, work, ca_file=served[0])


@pytest.fixture
def straight(served: tuple[Path, tuple[Path, Path]]) -> ssl.SSLContext:
    """What trusts the server itself, and not the proxy."""
    return trusting(served[0])


# What is put in


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (UNFILLED, FILLED),
        (PLACEHOLDER, VALUE),
        (f"a={PLACEHOLDER}, b={PLACEHOLDER}", f"a={VALUE}, b={VALUE}"),
        (f"Bearer {PLACEHOLDER}s", f"Bearer {PLACEHOLDER}s"),
        ("Bearer else", "Bearer else"),
    ],
)
def test_a_value_takes_the_place_of_its_placeholder(
    run: Run, recorder: Recorder, sent: str, arrives: str
) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()

        answer = await proxied.ask("/x?y", {"Authorization": sent, "X-Case": "Kept"})

        assert (answer.status, answer.text) == (200, "ok")
        (arrived,) = recorder.requests
        assert (arrived.method, arrived.path) == ("GET", "/x?y")
        assert arrived.header("Authorization") == arrives
        assert ("X-Case", "Kept") in arrived.headers
        assert recorder.names == [HOST]

    run(work)


def test_over_ipv6_as_over_ipv4(
    outer: Outside, run: Run, served: tuple[Path, tuple[Path, Path]]
) -> None:
    outer.world.address("lo", f"{ADDRESS_V6}/128")

    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put(f"[{ADDRESS_V6}]:443")
        over = proxied.connection(address=ADDRESS_V6)
        assert (await proxied.ask(over=over)).text == "ok"
        assert there.requests[0].header("Authorization") == FILLED
        over.close()

    with recording(outer.world, ADDRESS_V6, 443, served[1]) as there:
        run(work)


def test_what_is_encoded_in_basic_authentication_is_replaced_too(
    run: Run, recorder: Recorder
) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        encoded = base64.b64encode(f"git:{PLACEHOLDER}".encode()).decode()

        await proxied.ask("/", {"Authorization": f"Basic {encoded}"})

        kind, _, arrived = str(recorder.requests[0].header("Authorization")).partition(" ")
        assert (kind, base64.b64decode(arrived)) == ("Basic", f"git:{VALUE}".encode())

    run(work)


def test_bodies_of_any_length_pass_both_ways_and_connections_are_used_again(
    run: Run, recorder: Recorder
) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        large = b"0123456789abcdef" * 100_000
        over = proxied.connection()
        for body in (b"", b"x", large):
            answer = await proxied.ask("/body", BEARER, method="POST", body=body, over=over)
            assert answer.body == body
        assert (await proxied.ask("/", BEARER, method="HEAD", over=over)).body == b""
        pieces = b"POST /body HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n"
        pieces += b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        assert b"abcde" in await proxied.talk(pieces)

        assert [each.header("Authorization") for each in recorder.requests[:4]] == [FILLED] * 4
        assert recorder.connections == 2
        over.close()

    run(work)


def test_a_server_that_ends_its_connection_is_connected_to_again(
    run: Run, recorder: Recorder
) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        for _ in range(2):
            assert (await proxied.ask("/last")).text == "ok"
        assert (await proxied.ask("/early", method="POST", body=b"x" * 3_000_000)).text == "early"
        assert recorder.connections == 3

    run(work)


def test_a_connection_may_change_to_another_protocol(run: Run, recorder: Recorder) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        head = f"GET /switch HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: {UNFILLED}\r\n"
        head += "Connection: Upgrade\r\nUpgrade: echo\r\n\r\n"

        def converse() -> bytes:
            with (
                socket.create_connection((ADDRESS, 443), world.DEADLINE_S) as sock,
                proxied.trust().wrap_socket(sock, server_hostname=HOST) as secured,
            ):
                secured.sendall(head.encode())
                while b"\r\n\r\n" not in (said := secured.recv(4_096)):
                    assert said
                secured.sendall(b"said back")
                return secured.recv(4_096)

        assert await proxied.in_guest(converse) == b"said back"
        assert recorder.requests[0].header("Authorization") == FILLED

    run(work)


# What is not


def test_in_another_header_a_placeholder_stays(run: Run, recorder: Recorder) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set(header="X-Api-Key")
        await proxied.put()

        await proxied.ask("/", {**BEARER, "x-api-key": PLACEHOLDER, "Cookie": PLACEHOLDER})

        (arrived,) = recorder.requests
        assert arrived.header("X-Api-Key") == VALUE
        assert arrived.header("Authorization") == UNFILLED
        assert arrived.header("Cookie") == PLACEHOLDER

    run(work)


@pytest.mark.parametrize("why", ["another host", "another port", "another tenant", "not used"])
def test_what_a_secret_is_not_for_passes_as_it_is(
    run: Run, recorder: Recorder, straight: ssl.SSLContext, why: str
) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        if why == "another port":
            proxied.set(hosts=(f"{HOST}:8443",))
        secrets = () if why == "not used" else ("token",)
        tenant = Tenant("theirs") if why == "another tenant" else TENANT
        await proxied.put(secrets=secrets, tenant=tenant)
        host = OTHER_HOST if why == "another host" else HOST

        answer = await proxied.ask("/", BEARER, host=host, context=straight)

        assert answer.text == "ok"
        assert recorder.requests[0].header("Authorization") == UNFILLED
        assert recorder.names == [host]

    run(work)


def test_a_secret_that_is_removed_or_changed_is_so_from_the_next_request_on(
    run: Run, recorder: Recorder
) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        over = proxied.connection()
        await proxied.ask("/", over=over)
        proxied.set(value="another-value")
        await proxied.ask("/", over=over)
        proxied.vault.drop(TENANT, "token")
        await proxied.ask("/", over=over)
        over.close()

        found = [each.header("Authorization") for each in recorder.requests]
        assert found == [FILLED, "Bearer another-value", UNFILLED]

    run(work)


def test_a_secret_whose_name_begins_another_does_not_stand_in_its_place(
    run: Run, recorder: Recorder
) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set("token", "first-value")
        proxied.set("token-2", "second-value")
        await proxied.put(secrets=("token", "token-2"))

        await proxied.ask("/", {"Authorization": f"{PLACEHOLDER} {PLACEHOLDER}-2 {PLACEHOLDER}-3"})

        arrived = recorder.requests[0].header("Authorization")
        assert arrived == f"first-value second-value {PLACEHOLDER}-3"

    run(work)


# What is refused


REFUSED = {
    "another host": (f"GET / HTTP/1.1\r\nHost: {OTHER_HOST}\r\n", 421),
    "another port": (f"GET / HTTP/1.1\r\nHost: {HOST}:8443\r\n", 421),
    "a whole URL": (f"GET https://{OTHER_HOST}/ HTTP/1.1\r\nHost: {HOST}\r\n", 400),
    "no host": ("GET / HTTP/1.0\r\n", 400),
    "two hosts": (f"GET / HTTP/1.1\r\nHost: {HOST}\r\nHost: {HOST}\r\n", 400),
    "a tunnel": (f"CONNECT {HOST}:443 HTTP/1.1\r\nHost: {HOST}\r\n", 501),
    "no request": ("\x00\x01\x02 nonsense\r\n", 400),
    "two ways to end": (
        f"POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        400,
    ),
    "two lengths": (
        f"POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 3\r\nContent-Length: 4\r\n",
        400,
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_request_that_may_mean_another_host_goes_nowhere(
    run: Run, recorder: Recorder, what: str
) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        head, status = REFUSED[what]

        said = await proxied.talk(f"{head}Authorization: {UNFILLED}\r\n\r\n".encode())

        assert said.startswith(f"HTTP/1.1 {status} ".encode())
        assert b"\r\n\r\nforkd: " in said
        assert recorder.requests == []

    run(work)


@pytest.mark.usefixtures("recorder")
def test_a_head_has_so_many_bytes_and_no_more(run: Run) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        start = f"GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n".encode()
        for over, status in ((0, 200), (1, 431)):
            padding = PROXY_HEAD_BYTES_MAX - len(start) - len(b"X-Long: \r\n\r\n") + over
            lines = b"".join(
                b"X-Long: " + b"x" * length + b"\r\n" for length in _cut(padding, 60_000)
            )
            said = await proxied.talk(start + lines + b"\r\n")
            assert said.startswith(f"HTTP/1.1 {status} ".encode()), over

    run(work)


def _cut(length: int, piece: int) -> list[int]:
    """Return lengths of two headers that together take as much as one of `length`."""
    return [piece, length - piece - len(b"X-Long: \r\n")]


@pytest.mark.parametrize("wrong", ["a stranger's", "another name", "expired"])
def test_a_server_with_a_wrong_certificate_gets_nothing(
    outer: Outside, run: Run, tmp_path: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    root = certificates.root("stranger")
    signed = root.sign("server", names=(HOST,))
    (folder := tmp_path / "wrong").mkdir()
    if wrong != "a stranger's":
        ca, _ = root.write(folder, "root")
        days = -1 if wrong == "expired" else 1
        names = (OTHER_HOST,) if wrong == "another name" else (HOST,)
        signed = root.sign("server", names=names, days=days)

    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        answer = await proxied.ask()
        assert answer.status == 502
        assert f"the certificate of {HOST} is not valid" in answer.text
        assert wrong_server.requests == []

    with recording(outer.world, ADDRESS, 443, signed.write(folder, "server")) as wrong_server:
        if wrong == "a stranger's":
            run(work)
        else:
            scenario(outer, tmp_path, work, ca_file=ca)
    assert VALUE not in caplog.text


@pytest.mark.usefixtures("recorder")
def test_a_server_that_does_not_answer_is_one_clear_error(run: Run) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        answer = await proxied.ask("/nothing")
        assert (answer.status, answer.text) == (
            502,
            f"forkd: {HOST} ended the connection without an answer\n",
        )

    run(work)


def test_a_server_that_is_not_there_is_one_clear_error(run: Run) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        answer = await proxied.ask()
        assert answer.status == 502
        assert f"forkd: {HOST}:443 cannot be reached" in answer.text

    run(work)


def test_a_name_that_only_shares_the_address_of_an_allowed_one_is_refused(
    outer: Outside, run: Run, recorder: Recorder
) -> None:
    names = {(name, "A"): (30, [ADDRESS]) for name in (HOST, OTHER_HOST)}

    async def work(proxied: Proxied) -> None:
        import dns.message  # noqa: PLC0415
        import dns.query  # noqa: PLC0415

        proxied.set(hosts=(HOST, OTHER_HOST))
        await proxied.put(f"{HOST}:443")
        query = dns.message.make_query(HOST, "A")
        gateway = PLAN.slot(0).host
        await proxied.in_guest(lambda: dns.query.udp(query, gateway, timeout=world.DEADLINE_S))

        assert (await proxied.ask()).status == 200
        refused = await proxied.ask(host=OTHER_HOST)

        assert refused.status == 403
        assert "does not allow other.example.com:443" in refused.text
        assert len(recorder.requests) == 1

    with serving_names(outer.world, world.NAME_SERVER, NameServer(names)):
        run(work)


@pytest.mark.usefixtures("recorder")
def test_what_the_policy_refuses_is_refused_as_before(run: Run) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put("192.0.2.0/24")
        with pytest.raises(ConnectionRefusedError):
            await proxied.ask()
        assert await proxied.try_("tcp", world.OTHER[0], 443) == "reached"

    run(work)


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("change", ["held", "another policy", "deleted"])
@pytest.mark.parametrize("passed_on", ["as it is", "with secrets"])
def test_open_connections_end_when_the_sandbox_may_not_have_them_any_more(
    run: Run, recorder: Recorder, straight: ssl.SSLContext, change: str, passed_on: str
) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        wall = await proxied.put()
        with_secrets = passed_on == "with secrets"
        over = proxied.connection(HOST if with_secrets else OTHER_HOST)
        if not with_secrets:
            over = proxied.connection(OTHER_HOST, context=straight)
        assert (await proxied.ask(over=over)).status == 200

        if change == "held":
            await proxied.put(held=True)
        elif change == "another policy":
            await proxied.put("192.0.2.0/24")
        else:
            await proxied.egress.take([wall.slot.tap])

        if change != "deleted":  # of which nobody is left to ask
            with pytest.raises((OSError, http.client.HTTPException)):
                await proxied.ask(over=over)
        assert len(recorder.requests) == 1
        left = proxied.egress.proxy._running.get(wall.slot.tap)  # noqa: SLF001
        if left:
            await asyncio.wait(left, timeout=world.DEADLINE_S)
        assert not proxied.egress.proxy._running  # noqa: SLF001 - nothing is left of them
        over.close()

    run(work)


@pytest.mark.usefixtures("recorder")
def test_the_same_policy_again_leaves_connections_open(run: Run) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        over = proxied.connection()
        await proxied.ask(over=over)
        await proxied.put()
        assert (await proxied.ask(over=over)).status == 200
        over.close()

    run(work)


@pytest.mark.usefixtures("recorder")
def test_a_sandbox_has_so_many_connections_by_the_proxy_and_no_more(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_, "PROXY_CONNECTIONS_PER_SANDBOX_MAX", 2)

    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        kept = [proxied.connection() for _ in range(2)]
        for each in kept:
            assert (await proxied.ask(over=each)).status == 200
        with pytest.raises(OSError):  # noqa: PT011 - it is reset, wherever in the handshake
            await proxied.ask()
        for each in kept:
            each.close()

    run(work)


@pytest.mark.usefixtures("recorder")
def test_who_says_nothing_is_let_go(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_, "IDLE_S", 0.05)

    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        assert await proxied.talk(b"GET / HT") == b""

    run(work)


def test_nobody_reaches_the_proxy_but_by_what_is_led_there(outer: Outside, run: Run) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        wall = await proxied.put("host", "internet")
        port = proxied.egress.proxy.port
        assert await proxied.try_("tcp", PLAN.slot(0).host, port) == "refused"
        status = await proxied.egress.status(wall)
        assert (PLAN.slot(0).host, port) in {
            (each.address, each.port) for each in status.refused_destinations
        }, "by the packet filter"

        for where, address in ((outer.world, world.HOST_OUTSIDE[0]), (outer.host, "127.0.0.1")):

            def knock(address: str = address) -> None:
                socket.create_connection((address, port), 0.3).close()

            with pytest.raises(TimeoutError):
                where.run(knock)

    run(work)


# What comes back


def test_a_value_that_a_server_says_back_does_not_reach_the_guest(
    run: Run, recorder: Recorder
) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()

        answer = await proxied.ask("/echo", {**BEARER, "Accept-Encoding": "gzip"})

        assert recorder.requests[0].header("Accept-Encoding") == "identity"
        assert recorder.requests[0].header("Authorization") == FILLED
        assert VALUE not in answer.everything
        assert dict(answer.headers)["X-Echo-Authorization"] == UNFILLED
        cover = PLACEHOLDER.ljust(len(VALUE), "*")
        assert f"Authorization: Bearer {cover}" in answer.text

        body = f"{VALUE[:-1]} {VALUE}".encode() * 500
        said = await proxied.ask("/body", BEARER, method="POST", body=body)
        assert VALUE.encode() not in said.body
        assert said.body == body.replace(VALUE.encode(), cover.encode())

    run(work)


# After a restart


@pytest.mark.usefixtures("recorder")
def test_a_ca_is_the_same_after_a_restart_and_each_tree_has_its_own(
    run: Run, tmp_path: Path
) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        again = Vault(tmp_path)
        again.unlock(make=False)
        for root, trusted in (("sb-0", True), ("sb-1", False)):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cadata=again.authority(root).certificate().decode())
            if trusted:
                assert (await proxied.ask(context=context)).status == 200
            else:
                with pytest.raises(ssl.SSLCertVerificationError):
                    await proxied.ask(context=context)

    run(work)
