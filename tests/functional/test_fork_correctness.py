"""Copies of one machine are as many machines: each row of fork-correctness.md."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from forkd.errors import EngineError
from forkd.model.network import HOST
from forkd.model.sandbox import ForkOptions
from tests.support.callers import CALLER
from tests.support.real_host import REAL_IN_SOAK, baked_host, value, variant

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from forkd.model.sandbox import Sandbox
    from tests.support.bakes import Bakes
    from tests.support.real_host import RealHost
    from tests.support.soak import Soak

pytestmark = [*REAL_IN_SOAK, pytest.mark.timeout(600)]

CHILDREN, SOAK_CHILDREN = 24, 100

AGE_S = 3 * 86_400
"""How long the snapshot believes to have lain: its parent's clock is set back by as much."""

CLOCK_ERROR_S = 0.05

WARMUP = f"""
import hashlib, os, secrets, socket, tempfile, time, uuid, zlib
import forkd

time.clock_settime(time.CLOCK_REALTIME, time.time() - {AGE_S})
uuid.uuid1()
next(tempfile._get_candidate_names())

generator = numpy.random.default_rng(1)
ran = []


def fate():
    '''In a fork with a network a third of the children fail to reseed, a third in their hook.'''
    has_network = len(open("/proc/net/route").readlines()) > 1
    return zlib.crc32(socket.gethostname().encode()) % 3 if has_network else 0


@forkd.on_fork
def renew():
    global generator
    if fate() == 1:
        raise ValueError("the hook has failed as asked")
    generator = numpy.random.default_rng()
    ran.append("on_fork")


def seed(*args, seed=random.seed):
    if fate() == 2:
        raise ValueError("reseeding has failed as asked")
    return seed(*args)


random.seed = seed

with open("/etc/forkd/post-fork", "w") as file:
    file.write("#!/bin/sh\\ncat /etc/hostname > /run/hook\\n")
os.chmod("/etc/forkd/post-fork", 0o755)
"""

ROWS = {
    "/dev/urandom": "open('/dev/urandom', 'rb', buffering=0).read(16).hex()",
    "getrandom": "os.getrandom(16).hex()",
    "random.random": "random.random()",
    "numpy.random.rand": "float(numpy.random.rand())",
    "a generator renewed by a hook": "float(generator.random())",
    "uuid.uuid4": "str(uuid.uuid4())",
    "uuid.uuid1": "str(uuid.uuid1())",
    "uuid.getnode": "uuid.getnode()",
    "secrets.token_hex": "secrets.token_hex(16)",
    "OpenSSL": "ssl.RAND_bytes(16).hex()",
    "tempfile name": "next(tempfile._get_candidate_names())",
    "host name": "socket.gethostname()",
    "/etc/hostname": "open('/etc/hostname').read()",
    "/etc/machine-id": "open('/etc/machine-id').read()",
    "boot id": "open('/proc/sys/kernel/random/boot_id').read()",
    "time.time_ns": "time.time_ns()",
}
"""What differs in each child, as the expression that shows it."""

ASK = f"[{', '.join(ROWS.values())}]"

HOOKS = "[ran, post_fork_ran, open('/run/hook').read() == open('/etc/hostname').read()]"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(tmp_path_factory: pytest.TempPathFactory, bakes: Bakes) -> AsyncIterator[RealHost]:
    """A host with a snapshot that has lain for days and has every kind of hook."""
    folder = tmp_path_factory.mktemp("recipes") / "aged"
    post_fork = "post_fork_ran = list(ran)\n"
    recipe = variant(folder, warmup=WARMUP, post_fork=post_fork)
    async with baked_host(bakes, recipe) as baked:
        yield baked


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def answers(host: RealHost, soak: Soak) -> list[dict[str, Any]]:
    """What each of many children, all alive at once, answers to every row."""
    async with host.forked(soak.count(CHILDREN, SOAK_CHILDREN), ForkOptions()) as children:
        asked = [await value(host, child.id, ASK) for child in children]
        names = [child.hostname for child in children]
    rows = [dict(zip(ROWS, each, strict=True)) for each in asked]
    assert [row["host name"] for row in rows] == names
    return rows


@pytest.mark.parametrize("row", ROWS)
async def test_no_two_children_agree_in(row: str, answers: list[dict[str, Any]]) -> None:
    assert len({answer[row] for answer in answers}) == len(answers)


