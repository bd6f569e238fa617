"""The operator's proxy: where a host has no other way out, sandboxes go by it.

As in `test_secrets`, everything is as the daemon runs it but the machine.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from forkd.network.upstream import Via
from tests.support import outside as world
from tests.support.connect_proxy import connect_proxy
from tests.support.outside import outside
from tests.support.proxied import (
    ADDRESS,
    PLACEHOLDER,
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

pytestmark = [pytest.mark.needs("root", "nft")]

VIA = Via(world.NAME_SERVER, 3_128, "user:hush")


@pytest.fixture(scope="module")
def outer() -> Iterator[Outside]:
    with outside(1) as made:
        made.world.address("lo", f"{ADDRESS}/32")
        yield made


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Path, Path]]:
    return servers_certificate(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def recorder(outer: Outside, served: tuple[Path, tuple[Path, Path]]) -> Iterator[Recorder]:
    with recording(outer.world, ADDRESS, 443, served[1]) as made:
        yield made


@pytest.fixture
def run(
    outer: Outside, served: tuple[Path, tuple[Path, Path]], tmp_path: Path
) -> Callable[[Callable[[Proxied], Awaitable[None]], Via], None]:
    return lambda work, via: scenario(outer, tmp_path, work, ca_file=served[0], via=via)


@pytest.mark.parametrize("secrets", [(), ("token",)], ids=["no secrets", "secrets"])
def test_everything_goes_by_the_operators_proxy_if_there_is_one(
    outer: Outside,
    run: Callable[..., None],
    served: tuple[Path, tuple[Path, Path]],
    recorder: Recorder,
    secrets: tuple[str, ...],
) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put("internet", secrets=secrets)
        answer = await proxied.ask(context=None if secrets else trusting(served[0]))
        assert answer.text == "ok"
        assert await proxied.try_("tcp", world.PUBLIC[0], 80) == "reached"
        assert await proxied.try_("tcp", world.PRIVATE[0], 443) == "refused"

    with connect_proxy(outer.world, VIA.host, VIA.port) as proxy:
        run(work, VIA)
    assert proxy.asked == [f"{ADDRESS}:443", f"{world.PUBLIC[0]}:80"]
    assert set(proxy.credentials) == {"Basic dXNlcjpodXNo"}
    arrived = recorder.requests[0].header("Authorization")
    assert arrived == f"Bearer {VALUE if secrets else PLACEHOLDER}"


@pytest.mark.usefixtures("recorder")
def test_what_no_proxy_names_is_reached_straight(run: Callable[..., None]) -> None:
    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        assert (await proxied.ask()).text == "ok"

    run(work, Via.parse(f"http://{VIA.host}:{VIA.port}", "localhost, .EXAMPLE.com"))


def test_an_operators_proxy_that_is_down_or_refuses_is_one_clear_error(
    outer: Outside, run: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def work(proxied: Proxied) -> None:
        proxied.set()
        await proxied.put()
        answer = await proxied.ask()
        assert answer.status == 502
        assert "the host's proxy, 203.0.113.53:3128, cannot be reached" in answer.text
        with connect_proxy(outer.world, VIA.host, VIA.port) as proxy:
            proxy.status = "403 Forbidden"
            answer = await proxied.ask()
        assert answer.status == 502
        assert "does not lead to 203.0.113.77:443: 'HTTP/1.1 403 Forbidden'" in answer.text

    run(work, VIA)
    logged = str([vars(each) for each in caplog.records])
    assert "cannot be reached" in logged
    assert "hush" not in logged
