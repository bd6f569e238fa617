"""A tenant that does whatever its token lets it, in a process of its own.

    python -m tests.support.hostile_tenant '{"url": …, "token": …, "tag": …, "others": […], …}'

It has every scope of a tenant.  It forks sandboxes of `tag`, and prints a line when it is at work,
another one when each of its deeds was answered once, and after `seconds`, or when its standard
input ends, a line of JSON: how each deed was answered, and what it was told of `others`, the names
of another tenant's things.  Its traffic goes to the daemon alone, and every loop ends with its
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkd.host import proc
from tests.support.archives import TOML, archive, entry
from tests.support.raw_http import WEBSOCKET, Answer, RawClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]

SANDBOXES = 4
FLOODERS = 48
"""Connections that ask one thing after the other, as fast as they are answered."""

STREAMS, SOCKETS, SLEEPERS, SLOW_BODIES = 200, 100, 64, 40
"""How many of each it tries to hold, for as long as it works; others are refused."""

BODY_BYTES = 2_000_000
"""Nearly the longest body, of which the last byte never comes."""

READS = (
    "/v2/sandboxes", "/v2/tree", "/v2/snapshots", "/v2/host", "/v2/usage", "/v2/tenants",
    "/v2/secrets", "/v2/events?after=0&follow=false", "/v1/sandboxes", "/v1/snapshots", "/metrics",
    "/v2/tokens",
)  # fmt: skip
"""What it asks again and again."""

REQUEST = (
    "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
    "Content-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
)
JSON, TAR = "application/json", "application/x-tar"

LED, LED_HOST = "hostile-led", "led.example.com"
"""A secret, for which connections of a sandbox are led through the proxy."""

QUESTIONS = """
import os, re, socket
server = re.search("nameserver ([0-9.]+)", open("/etc/resolv.conf").read())[1]
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
    for number in range(1_000):
        name = os.urandom(8).hex().encode()
        question = b"\\x10" + name + b"\\x07example\\x03com\\0\\0\\x01\\0\\x01"
        asking.sendto(os.urandom(2) + b"\\1\\0\\0\\1" + bytes(6) + question, (server, 53))
True
"""
"""Asks for more names than may wait, and for no answer."""

PROXIED = """
import selectors, socket
opened = [socket.socket() for _ in range(300)]
with selectors.DefaultSelector() as selector:
    for each in opened:
        each.setblocking(False)
        each.connect_ex(("203.0.113.10", 443))
        selector.register(each, selectors.EVENT_WRITE)
    found = len(selector.select(5))
for each in opened:
    each.close()
