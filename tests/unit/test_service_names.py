"""Daemons' names follow from their run folders, stay as they were, and are never shared."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict
from forkd.host import netlink, sockets
from forkd.network.plan import Plan
from forkd.service.names import Names, choose, derive, reserved, reserved_for_removal
from forkd.service.settings import HostSettings
from forkd.store.database import Database

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAIN, OTHER = Path("/run/forkd"), Path("/root/.forkd/run")


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Database]:
    folder.mkdir(exist_ok=True)
    with contextlib.closing(Database(folder / "forkd.db")) as database:
        yield database


def chosen(folder: Path, run_dir: Path) -> Names:
    settings = HostSettings(Path("/v"), Path("/a"), Path("/c"), folder, run_dir)
    with opened(folder) as database:
        return choose(settings, database)


@contextlib.contextmanager
def reserving(
    folder: Path, run_dir: Path, network: Plan | None = None, cgroup: Path | None = None
) -> Iterator[Names]:
    """Reserve the names of a daemon; without a cgroup unless there is one at `cgroup`."""
    cgroup = cgroup or folder / "none"
    settings = HostSettings(
        Path("/v"), Path("/a"), Path("/c"), folder, run_dir, network=network, cgroup_root=cgroup
    )
    with (
        opened(folder) as database,
        reserved(choose(settings, database), settings, database) as found,
    ):
        yield found


def occupied(pool: IPv4Network, stack: contextlib.ExitStack) -> None:
    """Have another daemon use these addresses."""
    taken = sockets.take_name(f"forkd/addresses/{pool}")
    if taken is not None:  # else a daemon of another test has them
        stack.enter_context(taken)


def test_the_systems_daemon_has_plain_names_and_others_have_names_of_their_own() -> None:
    plain, other = derive(PLAIN), derive(OTHER)

    assert (plain.cgroup_root.name, plain.network.tap_prefix) == ("forkd", "fk")
    assert str(plain.network.pool) == "10.200.0.0/16"
    assert other == derive(OTHER)
    assert other.cgroup_root.name.startswith("forkd-")
    assert not plain.network.is_ours(f"{other.network.tap_prefix}0000")
    assert not other.network.is_ours(f"{plain.network.tap_prefix}0000")


def test_names_stay_when_the_run_folder_is_moved(tmp_path: Path) -> None:
    first = chosen(tmp_path, OTHER)

    assert chosen(tmp_path, Path("/run/elsewhere")) == first


def test_a_group_that_was_delegated_is_used_and_written_down_for_who_removes_it(
    tmp_path: Path,
) -> None:
    settings = HostSettings(Path("/v"), Path("/a"), Path("/c"), tmp_path / "state", OTHER)
    name = derive(OTHER).cgroup_root.name
    for unit in (tmp_path / "first", tmp_path / "second"):
        unit.mkdir()
        with opened(settings.state_dir) as database:
            assert choose(settings, database, unit).cgroup_root == unit / name
        with opened(settings.state_dir) as database:
            assert choose(settings, database).cgroup_root == unit / name


def test_a_group_that_is_gone_is_not_used_again(tmp_path: Path) -> None:
    settings = HostSettings(Path("/v"), Path("/a"), Path("/c"), tmp_path / "state", OTHER)
    with opened(settings.state_dir) as database:
        choose(settings, database, tmp_path / "container")
    for _ in range(2):
        with opened(settings.state_dir) as database:
            assert choose(settings, database).cgroup_root == derive(OTHER).cgroup_root


def test_addresses_that_another_daemon_has_are_replaced_at_every_start(tmp_path: Path) -> None:
    derived = derive(OTHER).network.pool
    with contextlib.ExitStack() as stack:
        occupied(derived, stack)
        with reserving(tmp_path, OTHER) as first:
            assert not first.network.pool.overlaps(derived)
    assert chosen(tmp_path, OTHER).network == first.network

    with contextlib.ExitStack() as stack:
        occupied(first.network.pool, stack)
        with reserving(tmp_path, OTHER) as second:
            assert second.network.pool not in {first.network.pool, derived}
            assert second.network.tap_prefix == first.network.tap_prefix


def test_addresses_that_this_host_has_routes_to_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reserving(tmp_path, OTHER) as first:
        pass
    for private in ("10.0.0.0/8", str(next(first.network.pool.subnets(new_prefix=24)))):
        routes = (IPv4Network("192.168.0.0/16"), IPv4Network(private))
        monkeypatch.setattr(netlink, "routes", lambda routes=routes: routes)
        with reserving(tmp_path, OTHER) as found:
            overlaps = found.network.pool.overlaps(routes[1])
        assert overlaps is (private == "10.0.0.0/8")  # then there is no other


@pytest.mark.parametrize("why", ["set", "in use"])
def test_addresses_that_were_set_or_that_sandboxes_have_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    network = Plan(IPv4Network("192.0.2.0/25"), tap_prefix="fk99999")
    if why == "in use":
        network = replace(derive(OTHER).network)
        monkeypatch.setattr(netlink, "names", lambda: ("lo", network.slot(0).tap))
    with contextlib.ExitStack() as stack:
        occupied(network.pool, stack)
        with pytest.raises(Conflict, match=f"the addresses {network.pool}"):
            stack.enter_context(reserving(tmp_path, OTHER, network if why == "set" else None))
    assert chosen(tmp_path, OTHER).network.pool == derive(OTHER).network.pool


@pytest.mark.parametrize("shared", ["addresses", "taps", "cgroup"])
def test_names_that_another_daemon_uses_are_refused(tmp_path: Path, shared: str) -> None:
    mine = Plan(IPv4Network("192.0.2.0/25"), tap_prefix="fk99998")
    theirs = Plan(IPv4Network("192.0.2.128/25"), tap_prefix="fk99999")
    root, other_root = tmp_path / "root", tmp_path / "none"
    root.mkdir()
    if shared == "cgroup":
        other_root = root
    elif shared == "taps":
        theirs = replace(theirs, tap_prefix=mine.tap_prefix)
    else:
        theirs = replace(theirs, pool=mine.pool)
    for_removal = Names(other_root, theirs)

    with reserving(tmp_path / "mine", OTHER, mine, root):
        with (
            pytest.raises(Conflict, match=shared),
            reserving(tmp_path / "theirs", OTHER, theirs, other_root),
        ):
            pass
        with contextlib.ExitStack() as stack:
            if shared != "addresses":  # nothing that is removed bears their name
                stack.enter_context(pytest.raises(Conflict, match=shared))
            stack.enter_context(reserved_for_removal(for_removal))

    with reserving(tmp_path / "theirs", OTHER, theirs, other_root):
        pass


@pytest.mark.parametrize("host_has", [False, True])
def test_sandboxes_have_ipv6_if_the_host_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, host_has: bool
) -> None:
    monkeypatch.setattr(netlink, "has_ipv6", lambda: host_has)

    plan = chosen(tmp_path / "state", OTHER).network

    assert plan.ipv6 is plan.slot(0).ipv6 is host_has
    assert not plan.slot(0).only_v4().ipv6
