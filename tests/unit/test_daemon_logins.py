"""Who has no valid token waits; who has one never does, and loses all when it is taken away."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from forkd.daemon import logins, server
from forkd.daemon.auth import new_token
from forkd.daemon.logins import (
    DELAY_S_MAX,
    FREE,
    PLACE_CHARS_MIN,
    WAITING_MAX,
    FailedLogins,
    delay_s,
    network_of,
)
from forkd.errors import CapacityError, InvalidRequest
from forkd.model.caller import ALL_SCOPES, Scope, Tenant
from forkd.wire import v2
from tests.support.audited import DEADLINE_S, audited
from tests.support.callers import CALLER

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.audited import Audited

LONG_S = 3_600.0
"""A delay that nobody waits for the end of."""


@pytest.mark.parametrize(
    ("failures", "expected_s"),
    [(1, 0), (FREE, 0), (FREE + 1, 0.25), (FREE + 2, 0.5), (FREE + 6, 8), (10_000, DELAY_S_MAX)],
)
def test_each_failure_waits_twice_as_long_up_to_a_limit(failures: int, expected_s: float) -> None:
    assert delay_s(failures, 0.25) == expected_s


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_of_ipv6_a_64_counts_as_one_address(address: str, network: str) -> None:
    assert network_of(address) == network


async def failed(logins: FailedLogins, address: str) -> None:
    async with logins.slowed_down(address):
        pass


async def test_only_so_many_failures_of_an_address_wait_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logins, "DELAY_S_MAX", LONG_S)
    failures = FailedLogins(LONG_S)
    for number in range(FREE):
        await failed(failures, f"2001:db8::{number}")
    waiting = [asyncio.create_task(failed(failures, "2001:db8::9")) for _ in range(WAITING_MAX)]
    await asyncio.sleep(0)

    with pytest.raises(CapacityError, match="too many failed log-ins") as caught:
        await failed(failures, "2001:db8::a")
    assert caught.value.context["retry_after_s"] == LONG_S
    await failed(failures, "2001:db8:0:1::1")  # another one

    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)
    assert all(each.cancelled() for each in waiting)


async def test_only_tokens_too_long_to_be_guessed_keep_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logins, "PLACES_MAX", 1)
    failures = FailedLogins(LONG_S)
    chosen, made = "x" * (PLACE_CHARS_MIN - 1), "x" * PLACE_CHARS_MIN
    for secret in (chosen, made):
        failures.note_success("10.0.0.1", secret)
    for _ in range(FREE):
        await failed(failures, "10.0.0.1")
    waiting = [asyncio.create_task(failed(failures, "10.0.0.1")) for _ in range(WAITING_MAX)]
    await asyncio.sleep(0)

    failures.check("10.0.0.1", made)
    failures.check("10.0.0.2", "of another address")
    for secret in (chosen, made + "x"):
        with pytest.raises(CapacityError, match="too many failed log-ins"):
            failures.check("10.0.0.1", secret)
    failures.note_success("10.0.0.2", made)  # one too many: the first one is forgotten
    with pytest.raises(CapacityError):
        failures.check("10.0.0.1", made)
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)


async def test_who_leaves_while_waiting_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins, "DELAY_S_MAX", LONG_S)
    failures = FailedLogins(LONG_S)
    for _ in range(FREE):
        await failed(failures, "a")
    for _ in range(3 * WAITING_MAX):
        task = asyncio.create_task(failed(failures, "a"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def test_addresses_are_forgotten_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logins, "ADDRESSES_MAX", 10)
    failures = FailedLogins(0.0)
    for number in range(100):
        await failed(failures, f"10.0.0.{number}")

    assert list(failures._addresses) == [f"10.0.0.{each}" for each in range(90, 100)]  # noqa: SLF001 - what is held


async def test_an_address_begins_anew_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = FailedLogins(0.0)
    for _ in range(FREE + 1):
        await failed(failures, "a")
    monkeypatch.setattr(logins, "FORGOTTEN_S", -1.0)
    await failed(failures, "a")

    assert failures._addresses["a"].failures == 1  # noqa: SLF001 - what is held


async def test_a_token_that_logged_in_lately_never_waits_though_its_address_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logins, "DELAY_S_MAX", LONG_S)
    monkeypatch.setattr(server, "DRAIN_TIMEOUT_S", 1)  # those who still wait then
    async with (
        audited(tmp_path, login_delay_s=LONG_S) as daemon,
        daemon.http("guessed-wrongly") as stranger,
        daemon.http() as known,
    ):
        assert (await known.get("/v2/sandboxes")).status_code == 200
        for _ in range(FREE):
            assert (await stranger.get("/v2/sandboxes")).status_code == 401
        guesses = [
            asyncio.create_task(stranger.get("/v2/sandboxes")) for _ in range(WAITING_MAX + 1)
        ]
        done, waiting = await asyncio.wait(
            guesses, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED
        )
        (refused,) = done
        assert (await refused).status_code == 503
        assert (await refused).headers["retry-after"] == str(int(LONG_S))
        assert len(waiting) == WAITING_MAX

        assert (await known.get("/v2/sandboxes")).status_code == 200
        assert (await known.get("/healthz")).status_code == 200
        async with daemon.http((await daemon.token(Scope.READ)).secret) as new:
            assert (await new.get("/v2/sandboxes")).status_code == 503  # nothing is told of it
        lines = await daemon.lines(FREE + 4)  # who still waits was not answered
        told = [each["result"] for each in lines if each["status"] == 503]
        assert told == ["denied", "denied"]
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)


SECRETS: dict[str, Callable[[str], str]] = {
    "nothing": lambda _: "",
    "cut off": lambda secret: secret[:-1],
    "one character more": lambda secret: secret + "a",
    "another case": lambda secret: secret.swapcase(),
    "not ASCII": lambda _: "fkd_ümläut",
    "very long": lambda _: "x" * 10_000,
}


@pytest.mark.parametrize("what", SECRETS)
@pytest.mark.parametrize("whose", ["token", "file"])
async def test_what_is_nearly_a_token_is_none(tmp_path: Path, what: str, whose: str) -> None:
    async with audited(tmp_path) as daemon, daemon.unix() as unix:
        made = await daemon.token(Scope.READ)
        secret = SECRETS[what](made.secret if whose == "token" else daemon.secret)
        async with daemon.http() as http:
            headers = {b"authorization": b"Bearer" + b" " * bool(secret) + secret.encode()}
            answer = await http.get("/v2/sandboxes", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "denied")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert (await unix.get("/v2/sandboxes")).status_code == 200


@pytest.mark.parametrize("kind", ["Basic", "bearer:", "Token", "Bearerx"])
async def test_a_token_of_another_kind_of_log_in_is_none(tmp_path: Path, kind: str) -> None:
    async with audited(tmp_path) as daemon, daemon.http() as http:
        headers = {"Authorization": f"{kind} {daemon.secret}"}
        assert (await http.get("/v2/sandboxes", headers=headers)).status_code == 401


async def test_an_expired_token_is_refused_by_its_name(tmp_path: Path) -> None:
    async with audited(tmp_path) as daemon:
        made = await daemon.token(Scope.READ)
        tokens = daemon.service.tokens._by_digest  # noqa: SLF001 - nobody makes one that is over
        for digest, token in tokens.items():
            tokens[digest] = replace(token, expires_at=datetime.now(UTC))
        async with daemon.http(made.secret) as http:
            answer = await http.get("/v2/sandboxes")

    assert answer.status_code == 401
    assert "the token ci expired at" in answer.json()["error"]


async def test_a_token_without_the_scope_is_refused_by_the_scopes_name(tmp_path: Path) -> None:
    async with audited(tmp_path) as daemon:
        made = await daemon.token(Scope.READ, Scope.RUN, Scope.SNAPSHOTS)
        async with daemon.http(made.secret) as http:
            answer = await http.get("/v2/tokens")

    assert (answer.status_code, answer.json()["context"]) == (403, {"scope": "admin"})
    assert "token:ci lacks the scope admin" in answer.json()["error"]


async def test_tokens_see_no_tenant_but_their_own(tmp_path: Path) -> None:
    async with audited(tmp_path) as daemon:
        red = await daemon.token(Scope.READ, name="red", tenant=Tenant("red"))
        async with daemon.http() as admin:
            for name in ("red", "blue"):
                answer = await admin.put(f"/v2/tenants/{name}/quotas", json={"sandboxes": 1})
                assert answer.is_success, answer.text
        async with daemon.http(red.secret) as http:
            assert [each["name"] for each in (await http.get("/v2/tenants")).json()] == ["red"]


def waits_for_ever(daemon: Audited) -> asyncio.Event:
    """Have the daemon say nothing of its host; the event is set as soon as it is asked."""
    begun = asyncio.Event()

    async def wait(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    daemon.service.system.info = wait  # type: ignore[method-assign,assignment]
    return begun


async def end_by_removal(daemon: Audited) -> None:
    await daemon.service.tokens.remove(CALLER, "ci")


async def end_by_expiry(_: Audited) -> None:
    """Do nothing: its time runs out."""


async def end_by_another_file(daemon: Audited) -> None:
    (daemon.folder / "token").write_text(new_token())
    daemon.reloads.run()


ENDS = {
    "removed": (end_by_removal, None),
    "expired": (end_by_expiry, timedelta(seconds=0.5)),
    "another file": (end_by_another_file, None),
}


@pytest.mark.parametrize("how", ENDS)
async def test_a_request_under_way_ends_with_its_token(tmp_path: Path, how: str) -> None:
    end, lasts = ENDS[how]
    async with audited(tmp_path) as daemon:
        begun = waits_for_ever(daemon)
        expires_at = None if lasts is None else datetime.now(UTC) + lasts
        made = await daemon.token(*ALL_SCOPES, expires_at=expires_at)
        secret = daemon.secret if how == "another file" else made.secret
        async with daemon.http(secret) as http:
            asking = asyncio.create_task(http.get("/v2/host"))
            async with asyncio.timeout(DEADLINE_S):
                await begun.wait()
                await end(daemon)
                answer = await asking
            assert (answer.status_code, answer.json()["code"]) == (401, "denied")
            assert "was removed, or has expired" in answer.json()["error"]
            assert (await http.get("/v2/sandboxes")).status_code == 401
        assert daemon.service.tokens._users == {}  # noqa: SLF001 - nothing is left


@pytest.mark.parametrize("how", ENDS)
async def test_an_exec_under_way_ends_with_its_token(tmp_path: Path, how: str) -> None:
    end, lasts = ENDS[how]
    async with audited(tmp_path) as daemon, daemon.unix() as unix:
        body = {"tag": "new", "recipe": "/recipes/good"}
        assert (await unix.post("/v2/snapshots", json=body)).is_success
        answer = await unix.post("/v2/sandboxes", json={"snapshot_tag": "new", "n": 1})
        expires_at = None if lasts is None else datetime.now(UTC) + lasts
        made = await daemon.token(*ALL_SCOPES, expires_at=expires_at)
        secret = daemon.secret if how == "another file" else made.secret
        path = f"/v2/sandboxes/{answer.json()[0]['id']}/exec/stream"
        start = v2.ExecStart(args=["cat"]).model_dump_json().encode()
        async with (
            asyncio.timeout(DEADLINE_S),
            connect(
                f"ws{daemon.url.removeprefix('http')}{path}",
                additional_headers={"Authorization": f"Bearer {secret}"},
            ) as stream,
        ):
            await stream.send(bytes([v2.Kind.REQUEST]) + start)
            assert (await stream.recv())[0] == v2.Kind.EVENT  # it runs
            await end(daemon)
            with pytest.raises(ConnectionClosed) as closed:
                await stream.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008
        assert "was removed, or has expired" in closed.value.rcvd.reason


async def test_a_token_file_that_others_may_read_is_not_taken_at_a_reload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with audited(tmp_path) as daemon:
        before = daemon.secret
        (tmp_path / "token").write_text(new_token())
        (tmp_path / "token").chmod(0o644)
        with caplog.at_level(logging.ERROR):
            daemon.reloads.run()
        async with daemon.http(before) as http:
            assert (await http.get("/v2/sandboxes")).status_code == 200
        async with daemon.http() as http:
            assert (await http.get("/v2/sandboxes")).status_code == 401
    assert any("chmod 600" in str(each.__dict__.get("error")) for each in caplog.records)


async def test_a_token_file_that_others_may_read_keeps_the_daemon_from_starting(
    tmp_path: Path,
) -> None:
    (tmp_path / "token").write_text(new_token())
    (tmp_path / "token").chmod(0o640)

    with pytest.raises(InvalidRequest, match="chmod 600"):
        async with audited(tmp_path):
            pass
    assert not (tmp_path / "forkd.sock").exists()