found
"""
"""Opens more connections than one may, to an address that nobody has."""

DEEDS = frozenset(
    {"streams", "sockets", "bodies", "uploads", "secrets", "branches", "packs", "snoop"}
)
"""Deeds that need no other, each of which a run does at least once."""

NETWORK_DEEDS = frozenset({"questions", "proxied"})

ANSWER_TIMEOUT_S = 120.0

BUSY_S = 0.05
"""How long it leaves a daemon alone that has refused a connection."""


@dataclass
class Orders:
    """What the process was told.

    Attributes:
        url: Where the daemon answers.
        token: With which it asks.
        tag: A snapshot that it may fork.
        others: Names of another tenant's things: ids of sandboxes, tags, names of secrets.
        seconds: How long it works.
        network: Whether its sandboxes have a network, which they flood too.
    """

    url: str
    token: str
    tag: str
    others: list[str]
    seconds: float
    network: bool = False


@dataclass
class HostileTenant:
    """The tenant.

    Attributes:
        answers: How often each deed that was tried was answered with which status.
        told: Answers in which a name of the others was.
        reached: Requests about the others' things that were not refused.
    """

    orders: Orders
    answers: dict[str, Counter[int]] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    told_all: bool = False

    async def ask(
        self, client: RawClient, deed: str, method: str, path: str, body: object = None
    ) -> Answer:
        """Ask for one thing, and note how it was answered."""
        answers = self.answers.setdefault(deed, Counter())
        kind, data = JSON, b""
        if isinstance(body, bytes):
            kind, data = TAR, body
        elif body is not None:
            data = json.dumps(body).encode()
        client.say(self._head(method, path, kind, len(data)))
        client.writer.write(data)
        given = await client.answer(ANSWER_TIMEOUT_S)
        answers[given.status] += 1
        self._look(deed, path, given.body)
        if not self.told_all and self.has_done_all():
            self.told_all = True
            _say("did all")
        return given

    def _look(self, deed: str, path: str, said: bytes) -> None:
        """Note what was told of others, unless it only repeats what was asked about."""
        for name in self.orders.others:
            if name.encode() in said and name not in path and deed != "snoop":
                self.told.append(f"{deed} {path}: {said[:200]!r}")

    def _head(self, method: str, path: str, kind: str, length: int) -> bytes:
        given = {"token": self.orders.token, "kind": kind, "length": length}
        return REQUEST.format(method=method, path=path, **given).encode()

    async def begin(self) -> None:
        """Fork its own sandboxes."""
        async with RawClient(self.orders.url) as client:
            body = {"snapshot_tag": self.orders.tag, "n": SANDBOXES}
            if self.orders.network:
                secret = {"value": "0123456789", "hosts": [LED_HOST]}
                await self.ask(client, "begin", "PUT", f"/v2/secrets/{LED}", secret)
                body |= {"network": ["internet"], "secrets": [LED]}
            given = await self.ask(client, "begin", "POST", "/v2/sandboxes", body)
            self.own = [each["id"] for each in given.json()]

    async def end(self) -> None:
        """End what it has forked."""
        async with RawClient(self.orders.url) as client:
            client.say(self._head("GET", "/v2/sandboxes", JSON, 0))
            for each in (await client.answer(ANSWER_TIMEOUT_S)).json():
                client.say(self._head("DELETE", f"/v2/sandboxes/{each['id']}", JSON, 0))
                await client.answer(ANSWER_TIMEOUT_S)

    async def work(self) -> None:
        """Do everything at once, for as long as it was told to."""
        deeds = [self.flood(number) for number in range(FLOODERS)]
        deeds += [self.hold_stream() for _ in range(STREAMS)]
        deeds += [self.hold_socket() for _ in range(SOCKETS)]
        deeds += [self.hold_body() for _ in range(SLOW_BODIES)]
        deeds += [self.hold_exec(number) for number in range(SLEEPERS)]
        deeds += [self.upload(), self.keep_secrets(), self.grow(), self.pack(), self.snoop()]
        if self.orders.network:
            deeds += [self.evaluate("questions", QUESTIONS), self.evaluate("proxied", PROXIED)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.orders.seconds):
                await asyncio.gather(*deeds)

    def has_done_all(self) -> bool:
        """Whether each deed that needs no other was answered."""
        deeds = DEEDS | NETWORK_DEEDS if self.orders.network else DEEDS
        return all(self.answers.get(each) for each in deeds)

    async def again(self, deed: Callable[[RawClient], Awaitable[object]]) -> None:
        """Do something again and again, over a new connection each time the daemon closes one."""
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                async with RawClient(self.orders.url) as client:
                    try:
                        while True:
                            await deed(client)
                    finally:
                        client.writer.transport.abort()  # with what the daemon does not read
            await asyncio.sleep(BUSY_S)

    async def flood(self, number: int) -> None:
        """Ask for everything that can be listed."""
        paths = [*READS[number % len(READS) :], *READS[: number % len(READS)]]

        async def deed(client: RawClient) -> None:
            for path in paths:
                if path.startswith("/v2/events"):
                    await self._read_stream(client, path)
                else:
                    await self.ask(client, f"GET {path}", "GET", path)

        await self.again(deed)

    async def _read_stream(self, client: RawClient, path: str) -> None:
        """Read an answer that has no length, as far as its head."""
        client.say(self._head("GET", path, JSON, 0))
        given = await client.answer(ANSWER_TIMEOUT_S)
        self.answers.setdefault("events", Counter())[given.status] += 1
        raise ConnectionError

    async def hold_stream(self) -> None:
        """Follow events, and look at all that comes."""

        async def deed(client: RawClient) -> None:
            client.say(self._head("GET", "/v2/events", JSON, 0))
            given = await client.answer(ANSWER_TIMEOUT_S)
            self.answers.setdefault("streams", Counter())[given.status] += 1
            while said := await client.reader.read(65536):
                self._look("streams", "/v2/events", said)
            raise ConnectionError

        await self.again(deed)

    async def hold_socket(self) -> None:
        """Open a WebSocket, and say nothing."""

        async def deed(client: RawClient) -> None:
            more = f"Authorization: Bearer {self.orders.token}\r\n"
            path = f"/v2/sandboxes/{self.own[0]}/exec/stream"
            client.say(WEBSOCKET.format(path=path, more=more))
            given = await client.answer(ANSWER_TIMEOUT_S)
            self.answers.setdefault("sockets", Counter())[given.status] += 1
            await client.reader.read()
            raise ConnectionError

        await self.again(deed)

    async def hold_body(self) -> None:
        """Send a long body, but for its end."""

        async def deed(client: RawClient) -> None:
            client.say(self._head("PUT", "/v2/secrets/files", JSON, BODY_BYTES))
            client.writer.write(b" " * (BODY_BYTES - 1))
            given = await client.answer(ANSWER_TIMEOUT_S)
            self.answers.setdefault("bodies", Counter())[given.status] += 1
            raise ConnectionError

        await self.again(deed)

    async def hold_exec(self, number: int) -> None:
        """Have programs run that end much later."""
        path = f"/v2/sandboxes/{self.own[number % SANDBOXES]}/exec"
        body = {"args": ["sleep", "3600"], "timeout_secs": 3600.0}
        await self.again(lambda client: self.ask(client, "execs", "POST", path, body))

    async def upload(self) -> None:
        """Upload recipes, and bake what cannot be baked."""
        number = 0

        async def deed(client: RawClient) -> None:
            nonlocal number
            number += 1
            files = [entry(f"file-{each}", os.urandom(4096)) for each in range(64)]
            data = archive(TOML, entry("number", b"%d" % number), *files)
            given = await self.ask(client, "uploads", "POST", "/v2/recipes", data)
            if given.status == 201:
                body = {"tag": f"hostile-{number}", "recipe": given.json()["recipe"]}
                await self.ask(client, "bakes", "POST", "/v2/snapshots", body)

        await self.again(deed)

    async def keep_secrets(self) -> None:
        """Set more secrets than one may, called as the others' are, and remove some."""
        number = 0

        async def deed(client: RawClient) -> None:
            nonlocal number
            number += 1
            path = f"/v2/secrets/hostile-{number % 300}"
            body = {"value": "0123456789", "hosts": [f"h{number}.example.com"]}
            await self.ask(client, "secrets", "PUT", path, body)

        await self.again(deed)

    async def grow(self) -> None:
        """Branch, promote, compare and end, again and again."""

        async def deed(client: RawClient) -> None:
            path = f"/v2/sandboxes/{self.own[0]}/branch"
            given = await self.ask(client, "branches", "POST", path, {"n": 2})
            made = [each.get("id") for each in _siblings(given)]
            if len(made) == 2:
                await self.ask(client, "diffs", "POST", "/v2/diff", {"a": made[0], "b": made[1]})
                await self.ask(client, "promotions", "POST", f"/v2/sandboxes/{made[0]}/promote")
                await self.ask(client, "ends", "DELETE", f"/v2/sandboxes/{made[1]}")

        await self.again(deed)

    async def pack(self) -> None:
        """Have snapshots packed and written down, and take packs that are none."""

        async def deed(client: RawClient) -> None:
            path = "/v2/snapshots/hostile-pack/pack?allow_unsigned=true"
            await self.ask(client, "packs", "PUT", path, b"no pack")

        await self.again(deed)

    async def evaluate(self, deed: str, code: str) -> None:
        """Have one of its sandboxes do something to the network."""
        path = f"/v2/sandboxes/{self.own[1]}/eval"
        await self.again(lambda client: self.ask(client, deed, "POST", path, {"code": code}))

    async def snoop(self) -> None:
        """Try everything with what belongs to others."""
        tries: list[tuple[str, str, Any]] = []
        for name in self.orders.others:
            box, shot = f"/v2/sandboxes/{name}", f"/v2/snapshots/{name}"
            tries += [
                ("GET", box, None), ("DELETE", box, None), ("GET", f"{box}/logs", None),
                ("POST", f"{box}/ping", None), ("POST", f"{box}/eval", {"code": "1"}),
                ("POST", f"{box}/exec", {"args": ["true"]}), ("POST", f"{box}/branch", {"n": 1}),
                ("POST", f"{box}/promote", None), ("POST", f"{box}/reset", {}),
                ("PATCH", f"{box}/network", {"network": "internet"}),
                ("PATCH", f"{box}/limits", {"cpu_limit": 0.1}),
                ("GET", f"{box}/files?path=/etc/passwd", None), ("GET", f"/v1{box[3:]}", None),
                ("POST", "/v2/diff", {"a": name, "b": self.own[0]}),
                ("POST", "/v2/sandboxes", {"snapshot_tag": name}),
                ("GET", f"{shot}/info", None), ("DELETE", shot, None),
                ("GET", f"{shot}/pack", None),
                ("PUT", f"{shot}/shared", {"shared": True}), ("POST", f"{shot}/compact", {}),
                ("DELETE", f"/v2/secrets/{name}", None),
                ("DELETE", f"/v2/secrets/{name}?tenant=quiet", None),
            ]  # fmt: skip

        async def deed(client: RawClient) -> None:
            for method, path, body in tries:
                given = await self.ask(client, "snoop", method, path, body)
                if given.status not in {400, 403, 404, 503}:
                    self.reached.append(f"{method} {path}: {given.status}")
                if given.headers.get("connection") == "close":
                    raise ConnectionError

        await self.again(deed)


