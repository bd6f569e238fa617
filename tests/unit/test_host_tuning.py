"""What a host says of itself is read from its files; those that are missing say nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd.host.tuning import SETTINGS, Seen, appraises, look, release, reserved_mib, wrong

if TYPE_CHECKING:
    from pathlib import Path

SHMEM = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
NX = "/sys/module/kvm/parameters/nx_huge_pages"
HALT = "/sys/module/kvm/parameters/halt_poll_ns"

GOOD = Seen(
    release=(6, 12),
    memory_mib=64 << 10,
    vulnerabilities={"itlb_multihit": "Not affected"},
    cgroup_options=frozenset(),
    values={
        "vm.overcommit_memory": "1",
        "vm.max_map_count": "65530",
        "kernel.threads-max": "500000",
        "kernel.pid_max": "4194304",
        "fs.nr_open": "1048576",
        "user.max_user_namespaces": "1",
        "kernel.unprivileged_userns_clone": "1",
        SHMEM: "within_size",
        NX: "never",
        HALT: "0",
    },
)


def having(**values: str) -> Seen:
    return replace(GOOD, values={**GOOD.values, **values})


def names(host: Seen) -> list[str]:
    return [each.name for each in wrong(host)]


def host_of(root: Path, files: dict[str, str]) -> Seen:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return look(root)


def test_a_host_without_files_says_nothing(tmp_path: Path) -> None:
    assert look(tmp_path) == Seen()


def test_a_host_is_read_from_its_files(tmp_path: Path) -> None:
    cpu = "sys/devices/system/cpu"
    seen = host_of(
        tmp_path,
        {
            "proc/sys/kernel/osrelease": "6.1.0-37-amd64\n",
            "proc/meminfo": "MemTotal:        8388608 kB\nMemFree: 1 kB\n",
            "proc/cmdline": "quiet split_lock_detect=fatal\n",
            "proc/cpuinfo": "processor : 0\nflags\t\t: fpu split_lock_detect\n",
            "proc/sys/vm/overcommit_memory": "2\n",
            "proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n",
            "proc/self/mounts": "proc /proc proc rw 0 0\n"
            "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate,favordynmods 0 0\n",
            SHMEM[1:]: "always within_size advise [never] deny force\n",
            f"{cpu}/smt/active": "1\n",
            f"{cpu}/vulnerabilities/l1tf": "Not affected\n",
            f"{cpu}/vulnerabilities/mds": "Vulnerable\n",
            "sys/kernel/mm/ksm/run": "1\n",
            "sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n",
            "sys/kernel/security/lsm": "capability,landlock,selinux\n",
            "sys/fs/selinux/enforce": "1",
        },
    )

    assert seen == Seen(
        release=(6, 1),
        memory_mib=8192,
        values={"vm.overcommit_memory": "2", SHMEM: "never"},
        command_line=("quiet", "split_lock_detect=fatal"),
        cpu_flags=frozenset({"fpu", "split_lock_detect"}),
        vulnerabilities={"l1tf": "Not affected", "mds": "Vulnerable"},
        smt=True,
        ksm=True,
        clocksource="hpet",
        lsms=frozenset({"capability", "landlock", "selinux"}),
        selinux_enforces=True,
        userns_restricted=True,
        cgroup_options=frozenset({"rw", "nsdelegate", "favordynmods"}),
    )


def test_swap_counts_unless_it_is_memory_or_encrypted(tmp_path: Path) -> None:
    seen = host_of(
        tmp_path,
        {
            "proc/swaps": "Filename Type Size Used Priority\n"
            "/dev/zram0 partition 1 0 100\n/dev/dm-0 partition 1 0 -2\n"
            "/dev/dm-1 partition 1 0 -3\n/swapfile file 1 0 -4\n",
            "sys/block/dm-0/dm/uuid": "CRYPT-PLAIN-swap\n",
            "sys/block/dm-1/dm/uuid": "LVM-abc\n",
        },
    )

    assert seen.swaps == ("/dev/dm-1", "/swapfile")


@pytest.mark.parametrize(
    ("text", "found"), [("6.18.44-fc", (6, 18)), ("5.14.0-503.el9", (5, 14)), ("", (0, 0))]
)
def test_a_release_is_two_numbers(text: str, found: tuple[int, int]) -> None:
    assert release(text) == found


def test_a_host_that_is_set_up_has_nothing_wrong() -> None:
    assert names(GOOD) == []
    assert set(GOOD.values) == {each.name for each in SETTINGS}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vm.overcommit_memory", "2"),
        ("vm.max_map_count", "65529"),
        ("kernel.threads-max", "196607"),
        ("kernel.pid_max", "32768"),
        ("fs.nr_open", "524287"),
        ("user.max_user_namespaces", "0"),
        ("kernel.unprivileged_userns_clone", "0"),
        (SHMEM, "never"),
        (SHMEM, "deny"),
        (NX, "Y"),
        (NX, "N"),
        (HALT, "200001"),
    ],
)
def test_each_setting_is_wrong_just_beyond_what_is_good(name: str, value: str) -> None:
    assert names(having(**{name: value})) == [name]


def test_what_is_wanted_is_good() -> None:
    assert names(having(**{each.name: each.wanted for each in SETTINGS})) == []


def test_a_small_host_needs_fewer_processes() -> None:
    small = replace(having(**{"kernel.pid_max": "32768"}), memory_mib=10_922)

    assert names(small) == []
    assert names(replace(small, memory_mib=10_923)) == ["kernel.pid_max"]


@pytest.mark.parametrize(
    "host",
    [
        replace(GOOD, vulnerabilities={"itlb_multihit": "KVM: Mitigation: Split huge pages"}),
        replace(GOOD, vulnerabilities={}),
        replace(GOOD, release=(6, 4)),
        replace(GOOD, release=(6, 14)),
        replace(GOOD, cgroup_options=frozenset({"favordynmods"})),
    ],
)
def test_never_is_advised_only_where_it_is_safe_and_helps(host: Seen) -> None:
    assert names(replace(host, values={**host.values, NX: "Y"})) == []


def test_a_setting_says_how_it_is_set() -> None:
    sysctl = SETTINGS[0]
    file = next(each for each in SETTINGS if each.name == SHMEM)

    assert sysctl.command == "sysctl -w vm.overcommit_memory=0"
    assert sysctl.line == "vm.overcommit_memory = 0"
    assert file.command == f"echo advise >{SHMEM}"
    assert file.line == f"w {SHMEM} - - - - advise"


def test_huge_pages_that_are_reserved_are_counted() -> None:
    assert reserved_mib("HugePages_Total:     512\nHugepagesize:       2048 kB\n") == 1024
    assert reserved_mib("HugePages_Total:       0\nHugepagesize:       2048 kB\n") == 0
    assert reserved_mib("") == 0


@pytest.mark.parametrize(
    ("command_line", "expected"),
    [
        ("quiet ima_policy=appraise_tcb", True),
        ("ima_policy=tcb|secure_boot ro", True),
        ("ima_policy=tcb", False),
        ("ima_policy=appraise_tcb ima_appraise=log", False),
        ("quiet", False),
    ],
)
def test_a_kernel_that_appraises_programs_says_so_when_it_is_booted(
    command_line: str, *, expected: bool
) -> None:
    assert appraises(command_line) is expected


def test_windows_and_lockdown_are_seen(tmp_path: Path) -> None:
    for name, text in {
        "proc/sys/kernel/osrelease": "5.15.90.1-microsoft-standard-WSL2",
        "sys/kernel/security/lockdown": "none [integrity] confidentiality",
        "sys/module/kvm/initstate": "live",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")

    seen = look(tmp_path)

    assert (seen.is_wsl, seen.lockdown) == (True, "integrity")
    assert seen.loadable == {"kvm"}
