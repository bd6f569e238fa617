"""Whose users jailed machines are."""

from __future__ import annotations

import contextlib
import os
import pwd
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from forkd.cgroups.tree import CgroupTree
from forkd.engine.configs import ZygoteConfig, members
from forkd.errors import CapacityError, InvalidRequest
from forkd.host import ownership, userns
from forkd.limits import SANDBOXES_MAX, UIDS_DEFAULT, UIDS_MIN, ZYGOTES_DEFAULT
from forkd.model.ids import new_sandbox_id
from forkd.model.network import parse_policy
from forkd.network.plan import Plan
from forkd.service import siblings
from forkd.service.egress import Egress
from forkd.service.jail import (
    SLOT_BLOCKS,
    SLOT_USERS_MAX,
    SLOT_USERS_MIN,
    TREE_BLOCKS,
    Jail,
    Part,
    UidRange,
)
from forkd.service.leases import Leases
from forkd.service.siblings import without
from forkd.service.slots import Slots
from forkd.service.supervision import Supervisor

FIRST = 1_879_048_192
UIDS = UidRange(FIRST, UIDS_MIN)


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
    there = Jail(UIDS, (), Path("/tops"))

    taken = [there.take() for _ in range(UIDS.slot - 2)]

    assert sorted(map(str, taken)) == list(map(str, range(FIRST + 2, FIRST + UIDS.slot)))
    with pytest.raises(CapacityError, match="FORKD_UID_RANGE"):
        there.take()
    there.hold(taken[3])
    there.give_back(taken[3])
    with pytest.raises(CapacityError):
        there.take()
    there.give_back(taken[3])
    assert there.take() == taken[3]


def test_a_user_that_was_given_back_rests() -> None:
    there = Jail(UIDS, (), Path("/tops"))
    first = there.take()
    there.give_back(first)

    assert there.take() != first


