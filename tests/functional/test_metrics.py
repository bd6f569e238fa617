"""Every metric is one that real sandboxes move, and there are only so many series."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import shutil
import socket
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest

from forkd.daemon.settings import Bind
from forkd.errors import ForkdError
from forkd.host import holdings
from forkd.installed import VERSION
from forkd.limits import BUILDS_MAX
from forkd.model.caller import DEFAULT_TENANT, TENANT_SCOPES, Caller, Scope
from forkd.model.exec import ExecRequest
from forkd.model.ids import SandboxId, parse_tag
from forkd.model.image import ImageConfig, ImageSnapshotRequest
from forkd.model.network import NetworkChange
from forkd.model.pack import UnpackRequest
from forkd.model.recipe import RecipeChanges
from forkd.model.sandbox import BranchOptions, ForkOptions, NewLimits, SandboxChange
from forkd.model.secret import SecretRequest, SecretValue, parse_hosts
from forkd.model.snapshot import BuildLinkRequest, LinkRequest, SnapshotRequest
from forkd.model.tenant import Quotas, QuotasChange, parse_tenant
from forkd.model.token import TokenRequest
from forkd.service import figures
from forkd.telemetry import names
from tests.support.builds import blocked_builds, drain
from tests.support.callers import CALLER
from tests.support.figures import Scrape
from tests.support.served_host import Served, served_host
from tests.support.service_host import TAG, UNTIL_DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from forkd.model.ids import Tag
    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

TCP = Bind("127.0.0.1", 0)

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


async def scrape(served: Served) -> Scrape:
    answer = await served.http.get("/metrics")
    assert answer.status_code == 200, answer.text
    return Scrape.read(answer.text)


@dataclass(frozen=True, slots=True)
class Scrapes:
    """What was scraped of a host that did nothing yet, while it was busy, and when it was over."""

    idle: Scrape
    busy: Scrape
    over: Scrape
    state_size_bytes: int

    def grew(self, name: str, **labels: str) -> bool:
        return self.busy.total(name, **labels) > self.idle.total(name, **labels)

    def has(self, name: str) -> bool:
        return self.busy.total(name) > 0

    def came_and_went(self, name: str, **labels: str) -> bool:
        before, then = self.idle.total(name, **labels), self.busy.total(name, **labels)
        return before == self.over.total(name, **labels) < then


MOVED: dict[names.Metric, Callable[[Scrapes], bool]] = {
    names.OPERATION_SECONDS: lambda s: s.grew(
        "forkd_operation_duration_seconds_count", operation="fork"
    ),
    names.OPERATIONS: lambda s: s.grew("forkd_operations_total", operation="fork", result="ok"),
    names.CHILDREN: lambda s: (
        s.grew("forkd_children_total", result="ready")
        and s.grew("forkd_children_total", result="failed")
    ),
    names.CHILDREN_AGAIN: lambda s: s.grew("forkd_children_again_total"),
    names.PAUSE_SECONDS: lambda s: s.grew("forkd_branch_pause_seconds_sum"),
    names.FIRST_ANSWER_SECONDS: lambda s: s.grew("forkd_first_answer_seconds_sum"),
    names.LOGINS_DENIED: lambda s: s.grew("forkd_logins_denied_total"),
    names.REQUESTS: lambda s: s.busy.total("forkd_requests_in_progress", kind="http") == 2.0,
    names.SANDBOXES: lambda s: s.came_and_went("forkd_sandboxes", state="running"),
    names.SNAPSHOTS: lambda s: s.grew("forkd_snapshots", status="ready"),
    names.ZYGOTES: lambda s: s.grew("forkd_zygotes"),
    names.SLOTS_READY: lambda s: s.busy.total("forkd_network_slots_ready") == 0.0,  # see below
    names.BUILDS: lambda s: (
        s.came_and_went("forkd_builds", state="running")
        and s.came_and_went("forkd_builds", state="waiting")
    ),
    names.FOLLOWERS: lambda s: s.came_and_went("forkd_followers"),
    names.PRIVATE_BYTES: lambda s: s.came_and_went("forkd_private_memory_bytes"),
    names.SHARED_BYTES: lambda s: s.grew("forkd_shared_memory_bytes"),
    names.HOST_AVAILABLE_BYTES: lambda s: s.busy.total("forkd_host_memory_available_bytes") > 0,
    names.DISK_FREE_BYTES: lambda s: all(
        0 < s.busy.total("forkd_disk_free_bytes", folder=each) <= s.state_size_bytes
        for each in ("state", "tops")
    ),
    names.DISK_SIZE_BYTES: lambda s: all(
        s.busy.total("forkd_disk_size_bytes", folder=each) == s.state_size_bytes
        for each in ("state", "tops")
    ),
    names.TOPS_BYTES: lambda s: s.came_and_went("forkd_tops_bytes"),
    names.LAG_SECONDS: lambda s: s.busy.total("forkd_event_loop_lag_seconds") > 0,
    names.BUILD_INFO: lambda s: s.busy.total("forkd_build_info", version=VERSION) == 1.0,
} | {each: functools.partial(Scrapes.has, name=each.name) for each in names.PROCESS}
"""How each metric is seen to follow what happens; one that is not here fails.

