"""The doctor fails what keeps sandboxes from running, warns of the rest, and says what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forkd.checks import Check, Status, as_json, as_text, exit_status
from forkd.engine.replies import CpuSeen
from forkd.host.disks import FileSystem
from forkd.host.rlimits import PRLIMIT
from forkd.host.tuning import Seen
from forkd.service.doctor import (
    BUILDERS,
    DISK_LEAST_MIB,
    HELPER_TOOLS,
    MEMORY_GOOD_MIB,
    OCI_TOOLS,
    QEMU,
    X86_64_V3,
    Facts,
    JailTried,
    Probe,
    judge,
)
from forkd.service.setup.plan import Device, Situation

PROCESSOR = CpuSeen(
    model="A CPU",
    features=("sse2", *X86_64_V3),
    portable=True,
    physical_bits=46,
    tsc_khz=2_600_000,
)

GOOD = Facts(
    system="Linux 6.1.0",
    architecture="x86_64",
    is_root=True,
    cpu_model="a CPU",
    kvm_exists=True,
    kvm_opens=True,
    kvm_nests=True,
    is_pvm=False,
    probe=Probe(ok=True, reason=""),
    processor=PROCESSOR,
    jail=JailTried(ok=True, reason=""),
    cell=JailTried(ok=True, reason=""),
    controllers=frozenset({"cpu", "memory", "pids", "io"}),
    has_delegated_cgroup=False,
    makes_cgroups=True,
    makes_taps=True,
    filters_packets=True,
    installed=frozenset({*BUILDERS, *OCI_TOOLS, *HELPER_TOOLS, PRLIMIT}),
    package_manager="apt",
    missing_programs=(),
    cached_kernel="6.1",
    memory_available_mib=MEMORY_GOOD_MIB,
    state_free_mib=1 << 20,
    cache_free_mib=1 << 20,
    seen=Seen(release=(6, 12)),
    situation=Situation(host=Seen()),
    state_disk=FileSystem("ext4", rotates=False),
)


def test_a_host_says_what_guests_are_shown_of_its_processor() -> None:
    name = "processor of guests"
    shown = "A CPU: x86-64-v3, 16 features, 46 address bits, TSC of 2600 MHz"
    less = PROCESSOR.model_copy(update={"features": ("avx512f",)})

    assert check(GOOD, name).found == shown
    assert "less than x86-64-v3 and AVX-512" in check(replace(GOOD, processor=less), name).found
    assert check(replace(GOOD, processor=None), name).status is Status.SKIP


def check(facts: Facts, name: str) -> Check:
    return next(each for each in judge(facts) if each.name == name)


def test_a_host_that_has_everything_passes_everything() -> None:
    assert {each.status for each in judge(GOOD)} == {Status.PASS}
    assert exit_status(judge(GOOD)) == 0


def test_a_kvm_that_opens_and_runs_no_guest_is_no_kvm() -> None:
    facts = replace(GOOD, probe=Probe(ok=False, reason="it interprets"))

    found = check(facts, "KVM")

    assert (found.status, exit_status(judge(facts))) == (Status.WARN, 0)
    assert "it interprets" in found.found
    assert "helper machine" in found.advice


@pytest.mark.parametrize(
    "facts",
    [
        replace(GOOD, kvm_opens=False, probe=None),
        replace(GOOD, is_pvm=True, probe=None),
        replace(GOOD, probe=Probe(ok=False, reason="no")),
        replace(GOOD, is_root=False, jail=JailTried(ok=False, reason="no", rootless=True)),
    ],
)
def test_without_a_native_way_the_helper_machine_is_needed(facts: Facts) -> None:
    without = replace(facts, installed=GOOD.installed - {QEMU})

    assert exit_status(judge(facts)) == 0
    assert check(without, "helper machine").status is Status.FAIL
    assert "apt install" in check(without, "helper machine").advice


@pytest.mark.parametrize(
    "facts", [GOOD, replace(GOOD, is_root=False, jail=JailTried(ok=True, reason="", rootless=True))]
)
def test_with_a_native_way_it_is_not(facts: Facts) -> None:
    without = replace(facts, installed=GOOD.installed - {QEMU})

    assert check(without, "helper machine").status is Status.SKIP


CLOSED = replace(GOOD, is_root=False, kvm_opens=False, probe=None)
"""A user to whom /dev/kvm is closed; as a member of its group it would open."""


def test_set_up_is_advised_unless_kvm_is_pvm() -> None:
    assert "forkd host setup" in check(CLOSED, "KVM").advice
    assert "setup" not in check(replace(CLOSED, is_pvm=True), "KVM").advice


@pytest.mark.parametrize("facts", [replace(CLOSED, kvm_nests=False), replace(CLOSED, is_pvm=True)])
def test_a_helper_machine_without_a_kvm_that_nests_emulates(facts: Facts) -> None:
    assert "emulates" in check(replace(facts, kvm_opens=True), "helper machine").found
    assert "uses KVM" in check(replace(CLOSED, kvm_opens=True), "helper machine").found


def test_a_host_without_a_kvm_is_not_told_of_its_group() -> None:
    found = check(replace(CLOSED, kvm_exists=False, kvm_nests=False), "KVM")

    assert "firmware" in found.advice
    assert "setup" not in found.advice


def test_a_guest_that_could_not_be_tried_is_skipped() -> None:
    assert check(replace(GOOD, probe=None), "KVM").status is Status.SKIP


def test_cgroups_that_a_container_may_only_read_are_none() -> None:
    found = check(replace(GOOD, makes_cgroups=False), "cgroup v2")

    assert (found.status, "read-only" in found.found) == (Status.WARN, True)
    assert "FORKD_CGROUPS=off" in found.advice


def test_root_without_cgroups_needs_neither_controllers_nor_clone3() -> None:
    facts = replace(GOOD, controllers=frozenset(), hides_clone3=True, wants_cgroups=False)

    found = check(facts, "cgroup v2")
    assert (found.status, found.found) == (
        Status.WARN,
        "off (FORKD_CGROUPS): sandboxes have no limits",
    )
    assert check(facts, "clone3").status is Status.WARN
    assert check(replace(facts, wants_cgroups=True), "clone3").status is Status.FAIL


def test_a_cgroup_that_was_delegated_is_as_good_as_roots() -> None:
    facts = replace(GOOD, is_root=False, has_delegated_cgroup=True)

    assert check(facts, "cgroup v2").status is Status.PASS


def test_missing_programs_come_with_a_wheel_or_are_built() -> None:
    found = check(replace(GOOD, missing_programs=("forkd-vmm", "forkd-agent")), "programs")
    assert found.found == "forkd-vmm and forkd-agent not found"
    assert "the wheel for Linux on x86_64" in found.advice
    assert "`make build`" in found.advice


@pytest.mark.parametrize(
    ("facts", "name", "status"),
    [
        (replace(GOOD, architecture="aarch64"), "platform", Status.FAIL),
        (replace(GOOD, missing_programs=("forkd-vmm",)), "programs", Status.FAIL),
        (
            replace(GOOD, installed=GOOD.installed - {PRLIMIT}),
            *("process limits", Status.FAIL),
        ),
        (replace(GOOD, cell=None), "cells of builds and packs", Status.WARN),
        (
            replace(GOOD, cell=JailTried(ok=False, reason="no")),
            *("cells of builds and packs", Status.FAIL),
        ),
        (replace(GOOD, controllers=frozenset()), "cgroup v2", Status.WARN),
        (replace(GOOD, is_root=False), "cgroup v2", Status.WARN),
        (replace(GOOD, makes_taps=False), "network", Status.WARN),
        (replace(GOOD, filters_packets=False), "network", Status.WARN),
        (replace(GOOD, cached_kernel=None), "guest kernel", Status.WARN),
        (replace(GOOD, memory_available_mib=MEMORY_GOOD_MIB - 1), "memory", Status.WARN),
        (replace(GOOD, state_free_mib=DISK_LEAST_MIB), "disk for snapshots", Status.WARN),
        (replace(GOOD, state_free_mib=DISK_LEAST_MIB - 1), "disk for snapshots", Status.FAIL),
        (replace(GOOD, cache_free_mib=0), "disk for images", Status.FAIL),
    ],
)
def test_each_lack_has_its_weight(facts: Facts, name: str, status: Status) -> None:
    found = check(facts, name)

    assert found.status is status
    assert found.advice
    assert exit_status(judge(facts)) == (1 if status is Status.FAIL else 0)


@pytest.mark.parametrize("keeps", [True, False])
def test_an_ordinary_users_jail_is_there_and_what_it_lacks_is_named(*, keeps: bool) -> None:
    tried = JailTried(ok=True, reason="", rootless=True, keeps_signals=keeps)

    found = check(replace(GOOD, is_root=False, jail=tried), "jail")

    assert found.status is Status.WARN
    assert "missing: users of their own, a /proc of their own" in found.found
    assert ("signals" in found.found) is not keeps


def test_an_ordinary_user_whose_kernel_refuses_a_jail_can_use_the_helper_machine() -> None:
    tried = JailTried(ok=False, reason="no user namespace", rootless=True)
    facts = replace(GOOD, is_root=False, jail=tried)

    found = check(facts, "jail")

    assert (found.status, found.found) == (Status.WARN, "no user namespace")
    assert "FORKD_JAIL=off" in found.advice
    assert exit_status(judge(facts)) == 0


def test_a_missing_tool_names_its_package() -> None:
    facts = replace(GOOD, installed=GOOD.installed - {"mke2fs"})

    assert check(facts, "images of Debian packages").advice == "apt install e2fsprogs"


def test_the_report_has_a_line_and_an_advice_for_each() -> None:
    found = [Check("a", Status.PASS, "fine", "never shown"), Check("b", Status.WARN, "hm", "do it")]

    assert as_text(found) == "PASS  a: fine\nWARN  b: hm\n      -> do it"
    assert '"status": "WARN"' in as_json(found)


@pytest.mark.parametrize(
    ("disk", "says"),
    [
        (FileSystem("tmpfs", rotates=False), "takes memory"),
        (FileSystem("overlay", rotates=False), "goes with its container"),
        (FileSystem("fuse.sshfs", rotates=False), "over a network"),
        (FileSystem("xfs", rotates=True), "rotates"),
    ],
)
def test_a_disk_that_is_bad_for_snapshots_is_named(disk: FileSystem, says: str) -> None:
    found = check(replace(GOOD, state_disk=disk), "disk of the state folder")

    assert found.status is Status.WARN
    assert says in found.found
    assert "FORKD_STATE_DIR" in found.advice


def test_a_disk_that_shares_blocks_is_said_so() -> None:
    name = "disk of the state folder"
    shares = check(replace(GOOD, state_disk=FileSystem("btrfs", rotates=False)), name)

    assert shares.found == "btrfs; shares blocks of copies"
    assert check(GOOD, name).found == "ext4; copies disks as a whole"


def test_the_doctor_says_who_may_use_forkd() -> None:
    closed = Situation(host=Seen(), group=False, device=Device(0, "root", 0o600))

    found = replace(GOOD, situation=closed)

    assert check(found, "group forkd").status is Status.WARN
    assert check(found, "/dev/kvm").found == "open to root alone (rw-------)"


def test_tools_are_named_as_the_distribution_calls_them() -> None:
    without = replace(GOOD, installed=frozenset(), package_manager="zypper")

    assert check(without, "images from OCI").advice == "zypper install e2fsprogs kmod"
    assert check(without, "process limits").advice == "zypper install util-linux"