@dataclass
class Process:
    """The hostile tenant's process, and what it said at its end."""

    process: subprocess.Popen[bytes]
    said: dict[str, Any] = field(default_factory=dict)

    def stand_still(self) -> None:
        """Have it do nothing, with all that it holds."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Have it go on."""
        self.process.send_signal(signal.SIGCONT)

    def until_all_is_done(self) -> None:
        """Return when each of its deeds was answered at least once."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"did all\n"


@contextlib.contextmanager
def at_work(orders: Orders) -> Iterator[Process]:
    """Have a hostile tenant at work within the block; what it forked is gone afterwards."""
    command = [sys.executable, "-m", "tests.support.hostile_tenant", json.dumps(asdict(orders))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe) as process:  # noqa: S603 - our own
        made = Process(process)
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == b"at work\n"
            yield made
            process.stdin.close()
            made.said |= json.loads(process.stdout.readlines()[-1])
            assert process.wait(ANSWER_TIMEOUT_S) == 0
        finally:
            process.kill()


def _siblings(given: Answer) -> list[dict[str, Any]]:
    if given.status != 201:
        return []
    found: list[dict[str, Any]] = given.json()["sandboxes"]
    return found


async def _main(orders: Orders) -> None:
    tenant = HostileTenant(orders)
    await tenant.begin()
    _say("at work")
    told_to_end = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
    working = asyncio.ensure_future(tenant.work())
    await asyncio.wait([told_to_end, working], return_when=asyncio.FIRST_COMPLETED)
    working.cancel()
    await asyncio.wait([working])
    await tenant.end()
    answers = {deed: dict(found) for deed, found in tenant.answers.items()}
    _say(json.dumps({"answers": answers, "told": tenant.told, "reached": tenant.reached}))
    os._exit(0)  # a thread may still wait for a line


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    proc.raise_open_files_limit()
    asyncio.run(_main(Orders(**json.loads(sys.argv[1]))))