async def test_ids_of_a_machine_have_their_form(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert len(bytes.fromhex(answer["/etc/machine-id"].strip())) == 16
        assert len(bytes.fromhex(answer["boot id"].strip().replace("-", ""))) == 16
        assert answer["/etc/hostname"].strip() == answer["host name"]


async def test_after_days_the_first_look_at_the_clock_is_right(host: RealHost) -> None:
    async with host.forked(8, ForkOptions()) as children:
        for child in children:
            before = time.time()
            found = await value(host, child.id, "time.time()")
            assert before - CLOCK_ERROR_S <= found <= time.time() + CLOCK_ERROR_S


async def test_after_days_the_monotonic_clock_has_not_jumped(host: RealHost) -> None:
    async with host.forked(1, ForkOptions()) as (child,):
        assert await value(host, child.id, "time.monotonic()") < AGE_S / 2


async def test_a_certificate_of_today_is_valid_in_a_child_of_days_ago(
    host: RealHost, tmp_path: Path
) -> None:
    certificate = make_certificate(tmp_path)
    async with host.forked(1, ForkOptions()) as (child,):
        code = f"certificate = {certificate.read_text()!r}\n" + CHECK_CERTIFICATE
        not_before, now, not_after = await value(host, child.id, code)

    assert not_before <= now <= not_after
    assert not_before > now - AGE_S  # so the parent, at the snapshot's time, would refuse it


async def test_every_hook_of_the_image_runs_once_in_each_child(host: RealHost) -> None:
    async with host.forked(4, ForkOptions()) as children:
        for child in children:
            assert await value(host, child.id, HOOKS) == [["on_fork"], ["on_fork"], True]


async def test_a_child_that_cannot_reseed_or_whose_hook_fails_is_no_sandbox_and_leaves_nothing(
    host: RealHost,
) -> None:
    known = host.vmm_processes()
    result = await host.service.sandboxes.fork(
        CALLER, host.snapshot.tag, 24, ForkOptions(network=HOST)
    )
    try:
        said = [failure.message for failure in result.failures]
        assert len(result.sandboxes) + len(said) == 24
        assert {(failure.stage, failure.code) for failure in result.failures} == {
            ("agent", "guest")
        }
        hooks = [words for words in said if "hook_failed" in words]
        seeds = [words for words in said if "reseed_failed" in words]
        assert hooks
        assert seeds
        assert len(hooks) + len(seeds) == len(said)
        assert all("the hook has failed as asked" in words for words in hooks)
        assert all("reseeding has failed as asked" in words for words in seeds)
        assert_nothing_else_is_there(host, result.sandboxes, known)
    finally:
        for sandbox in result.sandboxes:
            await host.service.sandboxes.delete(CALLER, sandbox.id)


async def test_all_or_nothing_ends_the_others_when_a_hook_fails(host: RealHost) -> None:
    known = host.vmm_processes()
    options = ForkOptions(network=HOST, all_or_nothing=True)
    with pytest.raises(EngineError, match="children failed"):
        await host.service.sandboxes.fork(CALLER, host.snapshot.tag, 24, options)

    assert await host.service.sandboxes.list(CALLER) == ()
    assert_nothing_else_is_there(host, (), known)


def assert_nothing_else_is_there(
    host: RealHost, sandboxes: tuple[Sandbox, ...], known: set[int]
) -> None:
    """Check folders, processes and links against the sandboxes there are."""
    folders = {path.name for path in host.settings.sandboxes_dir.iterdir()}
    assert folders == {sandbox.id for sandbox in sandboxes}
    links = [name for _, name in socket.if_nameindex() if host.names.network.is_ours(name)]
    assert len(links) == len(sandboxes)
    assert host.vmm_processes() - known == {sandbox.pid for sandbox in sandboxes}


CHECK_CERTIFICATE = """
with open("/run/certificate.pem", "w") as file:
    file.write(certificate)
dates = ssl._ssl._test_decode_cert("/run/certificate.pem")
start, end = (ssl.cert_time_to_seconds(dates[name]) for name in ("notBefore", "notAfter"))
[start, time.time(), end]
"""


def make_certificate(folder: Path) -> Path:
    """Make a self-signed certificate, valid from now until tomorrow."""
    made = folder / "certificate.pem"
    request = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=forkd", "-keyout", os.devnull, "-out", str(made)]
    subprocess.run([*request, *names], check=True, capture_output=True, timeout=60)  # noqa: S603 - ours
    return made