@pytest.mark.parametrize(
    ("count", "slot", "slots", "block"),
    [
        (UIDS_MIN, SLOT_USERS_MIN, UIDS_MIN // 2 // SLOT_USERS_MIN, 2),
        (UIDS_MIN + 1, SLOT_USERS_MIN, UIDS_MIN // 2 // SLOT_USERS_MIN, 2),
        (4_194_304, 4_096, 512, 32),
        (UidRange.parse(UIDS_DEFAULT).count, SLOT_USERS_MAX, 4_000, 256),
    ],
)
def test_a_range_has_as_many_slots_for_siblings_as_for_forks(
    count: int, slot: int, slots: int, block: int
) -> None:
    uids = UidRange(FIRST, count)

    assert (uids.slot, uids.slots, uids.block) == (slot, slots, block)
    assert uids.siblings_first == FIRST + count - slot * slots
    assert uids.in_slots(slots - 1, 1)[1] == (FIRST + count - slot, slot)


def a_part(there: Jail) -> Part:
    part = there.take_part()
    assert part is not None
    return part


def users(there: Jail, part: Part) -> set[int]:
    return {uid for first, count in there.users_of(part) for uid in range(first, first + count)}


def test_no_two_zygotes_have_a_user_in_common_until_nobody_is_in_their_parts() -> None:
    there = Jail(UIDS, (), Path("/tops"))
    parts = [a_part(there)]
    with contextlib.suppress(CapacityError):
        while True:
            parts.append(a_part(there))

    found = [users(there, part) for part in parts]
    assert sum(map(len, found)) == len(set().union(*found)) == 2 * UIDS.slot * (UIDS.slots - 1)
    assert all(part.uid in each for part, each in zip(parts, found, strict=True))
    assert there.take() not in set().union(*found)
    child = there.take(parts[4])
    assert child in found[4]
    there.give_part_back(parts[4])
    with contextlib.suppress(CapacityError):
        while True:
            assert child not in users(there, a_part(there))


def test_a_zygote_for_which_many_come_leaves_slots_for_the_next() -> None:
    there = Jail(UidRange.parse(UIDS_DEFAULT), (), Path("/tops"))

    parts = [a_part(there) for _ in range(ZYGOTES_DEFAULT)]

    assert (parts[0].count, parts[0].own) == (124, 31)
    assert parts[0].own * UidRange.parse(UIDS_DEFAULT).slot > SANDBOXES_MAX


def test_a_zygotes_children_are_others_than_those_of_zygotes_derived_from_it() -> None:
    there = Jail(UIDS, (), Path("/tops"))
    base = a_part(there)
    derived = [there.derive_part(base) for _ in range(base.count - base.own)]

    below = [users(there, part) for part in derived]
    assert sum(map(len, below)) == len(set().union(*below))
    assert set().union(*below) < users(there, base)
    assert base.uid not in set().union(*below)
    own = [there.take(base) for _ in range(base.own * UIDS.slot - 1)]
    assert not {*own, *range(*_block(there, base))} & set().union(*below)
    with pytest.raises(CapacityError, match=r"all \d+ users"):
        there.take(base)
    with pytest.raises(CapacityError, match="zygotes derived from this one"):
        there.derive_part(base)

    child = there.take(derived[0])
    assert child in below[0]
    assert set(range(*_block(there, derived[0]))) < below[0]
    there.give_part_back(derived[0])
    with pytest.raises(CapacityError):
        there.derive_part(base)
    there.give_part_back(derived[1])
    assert users(there, there.derive_part(base)) == below[1]


def _block(there: Jail, part: Part) -> tuple[int, int]:
    block = there.take_block(1, part)
    there.give_block_back(block)
    return _run_of(block)


def _run_of(extent: tuple[int, int]) -> tuple[int, int]:
    first, count = extent
    return first, first + count


def test_a_zygote_derived_from_a_derived_one_shares_its_users() -> None:
    there = Jail(UIDS, (), Path("/tops"))
    derived = there.derive_part(a_part(there))

    assert there.derive_part(derived) == derived
    there.give_part_back(derived)
    with pytest.raises(CapacityError):
        [there.take(derived) for _ in range(UIDS.slot)]


def test_a_part_is_known_by_the_users_that_there_are_in_a_namespace() -> None:
    there = Jail(UIDS, (), Path("/tops"))
    base = a_part(there)
    derived = there.derive_part(base)

    for part in (base, derived):
        found = there.part_of(there.users_of(part))
        assert found is not None
        assert (found.first, found.count, found.own) == (part.first, part.count, part.own)
    block = there.take_block(1, base)
    assert there.part_of([block]) is None
    assert there.part_of(without(block[0], (block,))) is None
    assert there.part_of([(90_000, UIDS.slot), (190_000, UIDS.slot)]) is None
    assert there.part_of([(FIRST, UIDS_MIN)]) is None
    common = there.part_of(None)
    assert common is not None
    assert there.take_block(1, common)[0] in range(*_run_of(UIDS.in_slots(0, 1)[1]))


def test_no_two_trees_have_a_block_in_common_until_nobody_is_in_it() -> None:
    there = Jail(UIDS, (), Path("/tops"))
    part = a_part(there)
    blocks = []
    with contextlib.suppress(CapacityError):
        while True:
            blocks.append(there.take_block(1, part))

    assert blocks[0][1] == TREE_BLOCKS * UIDS.block
    assert blocks[-1][1] == UIDS.block
    assert len(blocks) > 2 * SLOT_BLOCKS // TREE_BLOCKS
    found = [uid for first, count in blocks for uid in range(first, first + count)]
    assert len(found) == len(set(found)) == part.own * UIDS.slot
    with pytest.raises(CapacityError, match="blocks of 2 users for siblings of FORKD_UID_RANGE"):
        there.take_block(1, part)
    uid = there.take_of([blocks[-3]])
    there.give_block_back(blocks[-3])
    with pytest.raises(CapacityError):
        there.take_block(1, part)
    there.give_back(uid)
    assert there.take_block(1, part) == blocks[-3]


def test_who_an_earlier_daemon_left_keeps_its_block_and_its_part_from_others() -> None:
    there = Jail(UIDS, (), Path("/tops"))
    first, last = UIDS.in_slots(1, 1)[1][0], UIDS.in_slots(UIDS.slots - 1, 1)[0][0]
    there.hold(first)
    there.hold(last)

    found: set[int] = set()
    with contextlib.suppress(CapacityError):
        while True:
            found |= users(there, a_part(there))

    assert not {first, last} & found
    left = there.part_of(UIDS.in_slots(1, 1))
    assert left is not None
    assert there.take_block(1, left) != (first, UIDS.block)


def test_many_siblings_get_blocks_that_follow_on_each_other() -> None:
    there = Jail(UIDS, (), Path("/tops"))
    part = a_part(there)
    first, count = there.take_block(1, part)
    many = TREE_BLOCKS * UIDS.block + 1

    assert there.take_block(many, part) == (first + count, many + UIDS.block - 1)
    with pytest.raises(CapacityError):
        there.take_block(UIDS.slot, part)
    there.give_block_back((first, count))
    there.give_block_back((first + count, many + UIDS.block - 1))
    assert there.take_block(UIDS.slot, part) == (first, UIDS.slot)


def test_siblings_get_users_until_all_of_theirs_are_somebodys() -> None:
    there = Jail(UIDS, (), Path("/tops"))
    first, count = there.take_block(1, a_part(there))
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
    there = Jail(UidRange(FIRST, UIDS_MIN), (tmp_path,), tmp_path)
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


def test_a_zygote_is_told_the_users_of_its_part_and_is_one_of_them() -> None:
    there = Jail(UIDS, (Path("/f"),), Path("/f/tops"), cgroups=Path("/c"))
    part = a_part(there)

    told = there.zygote_config(part)
    assert told is not None
    assert members(ZygoteConfig(Path("/z"), Path("/s"), (), jail=told))["jail"] == {
        "group": FIRST,
        "folders": ["/f"],
        "uid": part.uid,
        "users": [list(each) for each in UIDS.in_slots(part.first, part.count)],
        "cgroups": {"path": "/c", "group": FIRST + 1, "own": "/c/zygotes"},
    }
    none = Jail(None, (), Path("/tops"))
    assert (none.take_part(), none.zygote_config(None)) == (None, None)


def test_without_a_range_there_are_no_users() -> None:
    there = Jail(None, (), Path("/tops"))

    assert (there.is_on, there.take(), there.config()) == (False, None, None)


def test_an_ordinary_users_jail_has_the_same_folders_and_no_users() -> None:
    there = Jail(None, (Path("/f"),), Path("/f/tops"), rootless=True)

    assert there.is_on
    assert (there.take(), there.hold(None)) == (None, None)
    told = there.config()
    assert told is not None
    assert members(ZygoteConfig(Path("/z"), Path("/s"), (), jail=told))["jail"] == {
        "folders": ["/f"],
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
    jail = Jail(uids, (), Path("/tops"))

    made = await siblings.make(Path("/vmm"), jail, os.getpid(), uids.first + 2, uids.block + 1)
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
        jail = Jail(uids, (), Path("/tops"))
        leases = Leases(Path("/s"), CgroupTree(Path("/none")), slots, jail, egress)
        wanted = [new_sandbox_id() for _ in range(uids.slot)]

        with pytest.raises(CapacityError, match="FORKD_UID_RANGE"):
            leases.reserve(wanted, parse_policy("internet"))

        assert slots.used == 0
        assert len(leases.reserve(wanted[:100], parse_policy("internet"))) == 100
