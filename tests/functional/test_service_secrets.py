"""Secrets on a host: kept sealed, whose they are, and what the guests of sandboxes are told.

Forks are made over the fake VMM, in a network namespace of the test.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from dataclasses import replace
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, TypeVar

import pytest

from forkd.errors import Forbidden, NotFound
from forkd.model.caller import DEFAULT_TENANT, Caller, Scope, Tenant
from forkd.model.exec import ExecRequest, Stdout
from forkd.model.network import parse_policy
from forkd.model.sandbox import BranchOptions, ForkOptions
from forkd.model.secret import SecretRequest, SecretUse, SecretValue, parse_hosts
from forkd.network.plan import Plan
from forkd.service.host import DATABASE_FILE
from forkd.service.introduction import BUNDLE, SYSTEM_BUNDLES, TRUST_VARIABLES
from forkd.service.vault import KEY_FILE, Vault
from tests.support.audited import audited
from tests.support.callers import CALLER
from tests.support.namespaces import Namespace
from tests.support.service_host import TAG, FakeHost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from forkd.model.ids import SandboxId
    from forkd.service.host import Host

T = TypeVar("T")

VALUE = "sk-a-value-that-nobody-else-has"
OURS, THEIRS = Tenant("ours"), Tenant("theirs")
USE = SecretUse(DEFAULT_TENANT, "sb-any", ("openai",))


def request(name: str = "openai", value: str = VALUE, env: str | None = None) -> SecretRequest:
    return SecretRequest(name, SecretValue(value), parse_hosts(["api.example.com"]), env=env)


def may(*scopes: Scope, tenant: Tenant = OURS) -> Caller:
    return Caller("token:test", tenant, frozenset(scopes), "test")


def containing(folder: Path, value: str) -> list[str]:
    """Return the files that hold a value as it is."""
    files = [each for each in folder.rglob("*") if each.is_file()]
    return [str(each) for each in files if value.encode() in each.read_bytes()]


def vault_of(host: Host) -> Vault:
    return host.guests.introduction.vault


async def test_a_value_outlives_the_daemon_and_is_on_no_disk_as_it_is(
    fake_host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with fake_host.service() as host:
        await host.secrets.put(CALLER, request())
    async with fake_host.service() as host:
        (bound,) = vault_of(host).bound(USE)
        assert bound.value.reveal() == VALUE
        (listed,) = await host.secrets.list(CALLER)
        assert VALUE not in repr(listed)
        key = fake_host.settings.state_dir / KEY_FILE
        assert key.stat().st_mode & 0o777 == 0o600
        for folder in (fake_host.settings.state_dir, fake_host.settings.run_dir):
            assert containing(folder, VALUE) == []
        await host.secrets.remove(CALLER, "openai")
        assert vault_of(host).bound(USE) == ()
    async with fake_host.service() as host:
        assert await host.secrets.list(CALLER) == ()
    assert VALUE not in caplog.text + str([vars(each) for each in caplog.records])


async def test_without_its_key_a_secret_is_not_there_and_can_be_set_again(
    fake_host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_host.service() as host:
        await host.secrets.put(CALLER, request())
        await host.secrets.put(CALLER, request("other"))
    (fake_host.settings.state_dir / KEY_FILE).unlink()
    async with fake_host.service() as host:
        assert await host.secrets.list(CALLER) == ()
        assert "secret not readable" in caplog.text
        await host.secrets.remove(CALLER, "other")
        await host.secrets.put(CALLER, request())
    async with fake_host.service() as host:
        assert [each.name for each in await host.secrets.list(CALLER)] == ["openai"]


@pytest.mark.parametrize("column", ["tenant", "name"])
async def test_a_value_that_was_moved_to_another_secret_is_not_read(
    fake_host: FakeHost, column: str
) -> None:
    async with fake_host.service() as host:
        await host.secrets.put(CALLER, request())
    with sqlite3.connect(fake_host.settings.state_dir / DATABASE_FILE) as connection:
        connection.execute(f"UPDATE secrets SET {column} = 'another'")  # noqa: S608 - of ours
    connection.close()
    async with fake_host.service() as host:
        assert await host.secrets.list(CALLER) == ()


async def test_a_secret_is_its_tenants_and_an_admin_sees_all(fake_host: FakeHost) -> None:
    async with fake_host.service() as host:
        ours, theirs = may(Scope.RUN, Scope.READ), may(Scope.RUN, Scope.READ, tenant=THEIRS)
        await host.secrets.put(ours, request())
        assert await host.secrets.list(theirs) == ()
        with pytest.raises(NotFound):
            await host.secrets.remove(theirs, "openai")
        for attempt in (
            host.secrets.remove(theirs, "openai", OURS),
            host.secrets.put(theirs, request(), OURS),
        ):
            with pytest.raises(Forbidden):
                await attempt
        with pytest.raises(NotFound, match="no secret 'openai'"):
            vault_of(host).check(THEIRS, ("openai",))
        await host.secrets.put(theirs, request(value="their own value"))
        assert [each.tenant for each in await host.secrets.list(CALLER)] == [OURS, THEIRS]
        await host.secrets.put(CALLER, request("given"), THEIRS)
        await host.secrets.remove(CALLER, "openai", THEIRS)
        assert [each.name for each in await host.secrets.list(theirs)] == ["given"]
        assert [each.name for each in await host.secrets.list(ours)] == ["openai"]


async def test_the_audit_log_names_a_secret_and_does_not_have_its_value(tmp_path: Path) -> None:
    body = {"value": VALUE, "hosts": ["api.example.com"]}
    async with audited(tmp_path) as daemon, daemon.unix() as http:
        for refused in ({**body, "header": "Host"}, {**body, "value": f"{VALUE}\n"}):
            assert (await http.put("/v2/secrets/openai", json=refused)).status_code == 400
        answers = [
            await http.put("/v2/secrets/openai", json=body),
            await http.get("/v2/secrets"),
            await http.delete("/v2/secrets/openai"),
        ]
        assert [each.status_code for each in answers] == [200, 200, 204]
        assert not any(VALUE in each.text for each in answers)
        lines = await daemon.lines(5)
        assert [each["action"] for each in lines] == [
            "set_secret", "set_secret", "set_secret", "list_secrets", "delete_secret",
        ]  # fmt: skip
        assert lines[2]["objects"] == ["secret:openai"] == lines[4]["objects"]
    assert containing(tmp_path, VALUE) == []


def in_namespace(fake_host: FakeHost, work: Callable[[FakeHost], Awaitable[None]]) -> None:
    """Do `work` in a namespace, whose taps are its own."""
    network = Plan(IPv4Network("10.214.0.0/24"), "fks")
    placed = FakeHost(fake_host.folder, replace(fake_host.settings, network=network))

    async def run() -> None:
        await work(placed)

    with Namespace() as namespace:
        namespace.run(lambda: asyncio.run(run()))


def options(*names: str) -> ForkOptions:
    return ForkOptions(network=parse_policy("internet"), secrets=names, all_or_nothing=True)


async def read(host: Host, sandbox: SandboxId, path: str) -> bytes:
    async with await host.guests.read_file(CALLER, sandbox, path) as file:
        return b"".join([piece async for piece in file])


async def eval_(host: Host, sandbox: SandboxId, code: str) -> object:
    result = await host.guests.eval(CALLER, sandbox, code)
    assert result.error is None
    return result.value


@pytest.mark.needs("root", "nft", "tun")
def test_guests_are_told_of_a_ca_and_placeholders_and_of_no_value(fake_host: FakeHost) -> None:
    async def work(placed: FakeHost) -> None:
        async with placed.service() as host:
            await placed.bake(host, placed.recipe())
            with pytest.raises(NotFound, match="no secret 'openai'"):
                await host.sandboxes.fork(CALLER, TAG, 1, options("openai"))
            await host.secrets.put(CALLER, request(env="OPENAI_API_KEY"))
            forked = await host.sandboxes.fork(CALLER, TAG, 2, options("openai"))
            one, other = forked.sandboxes
            assert one.secrets == ("openai",)

            certificates = [await read(host, each.id, BUNDLE) for each in (one, other)]
            assert all(b"-----BEGIN CERTIFICATE-----" in each for each in certificates)
            assert certificates[0] != certificates[1], "each tree has a CA of its own"
            assert await read(host, one.id, SYSTEM_BUNDLES[0]) == certificates[0]
            code = "dict(__import__('os').environ)"
            told = await eval_(host, one.id, code)
            assert isinstance(told, dict)
            assert told["OPENAI_API_KEY"] == "forkd-secret-openai"
            assert {told[name] for name in TRUST_VARIABLES} == {BUNDLE}
            assert VALUE not in str(told)

            (sibling,) = (
                await host.branches.branch(CALLER, one.id, 1, BranchOptions())
            ).fork.sandboxes
            assert sibling.secrets == ("openai",)
            assert sibling.use == one.use, "and the CA of its tree"

            await host.sandboxes.reset(CALLER, one.id, deadline_s=20.0)
            assert await read(host, one.id, BUNDLE) != b""
            assert containing(placed.settings.state_dir, VALUE) == []
            assert containing(placed.settings.run_dir, VALUE) == []
        async with placed.service() as host:
            kept = await host.sandboxes.get(CALLER, one.id)
            assert kept.secrets == ("openai",)
            await host.sandboxes.delete_all([one.id, other.id, sibling.id])

    in_namespace(fake_host, work)


@pytest.mark.needs("root", "nft", "tun")
def test_programs_have_what_was_told_in_their_environment_unless_they_are_given_else(
    fake_host: FakeHost,
) -> None:
    async def work(placed: FakeHost) -> None:
        async with placed.service() as host:
            await placed.bake(host, placed.recipe())
            await host.secrets.put(CALLER, request(env="OPENAI_API_KEY"))
            (made,) = (await host.sandboxes.fork(CALLER, TAG, 1, options("openai"))).sandboxes
            for given, expected in (
                ({}, "forkd-secret-openai"),
                ({"OPENAI_API_KEY": "own"}, "own"),
            ):
                session = await host.guests.exec(CALLER, made.id, ExecRequest(("env",), given))
                async with session:
                    events = [event async for event in session]
                said = b"".join(each.data for each in events if isinstance(each, Stdout)).decode()
                assert f"OPENAI_API_KEY={expected}" in said
            await host.sandboxes.delete(CALLER, made.id)

    in_namespace(fake_host, work)
