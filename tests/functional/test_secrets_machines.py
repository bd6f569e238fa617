"""A secret in real machines: a guest uses it, and neither its memory nor its disk ever has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.model.ids import parse_tag
from forkd.model.network import NetworkChange, parse_policy
from forkd.model.sandbox import BranchOptions, ForkOptions
from forkd.model.secret import SecretRequest, SecretValue, parse_hosts
from forkd.network.upstream import Upstreams
from tests.support.callers import CALLER
from tests.support.namespaces import Namespace
from tests.support.proxied import ADDRESS, HOST, servers_certificate
from tests.support.real_host import REAL, shell, value
from tests.support.recorder import recording

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from forkd.model.ids import SandboxId
    from tests.support.real_host import RealHost
    from tests.support.recorder import Recorder

pytestmark = [
    REAL,
    pytest.mark.needs("nft"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

VALUE = "sk-bf1c6f0e2a5d47c8-in-no-guest"
FILLED = f"Bearer {VALUE}"

ASK = f"""
import os, urllib.request, urllib.error
def ask():
    request = urllib.request.Request("https://{HOST}/echo")
    request.add_header("Authorization", "Bearer " + os.environ["API_TOKEN"])
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.headers) + answer.read().decode()
    except urllib.error.URLError as error:
        return "no answer: " + str(error.reason)
ask()
"""


@pytest.fixture
def recorder(real_host: RealHost, tmp_path: Path) -> Iterator[Recorder]:
    """A server beside this host, which the proxy trusts."""
    ca, certificate = servers_certificate(tmp_path)
    proxy = real_host.service.networks.egress.proxy
    before, proxy._upstreams = proxy._upstreams, Upstreams(None, ca)  # noqa: SLF001
    with Namespace() as world, Namespace.here() as here:
        here.link("fksecret", world, "down0")
        try:
            here.address("fksecret", "198.51.100.5/30")
            world.address("down0", "198.51.100.6/30")
            world.gateway("198.51.100.5")
            world.address("lo", f"{ADDRESS}/32")
            here.route(f"{ADDRESS}/32", "198.51.100.6")
            with recording(world, ADDRESS, 443, certificate) as made:
                yield made
        finally:
            here.remove("fksecret")
            proxy._upstreams = before  # noqa: SLF001


async def know_the_host(host: RealHost, sandbox: SandboxId) -> None:
    await shell(host, sandbox, f"echo {ADDRESS} {HOST} >>/etc/hosts")


async def test_a_guest_uses_a_secret_that_it_never_has(
    real_host: RealHost, recorder: Recorder
) -> None:
    service = real_host.service
    hosts = parse_hosts([HOST])
    request = SecretRequest("api", SecretValue(VALUE), hosts, env="API_TOKEN")
    await service.secrets.put(CALLER, request)
    options = ForkOptions(network=parse_policy(f"{ADDRESS}:443/tcp"), secrets=("api",))
    async with real_host.forked(1, options) as (sandbox,):
        await know_the_host(real_host, sandbox.id)
        said = await value(real_host, sandbox.id, ASK)

        assert [each.header("Authorization") for each in recorder.requests] == [FILLED]
        assert "Authorization: Bearer forkd-secret-api" in said
        assert VALUE not in said
        told = await shell(real_host, sandbox.id, "echo $API_TOKEN $SSL_CERT_FILE")
        assert told == "forkd-secret-api /etc/forkd/ca-certificates.crt\n"

        # A branch has all of it, and asks with the CA that its source has loaded.
        branched = await service.branches.branch(
            CALLER, sandbox.id, 1, BranchOptions(deadline_s=300.0), tag=parse_tag("with-secret")
        )
        (sibling,) = branched.fork.sandboxes
        await know_the_host(real_host, sibling.id)
        assert "forkd-secret-api" in await value(real_host, sibling.id, "ask()")
        await service.networks.change(CALLER, sibling.id, NetworkChange(hold=True))
        assert "refused" in await value(real_host, sibling.id, "ask()")
        assert len(recorder.requests) == 2

        # Nothing of the value is in what was stored of the sandbox.
        stored = real_host.settings.snapshots_dir / "with-secret"
        files = [each for each in stored.rglob("*") if each.is_file()]
        assert {each.name for each in files} >= {"memory", "disk.layer"}
        holding = [each.name for each in files if VALUE.encode() in each.read_bytes()]
        assert holding == []
        assert any(b"forkd-secret-api" in each.read_bytes() for each in files), "this can be found"
        console = await service.sandboxes.console_log(CALLER, sandbox.id)
        assert VALUE.encode() not in console

        # After a reset it is told again, by a guest that knows nothing of it any more.
        await service.sandboxes.reset(CALLER, sandbox.id, deadline_s=300.0)
        await know_the_host(real_host, sandbox.id)
        assert "forkd-secret-api" in await value(real_host, sandbox.id, ASK)

        # What is removed is put in no more.
        await service.secrets.remove(CALLER, "api")
        await value(real_host, sandbox.id, "ask()")
        assert [each.header("Authorization") for each in recorder.requests] == [FILLED] * 3
        await service.sandboxes.delete(CALLER, sibling.id)
    await service.snapshots.delete(CALLER, parse_tag("with-secret"))
