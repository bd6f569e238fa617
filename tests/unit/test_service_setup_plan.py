"""Only what is wrong on a host has a step, and what needs something comes behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forkd.host.parts import Kind
from forkd.host.tuning import Seen
from forkd.service.setup import texts
from forkd.service.setup.access import judge
from forkd.service.setup.plan import DELEGATED, Device, Situation, Step, steps

ALL = frozenset({"cpu", "io", "memory", "pids"})

GOOD = Situation(
    host=Seen(release=(6, 14)),
    user="ada",
    user_groups=frozenset({"ada", "forkd", "kvm"}),
    kvm_gid=104,
    device=Device(104, "kvm", 0o660),
    has_udev=True,
    delegated=ALL,
    vmm=Path("/opt/x/forkd-vmm"),
    profile="profile /opt/forkd/bin/forkd-vmm",
)
CLOSED = replace(GOOD, device=Device(0, "root", 0o600))
RESTRICTED = replace(GOOD, host=Seen(userns_restricted=True))
AFFECTED = Seen(
    release=(6, 1),
    values={"/sys/module/kvm/parameters/nx_huge_pages": "Y"},
    cgroup_options=frozenset({"rw", "nsdelegate"}),
)


def named(found: tuple[Step, ...]) -> list[tuple[Kind, str]]:
    return [(each.part.kind, each.part.name) for each in found]


def test_a_host_that_is_set_up_has_no_step_and_no_warning() -> None:
    assert steps(GOOD) == ()
    assert {str(each.status) for each in judge(GOOD)} == {"PASS"}


def test_a_user_joins_the_groups_once_they_are_there() -> None:
    seen = replace(GOOD, group=False, user_groups=frozenset({"ada"}))

    assert named(steps(seen)) == [
        (Kind.GROUP, "forkd"),
        (Kind.MEMBER, "ada:forkd"),
        (Kind.MEMBER, "ada:kvm"),
    ]


@pytest.mark.parametrize("mode", [0o666, 0o660])
def test_a_user_joins_the_group_of_the_device_only_if_that_is_needed(mode: int) -> None:
    seen = replace(GOOD, device=Device(7, "virt", mode), user_groups=frozenset({"forkd"}))

    expected = [] if mode == 0o666 else [(Kind.MEMBER, "ada:virt")]
    assert named(steps(seen)) == expected


def test_a_device_of_roots_alone_is_opened_to_a_group_now_and_at_each_start() -> None:
    assert named(steps(CLOSED)) == [
        (Kind.FILE, str(texts.UDEV_FILE)),
        (Kind.DEVICE_GROUP, "dev/kvm"),
        (Kind.DEVICE_MODE, "dev/kvm"),
    ]
    without = named(steps(replace(CLOSED, has_udev=False, kvm_gid=None)))
    assert without[0] == (Kind.GROUP, "kvm")
    assert (Kind.FILE, str(texts.UDEV_FILE)) not in without


def test_nobody_is_added_where_nobody_is_named() -> None:
    seen = replace(GOOD, user=None, user_groups=frozenset(), delegated=frozenset())

    assert steps(seen) == ()


def test_what_systemd_does_not_delegate_is_added_to_what_it_does() -> None:
    seen = replace(GOOD, delegated=frozenset({"cpuset", "memory"}))

    (step,) = steps(seen)

    assert step.part.name == str(texts.DELEGATE_FILE)
    assert step.text == texts.delegation({*DELEGATED, "cpuset"})


def test_cgroups_are_mounted_again_where_kvm_makes_forks_wait() -> None:
    seen = replace(GOOD, host=AFFECTED, cgroup_options=frozenset({"rw", "nsdelegate"}))

    assert named(steps(seen)) == [
        (Kind.FILE, str(texts.CGROUPS_UNIT)),
        (Kind.LINK, str(texts.CGROUPS_WANTED)),
        (Kind.MOUNT_OPTION, "favordynmods:/sys/fs/cgroup"),
    ]
    without_systemd = steps(replace(seen, delegated=None))
    assert named(without_systemd) == [(Kind.MOUNT_OPTION, "favordynmods:/sys/fs/cgroup")]
    assert steps(replace(seen, cgroup_options=None)) == ()


def test_the_profile_is_loaded_only_where_apparmor_takes_rights() -> None:
    written = named(steps(RESTRICTED))
    text = texts.profile(str(GOOD.profile), Path("/opt/x/forkd-vmm"))
    state: dict[str, str | int] = {"text": text, "mode": 0o644, "uid": 0, "gid": 0}
    there = replace(RESTRICTED, files={texts.PROFILE_FILE: state})

    assert written == [(Kind.FILE, str(texts.PROFILE_FILE)), (Kind.PROFILE, "forkd-vmm")]
    assert named(steps(there)) == [(Kind.PROFILE, "forkd-vmm")]
    assert steps(replace(there, profile_loaded=True)) == ()
    assert steps(replace(RESTRICTED, vmm=None)) == ()


def test_another_root_gets_files_alone() -> None:
    host = Seen(values={"vm.overcommit_memory": "2"})
    seen = replace(CLOSED, host=host, live=False, group=False, owner=(7, 8))

    (step,) = steps(seen)

    assert step.wanted == {"text": step.text, "mode": 0o644, "uid": 7, "gid": 8}


def test_a_file_that_is_there_keeps_its_mode_and_its_owner() -> None:
    host = Seen(values={"vm.overcommit_memory": "2"})
    before: dict[str, str | int] = {"text": "# mine\n", "mode": 0o600, "uid": 1, "gid": 2}

    step = steps(replace(GOOD, host=host, files={texts.SYSCTL_FILE: before}))[0]

    assert step.wanted == {**before, "text": step.text}
    assert "# mine" in str(step.text)
    assert step.title == f"change /{texts.SYSCTL_FILE}"
