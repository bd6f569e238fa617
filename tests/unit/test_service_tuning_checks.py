"""How a host is set up is judged in few words: what is wrong, and the line that mends it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forkd.checks import Check, Status, as_text, exit_status
from forkd.host.tuning import SETTINGS, Seen, Setting
from forkd.service.tuning_checks import judge

COLUMNS = 80

NX = "/sys/module/kvm/parameters/nx_huge_pages"

GOOD = Seen(
    release=(6, 12),
    memory_mib=64 << 10,
    values={each.name: each.wanted for each in SETTINGS},
    cpu_flags=frozenset({"split_lock_detect"}),
    vulnerabilities={"itlb_multihit": "Not affected"},
    smt=False,
    ksm=False,
    clocksource="tsc",
    lsms=frozenset({"capability", "landlock"}),
    cgroup_options=frozenset({"rw"}),
)

OLD = replace(
    GOOD, release=(6, 1), values={name: GOOD.values[name] for name in GOOD.values if name != NX}
)
"""A kernel whose `nx_huge_pages` cannot be `never`."""

WRONG = {
    "vm.overcommit_memory": "2",
    "vm.max_map_count": "1",
    "kernel.threads-max": "1",
    "kernel.pid_max": "32768",
    "fs.nr_open": "1024",
    "user.max_user_namespaces": "0",
    "kernel.unprivileged_userns_clone": "0",
    "/sys/kernel/mm/transparent_hugepage/shmem_enabled": "never",
    NX: "Y",
    "/sys/module/kvm/parameters/halt_poll_ns": "4000000",
}


def found(
    host: Seen, *, root: bool = True, hides: bool = False, jailed: bool = True, cores: bool = False
) -> list[Check]:
    return judge(host, needs_clone3=root, hides_clone3=hides, is_jailed=jailed, own_cores=cores)


def check(host: Seen, name: str) -> Check | None:
    return next((each for each in found(host) if each.name == name), None)


def unfit(checks: list[Check]) -> list[str]:
    return [line for line in as_text(checks).splitlines() if len(line) > COLUMNS]


def test_a_host_that_is_set_up_passes_everything_in_few_words() -> None:
    checks = found(GOOD)

    assert {each.status for each in checks} == {Status.PASS}
    assert not unfit(checks)


def test_a_host_that_says_nothing_has_few_checks() -> None:
    names = {each.name for each in found(Seen(release=(6, 12)))}

    assert names == {"clone3", "host kernel", "swap", "huge pages"}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each.short_name)
def test_a_setting_that_is_wrong_is_named_with_the_line_that_mends_it(setting: Setting) -> None:
    host = replace(GOOD, values={**GOOD.values, setting.name: WRONG[setting.name]})

    lacking = [each for each in found(host) if each.status is not Status.PASS]

    assert [(each.name, each.status) for each in lacking] == [(setting.short_name, Status.WARN)]
    assert lacking[0].found.startswith(f"{WRONG[setting.name]}; ")
    assert lacking[0].advice == setting.command
    assert not unfit(lacking)


@pytest.mark.parametrize(
    ("host", "name", "says", "advice"),
    [
        (replace(OLD, release=(5, 13)), "host kernel", "5.14", "6.12"),
        (replace(OLD, release=(5, 15)), "host kernel", "5.16", "6.12"),
        (OLD, "favordynmods", "off", "forkd host setup"),
        (
            replace(GOOD, swaps=("/dev/sda2", "/dev/sdb2", "/a/long/swapfile", "/s")),
            *("swap", "/dev/sda2, /dev/sdb2, /a/long/swapfile and 1 more", "swapoff"),
        ),
        (replace(GOOD, smt=True), "SMT", "share a core", "smt/control"),
        (
            replace(GOOD, vulnerabilities={"mds": "Vulnerable: no microcode"}),
            *("processor's flaws", "mds", "microcode"),
        ),
        (
            replace(GOOD, vulnerabilities={"itlb_multihit": "KVM: Vulnerable"}),
            *("processor's flaws", "itlb_multihit", "microcode"),
        ),
        (
            replace(GOOD, vulnerabilities={"l1tf": "Mitigation: PTE Inversion; VMX: vulnerable"}),
            *("processor's flaws", "l1tf", "microcode"),
        ),
        (
            replace(GOOD, command_line=("split_lock_detect=fatal",)),
            *("split locks", "ends", "split_lock_detect=warn"),
        ),
        (replace(GOOD, reserved_mib=1024), "huge pages", "1024 MiB reserved", "vm.nr_hugepages=0"),
        (replace(GOOD, appraises=True), "IMA", "without a signature", "evmctl"),
        (replace(GOOD, clocksource="hpet"), "clocksource", "hpet", "clocksource=tsc"),
        (
            replace(GOOD, lsms=frozenset({"capability", "yama", "apparmor"})),
            *("Landlock", "off", "boot with lsm=landlock,apparmor,yama"),
        ),
    ],
)
def test_each_lack_has_its_words(host: Seen, name: str, says: str, advice: str) -> None:
    lacking = check(host, name)

    assert lacking is not None
    assert lacking.status is Status.WARN
    assert says in lacking.found
    assert advice in lacking.advice
    assert exit_status(found(host)) == 0


def test_a_mitigation_with_a_remainder_of_smt_is_the_check_of_smt() -> None:
    host = replace(GOOD, vulnerabilities={"mds": "Mitigation: Clear CPU buffers; SMT vulnerable"})

    assert check(host, "processor's flaws") == Check(
        "processor's flaws", Status.PASS, "mitigated, or not there"
    )


@pytest.mark.parametrize(
    "host",
    [
        GOOD,  # nx_huge_pages is the way there
        replace(OLD, release=(5, 19)),
        replace(OLD, release=(6, 14)),
        replace(OLD, cgroup_options=None),
    ],
)
def test_favordynmods_is_advised_only_where_it_helps(host: Seen) -> None:
    assert check(host, "favordynmods") is None


def test_cgroups_that_are_mounted_with_favordynmods_are_good() -> None:
    mounted = check(replace(OLD, cgroup_options=frozenset({"favordynmods"})), "favordynmods")

    assert mounted is not None
    assert mounted.status is Status.PASS


def test_a_kernel_before_6_12_says_what_it_lacks_and_is_good_enough() -> None:
    debian = check(OLD, "host kernel")

    assert debian is not None
    assert (debian.status, debian.found) == (
        Status.PASS,
        "6.1; jails without root keep no signals in (6.12)",
    )


def test_pages_that_are_merged_are_none_of_machines() -> None:
    merging = check(replace(GOOD, ksm=True), "merging of pages (KSM)")

    assert merging is not None
    assert (merging.status, merging.found) == (Status.PASS, "on, and machines take no part")


@pytest.mark.parametrize(("root", "status"), [(True, Status.FAIL), (False, Status.WARN)])
def test_a_profile_that_hides_clone3_is_named(*, root: bool, status: Status) -> None:
    checks = found(GOOD, root=root, hides=True)

    (hidden,) = [each for each in checks if each.name == "clone3"]
    assert hidden.status is status
    assert "Docker's default profile" in hidden.found
    assert "docs/howto/run-in-a-container.md" in hidden.advice
    assert not unfit([hidden])


@pytest.mark.parametrize(("jailed", "status"), [(True, Status.PASS), (False, Status.WARN)])
def test_apparmor_matters_where_a_jail_does_not_work(*, jailed: bool, status: Status) -> None:
    checks = found(replace(GOOD, userns_restricted=True), root=False, jailed=jailed)

    assert [each.status for each in checks if each.name == "AppArmor"] == [status]
    assert not unfit(checks)


def test_smt_is_good_where_no_two_sandboxes_share_a_core() -> None:
    checks = found(replace(GOOD, smt=True), cores=True)

    assert [each.status for each in checks if each.name == "SMT"] == [Status.PASS]
    assert not unfit(checks)


def test_selinux_is_said() -> None:
    assert check(replace(GOOD, selinux_enforces=True), "SELinux") is not None
    assert check(GOOD, "SELinux") is None


def test_every_line_fits_a_terminal() -> None:
    worst = Seen(
        release=(6, 1),
        memory_mib=1 << 20,
        values=WRONG,
        cpu_flags=frozenset({"split_lock_detect"}),
        command_line=("split_lock_detect=fatal",),
        vulnerabilities=dict.fromkeys(("gather_data_sampling", "l1tf", "mds", "x"), "Vulnerable"),
        smt=True,
        ksm=True,
        swaps=("/dev/nvme0n1p3",),
        clocksource="acpi_pm",
        lsms=frozenset({"capability", "yama", "apparmor", "tomoyo", "bpf"}),
        selinux_enforces=True,
        userns_restricted=True,
        cgroup_options=frozenset(),
    )

    assert not unfit(found(worst, hides=True, jailed=False))
    assert not unfit(found(replace(worst, release=(5, 10)), jailed=False))


def test_lockdown_and_windows_are_named() -> None:
    assert check(replace(GOOD, lockdown="none"), "kernel lockdown") is None
    locked = check(replace(GOOD, lockdown="integrity"), "kernel lockdown")
    assert locked is not None
    assert locked.found == "integrity; forkd needs nothing of it"
    windows = check(replace(GOOD, is_wsl=True), "WSL 2")
    assert windows is not None
    assert "nestedVirtualization=true" in windows.found