Network slots are made in test_network_slots.py, which needs more of the host.
"""


@contextlib.asynccontextmanager
async def follower(host: Host) -> AsyncIterator[None]:
    task = asyncio.create_task(drain(host.journal.follow(CALLER)))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until_scraped(served: Served, good: Callable[[Scrape], bool]) -> Scrape:
    """Return the first scrape that is good; what it tells of has no event for us."""
    async with asyncio.timeout(UNTIL_DEADLINE_S):
        while not good(found := await scrape(served)):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
    return found


async def test_every_metric_follows_what_happens(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "FRESH_S", 0.0)
    async with served_host(fake_host, bind=TCP) as served:
        await served.service.snapshots.delete(CALLER, TAG)
        idle = await scrape(served)
        await fake_host.bake(served.service, fake_host.recipe(knobs="fork=fail:3 fork=again"))
        made = await served.http.post("/v2/sandboxes", json={"snapshot_tag": "python", "n": 3})
        ids = [each["id"] for each in made.json() if each["status"] == "running"]
        assert [each["attempts"] for each in made.json()] == [2, 2, 1]
        await served.http.post(f"/v2/sandboxes/{ids[0]}/branch", json={"n": 1})
        await served.service.guests.write_file(CALLER, SandboxId(ids[0]), "/file", one(bytes(8192)))
        async with httpx.AsyncClient(base_url=served.tcp_url, trust_env=False) as stranger:
            assert (await stranger.get("/metrics")).status_code == 401

        async with (
            blocked_builds(served.service, fake_host, BUILDS_MAX + 1, monkeypatch),
            follower(served.service),
        ):
            log = f"/v2/sandboxes/{ids[0]}/logs?follow=true"
            async with served.http.stream("GET", log):
                busy = await until_scraped(served, lambda each: is_busy(each) and lagged(each))
        for each in await served.sandboxes():
            await served.http.delete(f"/v2/sandboxes/{each}")
        over = await scrape(served)

    scrapes = Scrapes(idle, busy, over, shutil.disk_usage(fake_host.settings.state_dir).total)
    assert busy.names == {each.name for each in names.ALL} == {each.name for each in MOVED}
    assert [each.name for each in names.ALL if not MOVED[each](scrapes)] == []


def is_busy(each: Scrape) -> bool:
    return each.total("forkd_builds", state="waiting") == each.total("forkd_followers") == 1.0


def lagged(each: Scrape) -> bool:
    return each.total("forkd_event_loop_lag_seconds") > 0


async def one(data: bytes) -> AsyncIterator[bytes]:
    yield data


@dataclass(frozen=True, slots=True)
class World:
    """What operations are tried on.

    Attributes:
        spare: A sandbox that may go.
        sandbox: One that stays.
        child: A branch of it.
    """

    host: Host
    recipes: FakeHost
    spare: SandboxId
    sandbox: SandboxId
    child: SandboxId


LINK, BAKED, MOVED_HERE = (parse_tag(each) for each in ("link", "baked", "moved-here"))


async def _first(items: AsyncGenerator[object, None]) -> None:
    async with contextlib.aclosing(items):
        await anext(items)


async def _exec(world: World) -> None:
    request = ExecRequest(("echo",))
    async with await world.host.guests.exec(CALLER, world.sandbox, request) as session:
        await drain(session)


async def _read_file(world: World) -> None:
    async with await world.host.guests.read_file(CALLER, world.sandbox, "/file") as reader:
        await drain(reader)


async def _read_archive(world: World) -> None:
    async with await world.host.guests.read_archive(CALLER, world.sandbox, "/") as reader:
        await drain(reader)


async def _upload(world: World) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        tar.add(world.recipes.recipe(), arcname=".")
    stored = await world.host.recipes.upload(CALLER, one(archive.getvalue()))
    await world.host.recipes.get(CALLER, stored.source)


async def _link(world: World) -> None:
    await drain(world.host.chains.extend(CALLER, LinkRequest(LINK, world.sandbox)))


async def _tokens(world: World) -> None:
    request = TokenRequest("bench", DEFAULT_TENANT, frozenset({Scope.READ}))
    await world.host.tokens.create(CALLER, request)
    await world.host.tokens.list(CALLER)
    await world.host.tokens.remove(CALLER, "bench")


async def _secrets(world: World) -> None:
    secrets = world.host.secrets
    value = SecretValue("some value")
    await secrets.put(CALLER, SecretRequest("token", value, parse_hosts(["api.example.com"])))
    await secrets.list(CALLER)
    await secrets.remove(CALLER, "token")


async def _tenants(world: World) -> None:
    tenant = parse_tenant("team")
    await world.host.tenants.set_quotas(CALLER, tenant, Quotas(sandboxes=1))
    await world.host.tenants.change_quotas(CALLER, tenant, QuotasChange({"vcpus": 1}))
    await world.host.tenants.list(CALLER)
    await world.host.tenants.remove_quotas(CALLER, tenant)


async def _connect(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with await world.host.guests.connect(CALLER, world.sandbox, port):
            pass


async def _unpack(world: World) -> None:
    pack = world.host.packs.pack(CALLER, TAG)
    request = UnpackRequest(MOVED_HERE, allow_unsigned=True)
    async with contextlib.aclosing(pack) as pieces:
        await world.host.packs.unpack(CALLER, request, pieces)


async def _snapshots(world: World) -> None:
    host = world.host
    await drain(host.snapshots.bake(CALLER, SnapshotRequest(BAKED, world.recipes.recipe())))
    await host.snapshots.share(CALLER, BAKED, shared=True)
    await host.snapshots.get(CALLER, BAKED)
    await host.snapshots.delete(CALLER, BAKED)


async def _snapshot_image(world: World) -> None:
    request = ImageSnapshotRequest(world.recipes.recipe(), RecipeChanges())
    await drain(world.host.image_snapshots.for_image(CALLER, request))


async def _build_link(world: World) -> None:
    request = BuildLinkRequest("0" * 64, ImageConfig(), world.sandbox)
    await world.host.build_links.link(CALLER, request)


async def _console(world: World) -> None:
    await world.host.sandboxes.console_log(CALLER, world.sandbox)
    await _first(world.host.sandboxes.follow_console_log(CALLER, world.sandbox))


async def _refused(work: Awaitable[object]) -> None:
    with pytest.raises(ForkdError):
        await work


OPERATIONS: list[tuple[dict[str, str], Callable[[World], Awaitable[object]]]] = [
    ({"upload_recipe": "ok", "get_recipe": "ok"}, _upload),
    ({"create_token": "ok", "list_tokens": "ok", "remove_token": "ok"}, _tokens),
    (
        {"set_quotas": "ok", "change_quotas": "ok", "list_tenants": "ok", "remove_quotas": "ok"},
        _tenants,
    ),
    ({"set_secret": "ok", "list_secrets": "ok", "remove_secret": "ok"}, _secrets),
    ({"extend": "ok"}, _link),
    ({"compact": "ok"}, lambda w: w.host.chains.compact(CALLER, LINK, parse_tag("flat"))),
    (
        {"bake": "ok", "share_snapshot": "ok", "get_snapshot": "ok", "delete_snapshot": "ok"},
        _snapshots,
    ),
    ({"build": "ok"}, lambda w: drain(w.host.images.build(CALLER, w.recipes.recipe()))),
    ({"list_recipes": "ok"}, lambda w: w.host.recipes.list(CALLER)),
    ({"list_images": "ok"}, lambda w: w.host.image_cache.list(CALLER)),
    (
        {"remove_image": "not_found"},
        lambda w: _refused(w.host.image_cache.remove(CALLER, "0" * 32)),
    ),
    ({"snapshot_image": "ok"}, _snapshot_image),
    ({"build_link": "ok"}, _build_link),
    ({"list_snapshots": "ok"}, lambda w: w.host.snapshots.list(CALLER)),
    ({"tidy": "ok"}, lambda w: w.host.snapshots.tidy(CALLER)),
    ({"pack": "ok", "unpack": "ok"}, _unpack),
    ({"fork": "ok"}, lambda w: w.host.sandboxes.fork(CALLER, TAG, 1, ForkOptions())),
    ({"list_sandboxes": "ok"}, lambda w: w.host.sandboxes.list(CALLER)),
    ({"get_sandbox": "ok"}, lambda w: w.host.sandboxes.get(CALLER, w.sandbox)),
    ({"find_sandbox": "ok"}, lambda w: w.host.sandboxes.find(CALLER, w.sandbox)),
    ({"console_log": "ok", "follow_console_log": "cancelled"}, _console),
    (
        {"change_sandbox": "ok"},
        lambda w: w.host.sandboxes.change(CALLER, w.sandbox, SandboxChange(labels={})),
    ),
    ({"pause": "ok"}, lambda w: w.host.sandboxes.pause(CALLER, w.sandbox)),
    ({"resume": "ok"}, lambda w: w.host.sandboxes.resume(CALLER, w.sandbox)),
    ({"reset": "ok"}, lambda w: w.host.sandboxes.reset(CALLER, w.sandbox, deadline_s=10.0)),
    (
        {"set_limits": "conflict"},
        lambda w: _refused(w.host.sandboxes.set_limits(CALLER, w.sandbox, NewLimits(cpu_limit=1))),
    ),
    ({"get_network": "conflict"}, lambda w: _refused(w.host.networks.get(CALLER, w.sandbox))),
    (
        {"change_network": "conflict"},
        lambda w: _refused(w.host.networks.change(CALLER, w.sandbox, NetworkChange(hold=True))),
    ),
    ({"delete_sandbox": "ok"}, lambda w: w.host.sandboxes.delete(CALLER, w.spare)),
    ({"branch": "ok"}, lambda w: w.host.branches.branch(CALLER, w.sandbox, 1, BranchOptions())),
    ({"compare": "ok"}, lambda w: w.host.comparisons.compare(CALLER, w.sandbox, w.child)),
    ({"draw_trees": "ok"}, lambda w: w.host.trees.draw(CALLER)),
    ({"tree_budgets": "ok"}, lambda w: w.host.trees.budgets(CALLER)),
    ({"ping": "ok"}, lambda w: w.host.guests.ping(CALLER, w.sandbox)),
    ({"echo": "ok"}, lambda w: w.host.guests.echo(CALLER, w.sandbox, "x")),
    ({"eval": "ok"}, lambda w: w.host.guests.eval(CALLER, w.sandbox, "1")),
    ({"connect_port": "ok"}, _connect),
    ({"start_exec": "ok", names.EXEC: "ok"}, _exec),
    (
        {"write_file": "ok"},
        lambda w: w.host.guests.write_file(CALLER, w.sandbox, "/file", one(b"")),
    ),
    ({"read_file": "ok"}, _read_file),
    ({"read_archive": "ok"}, _read_archive),
    (
        {"write_archive": "ok"},
        lambda w: w.host.guests.write_archive(CALLER, w.sandbox, "/", one(b"")),
    ),
    ({"stat_file": "not_found"}, lambda w: _refused(w.host.guests.stat(CALLER, w.sandbox, "/a"))),
    ({"list_dir": "ok"}, lambda w: w.host.guests.list_dir(CALLER, w.sandbox, "/")),
    ({"make_dir": "ok"}, lambda w: w.host.guests.make_dir(CALLER, w.sandbox, "/a")),
    ({"move_file": "ok"}, lambda w: w.host.guests.move(CALLER, w.sandbox, "/file", "/moved")),
    ({"remove_file": "ok"}, lambda w: w.host.guests.remove(CALLER, w.sandbox, "/moved")),
    ({"host_info": "ok"}, lambda w: w.host.system.info(CALLER)),
    ({"metrics": "ok"}, lambda w: w.host.figures.exposition(CALLER, "")),
    ({"get_usage": "ok"}, lambda w: w.host.usage.get(CALLER, w.sandbox)),
    ({"list_usage": "ok"}, lambda w: w.host.usage.list(CALLER)),
    ({"follow_events": "cancelled"}, lambda w: _first(w.host.journal.follow(CALLER, after=0))),
    ({"promote": "ok"}, lambda w: w.host.promotions.promote(CALLER, w.child)),
]
"""Each operation, how it ends, and what does it; in the order in which they are tried."""


async def test_every_operation_is_counted_and_timed(fake_host: FakeHost) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        forked = await host.sandboxes.fork(CALLER, TAG, 2, ForkOptions())
        sandbox, spare = (each.id for each in forked.sandboxes)
        (child,) = (await host.branches.branch(CALLER, sandbox, 1, BranchOptions())).fork.sandboxes
        world = World(host, fake_host, spare, sandbox, child.id)
        for ends, do in OPERATIONS:
            before = read(host)
            await do(world)
            moved = {name: ended(before, read(host), name) for name in ends}
            assert moved == {name: {end: 1} for name, end in ends.items()}
        for each in await host.sandboxes.list(CALLER):
            await host.sandboxes.delete(CALLER, each.id)

    tried = [name for ends, _ in OPERATIONS for name in ends]
    assert sorted(tried) == sorted(names.OPERATION_NAMES)


def read(host: Host) -> Scrape:
    text, _ = host.telemetry.exposition("")
    return Scrape.read(text.decode())


def ended(before: Scrape, after: Scrape, name: str) -> dict[str, float]:
    """Return how often an operation ended which way between two scrapes; it was timed as often."""
    labels = {dict(has)["result"] for each, has in after.series if each == names.OPERATIONS.name}
    found = {
        result: after.total(names.OPERATIONS.name, operation=name, result=result)
        - before.total(names.OPERATIONS.name, operation=name, result=result)
        for result in labels
    }
    timed = f"{names.OPERATION_SECONDS.name}_count"
    times = after.total(timed, operation=name) - before.total(timed, operation=name)
    assert times == sum(found.values())
    return {result: count for result, count in found.items() if count}


async def test_a_thousand_forks_make_no_series(fake_host: FakeHost) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        failing = fake_host.recipe(knobs="fork=fail:1", name="failing")
        failing_tag = (await fake_host.bake(host, failing, "failing")).tag
        await fork_and_delete(host, TAG, 1)
        before = read(host)
        for _ in range(10):
            await fork_and_delete(host, TAG, 2)
            await fork_and_delete(host, failing_tag, 98)  # which are cheap
        after = read(host)

    for result, count in {"ready": 20, "failed": 980}.items():
        name, labels = names.CHILDREN.name, {"result": result}
        assert after.total(name, **labels) - before.total(name, **labels) == count
    assert after.series.keys() == before.series.keys()


async def fork_and_delete(host: Host, tag: Tag, count: int) -> None:
    forked = (await host.sandboxes.fork(CALLER, tag, count, ForkOptions())).sandboxes
    await host.figures.exposition(CALLER, "")
    await asyncio.gather(*(host.sandboxes.delete(CALLER, each.id) for each in forked))


async def test_a_scraper_gets_the_format_that_it_asks_for(fake_host: FakeHost) -> None:
    async with served_host(fake_host) as served:
        plain = await served.http.get("/metrics")
        other = await served.http.get("/metrics", headers={"Accept": OPENMETRICS})

    assert plain.headers["Content-Type"].startswith("text/plain; version=")
    assert "# EOF" not in plain.text
    assert other.headers["Content-Type"].startswith("application/openmetrics-text; version=1.")
    assert other.text.endswith("# EOF\n")


async def test_metrics_take_a_scope_of_their_own(fake_host: FakeHost) -> None:
    lacking = Caller("nobody", DEFAULT_TENANT, TENANT_SCOPES, "test")
    async with fake_host.service() as host:
        with pytest.raises(ForkdError, match="lacks the scope metrics"):
            await host.figures.exposition(lacking, "")


async def test_processes_are_not_read_again_at_once(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_pids: list[int] = []
    holding = holdings._holding  # noqa: SLF001 - the seam

    def counted(pid: int, device: int) -> holdings.Holding | None:
        read_pids.append(pid)
        return holding(pid, device)

    monkeypatch.setattr(holdings, "_holding", counted)
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        forked = await host.sandboxes.fork(CALLER, TAG, 2, ForkOptions())
        for _ in range(2):
            await host.figures.exposition(CALLER, "")
        for each in forked.sandboxes:
            await host.sandboxes.delete(CALLER, each.id)

    assert len(read_pids) == 3  # two sandboxes and their zygote, once
