"""Whose users jailed machines are."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from forkd.engine.configs import ZygoteConfig, members
from forkd.errors import CapacityError, InvalidRequest
from forkd.host import ownership
from forkd.limits import UIDS_DEFAULT, UIDS_MIN
from forkd.service.jail import Jail, UidRange

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
    there = Jail(uids, (), Path("/tops"))

    taken = [there.take() for _ in range(UIDS_MIN - 1)]

    assert len(set(taken)) == UIDS_MIN - 1
    assert all(uid is not None and uid in uids and uid != FIRST for uid in taken)
    with pytest.raises(CapacityError, match="FORKD_UID_RANGE"):
        there.take()
    there.hold(taken[3])
    there.give_back(taken[3])
    with pytest.raises(CapacityError):
        there.take()
    there.give_back(taken[3])
    assert there.take() == taken[3]


def test_a_user_that_was_given_back_rests() -> None:
    there = Jail(UidRange(FIRST, UIDS_MIN), (), Path("/tops"))
    first = there.take()
    there.give_back(first)

    assert there.take() != first


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
