"""Daemons' names follow from their run folders, stay as they were, and are never shared."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict
from forkd.host import netlink
from forkd.service.names import choose, derive
from forkd.service.settings import HostSettings
from forkd.store.database import Database

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.service.names import Names

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


def test_addresses_that_another_daemon_has_at_the_first_start_are_passed_over(
    tmp_path: Path,
) -> None:
    derived = derive(OTHER)
    named_alike = replace(derived, cgroup_root=tmp_path / "none", network=derived.network)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(Conflict):  # then a daemon of another test has them
            stack.enter_context(named_alike.locked())
        other = chosen(tmp_path / "state", OTHER)
        pool = other.network.pool
        assert not pool.overlaps(derived.network.pool)

    assert chosen(tmp_path / "state", OTHER).network.pool == pool


@pytest.mark.parametrize("shared", ["addresses", "taps", "cgroup"])
def test_names_that_another_daemon_uses_are_refused(tmp_path: Path, shared: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    mine = replace(derive(tmp_path / "mine"), cgroup_root=root)
    theirs = replace(derive(tmp_path / "theirs"), cgroup_root=tmp_path / "none")
    # There are so few: a daemon of another test may have one that we derive.
    mine = replace(mine, network=replace(mine.network, pool=IPv4Network("192.0.2.0/25")))
    theirs = replace(theirs, network=replace(theirs.network, pool=IPv4Network("192.0.2.128/25")))
    if shared == "cgroup":
        theirs = replace(theirs, cgroup_root=root)
    elif shared == "taps":
        network = replace(theirs.network, tap_prefix=mine.network.tap_prefix)
        theirs = replace(theirs, network=network)
    else:
        theirs = replace(theirs, network=replace(theirs.network, pool=mine.network.pool))

    with mine.locked(), pytest.raises(Conflict, match=shared), theirs.locked():
        pass

    with theirs.locked():
        pass


@pytest.mark.parametrize("host_has", [False, True])
def test_sandboxes_have_ipv6_if_the_host_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, host_has: bool
) -> None:
    monkeypatch.setattr(netlink, "has_ipv6", lambda: host_has)

    plan = chosen(tmp_path / "state", OTHER).network

    assert plan.ipv6 is plan.slot(0).ipv6 is host_has
    assert not plan.slot(0).only_v4().ipv6
