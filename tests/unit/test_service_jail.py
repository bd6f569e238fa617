"""Whose users jailed machines are."""

from __future__ import annotations

import os
import pwd
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from forkd.cgroups.tree import CgroupTree
from forkd.engine.configs import ZygoteConfig, members
from forkd.errors import CapacityError, InvalidRequest
from forkd.host import ownership, userns
from forkd.limits import UIDS_DEFAULT, UIDS_MIN
from forkd.model.ids import new_sandbox_id
from forkd.model.network import parse_policy
from forkd.network.plan import Plan
from forkd.service import siblings
from forkd.service.egress import Egress
from forkd.service.jail import BLOCK_USERS_MAX, BLOCK_USERS_MIN, Jail, UidRange
from forkd.service.leases import Leases
from forkd.service.siblings import without
from forkd.service.slots import Slots
from forkd.service.supervision import Supervisor

FIRST = 1_879_048_192


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1879048192",
        "1879048192:",
        "-1:65536",
        "0:65536",
        f"{FIRST}:{UIDS_MIN - 1}",
        f"{(1 << 32) - 1 - UIDS_MIN + 1}:{UIDS_MIN}",
        "1879048192:65536:1",
        "x:y",
    ],
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        UidRange.parse(text)


def test_the_last_users_that_there_are_make_a_range() -> None:
    last = UidRange.parse(f"{(1 << 32) - 1 - UIDS_MIN}:{UIDS_MIN}")

    assert last.first + last.count - 1 == (1 << 32) - 2


def test_the_default_is_nobodys_here() -> None:
    UidRange.parse(UIDS_DEFAULT).check()


def test_a_range_that_overlaps_somebody_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    for uids in (UidRange(nobody, UIDS_MIN), UidRange(nobody - UIDS_MIN + 1, UIDS_MIN)):
        with pytest.raises(InvalidRequest, match=r"overlaps .*(nobody|sync)"):
            uids.check()
    UidRange(nobody + 1, UIDS_MIN).check()
    subuid = tmp_path / "subuid"
    subuid.write_text(f"alice:{FIRST + 10}:1\n")
    monkeypatch.setattr(ownership, "SUBORDINATE", (subuid,))
    with pytest.raises(InvalidRequest, match="range of alice in"):
        UidRange(FIRST, UIDS_MIN).check()


def test_each_has_a_user_of_its_own_until_all_are_somebodys() -> None:
    uids = UidRange(FIRST, UIDS_MIN)
    there = Jail(uids, (), (), Path("/tops"))

    taken = [there.take() for _ in range(UIDS_MIN // 2 - 1)]

    assert len(set(taken)) == UIDS_MIN // 2 - 1
    assert all(uid is not None and FIRST < uid < uids.siblings_first for uid in taken)
    with pytest.raises(CapacityError, match="FORKD_UID_RANGE"):
        there.take()
    there.hold(taken[3])
    there.give_back(taken[3])
    with pytest.raises(CapacityError):
        there.take()
    there.give_back(taken[3])
    assert there.take() == taken[3]


def test_a_user_that_was_given_back_rests() -> None:
    there = Jail(UidRange(FIRST, UIDS_MIN), (), (), Path("/tops"))
    first = there.take()
    there.give_back(first)

    assert there.take() != first


def test_the_least_range_has_blocks_in_its_upper_half() -> None:
    uids = UidRange(FIRST, UIDS_MIN)

    assert (uids.block, uids.blocks) == (BLOCK_USERS_MIN, UIDS_MIN // 2 // BLOCK_USERS_MIN)
    assert uids.siblings_first == FIRST + UIDS_MIN // 2
    assert UidRange(FIRST, UIDS_MIN - 1).blocks == 0
    assert UidRange.parse(UIDS_DEFAULT).block == BLOCK_USERS_MAX


def test_no_two_trees_have_a_block_in_common_until_nobody_is_in_it() -> None:
    uids = UidRange(FIRST, UIDS_MIN)
    there = Jail(uids, (), (), Path("/tops"))
    blocks = [there.take_block(1) for _ in range(uids.blocks)]

    users = [uid for first, count in blocks for uid in range(first, first + count)]
    assert users == sorted(set(users))
    assert users[0] == uids.siblings_first
    assert users[-1] == FIRST + UIDS_MIN - 1
    with pytest.raises(CapacityError, match="blocks of 8 users for siblings of FORKD_UID_RANGE"):
        there.take_block(1)
    uid = there.take_of([blocks[3]])
    there.give_block_back(blocks[3])
    with pytest.raises(CapacityError):
        there.take_block(1)
    there.give_back(uid)
    assert there.take_block(1) == blocks[3]


def test_a_user_of_a_tree_that_an_earlier_daemon_left_keeps_its_block_from_others() -> None:
    uids = UidRange(FIRST, UIDS_MIN)
    there = Jail(uids, (), (), Path("/tops"))
    there.hold(uids.siblings_first + BLOCK_USERS_MIN)

    blocks = [there.take_block(1) for _ in range(uids.blocks - 1)]

    assert (uids.siblings_first + BLOCK_USERS_MIN, BLOCK_USERS_MIN) not in blocks
    with pytest.raises(CapacityError):
        there.take_block(1)


def test_many_siblings_get_blocks_that_follow_on_each_other() -> None:
    uids = UidRange(FIRST, UIDS_MIN)
    there = Jail(uids, (), (), Path("/tops"))
    there.take_block(1)

    assert there.take_block(9) == (uids.siblings_first + 8, 16)
    with pytest.raises(CapacityError):
        there.take_block(UIDS_MIN // 2)
    there.give_block_back((uids.siblings_first, 8))
    there.give_block_back((uids.siblings_first + 8, 16))
    assert there.take_block(UIDS_MIN // 2) == (uids.siblings_first, UIDS_MIN // 2)


def test_siblings_get_users_until_all_of_theirs_are_somebodys() -> None:
    there = Jail(UidRange(FIRST, UIDS_MIN), (), (), Path("/tops"))
    first, count = there.take_block(1)
    extents = ((first, 2), (first + 3, count - 3))

    assert there.free_of(extents) == count - 1
    taken = {there.take_of(extents) for _ in range(count - 1)}

    assert taken == set(range(first, first + count)) - {first + 2}
    assert there.free_of(extents) == 0
    with pytest.raises(CapacityError, match="siblings of this sandbox"):
        there.take_of(extents)


@pytest.mark.parametrize(
    ("uid", "left"),
    [
        (9, ((10, 3), (20, 1))),
        (10, ((11, 2), (20, 1))),
        (11, ((10, 1), (12, 1), (20, 1))),
        (12, ((10, 2), (20, 1))),
        (20, ((10, 3),)),
    ],
)
def test_nobodys_siblings_can_be_its_user(uid: int, left: tuple[tuple[int, int], ...]) -> None:
    assert without(uid, ((10, 3), (20, 1))) == left


@pytest.mark.needs("root")
def test_what_a_machine_has_left_among_tops_goes_with_it_and_nobody_elses(tmp_path: Path) -> None:
    there = Jail(UidRange(FIRST, UIDS_MIN), (tmp_path,), (), tmp_path)
    uid = there.take()
    assert uid is not None
    for name, owner in (("left", uid), ("another", uid + 1), ("operators", 0)):
        (tmp_path / name).write_text("x")
        os.chown(tmp_path / name, owner, owner)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/in it").symlink_to("/etc")
    os.chown(tmp_path / "folder", uid, uid)

    there.sweep(None)
    there.sweep(uid)

    assert {each.name for each in tmp_path.iterdir()} == {"another", "operators"}
    there.prepare()
    assert {each.name for each in tmp_path.iterdir()} == {"operators"}


def test_without_a_range_there_are_no_users() -> None:
    there = Jail(None, (), (), Path("/tops"))

    assert (there.is_on, there.take(), there.config()) == (False, None, None)


def test_an_ordinary_users_jail_has_the_same_folders_and_no_users() -> None:
    there = Jail(None, (Path("/f"),), (Path("/r"),), Path("/f/tops"), rootless=True)

    assert there.is_on
    assert (there.take(), there.hold(None)) == (None, None)
    told = there.config()
    assert told is not None
    assert members(ZygoteConfig(Path("/z"), Path("/s"), (), jail=told))["jail"] == {
        "folders": ["/f"],
        "read_only": ["/r"],
        "rootless": True,
    }
    with there.cell() as cell:
        assert cell == told


async def test_many_siblings_of_one_sandbox_have_users_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uids = UidRange.parse(UIDS_DEFAULT)
    monkeypatch.setattr(userns, "extents", lambda _: None)
    monkeypatch.setattr(userns, "make", lambda *_: os.open("/dev/null", os.O_RDONLY))
    jail = Jail(uids, (), (), Path("/tops"))

    made = await siblings.make(Path("/vmm"), jail, os.getpid(), uids.first + 1, uids.block + 1)
    try:
        assert made.suffices(jail, uids.block + 1)
    finally:
        made.close(jail)


async def test_without_users_for_all_nobody_has_a_network_slot() -> None:
    uids = UidRange(90_000, UIDS_MIN)
    async with Supervisor() as tasks:
        plan = Plan(pool=IPv4Network("10.213.0.0/16"), tap_prefix="fkt")
        egress = Egress(plan, tasks, ())
        slots = Slots(plan, egress, tasks)
        jail = Jail(uids, (), (), Path("/tops"))
        leases = Leases(Path("/s"), CgroupTree(Path("/none")), slots, jail, egress)
        wanted = [new_sandbox_id() for _ in range(uids.count)]

        with pytest.raises(CapacityError, match="FORKD_UID_RANGE"):
            leases.reserve(wanted, parse_policy("internet"))

        assert slots.used == 0
        assert len(leases.reserve(wanted[:100], parse_policy("internet"))) == 100
