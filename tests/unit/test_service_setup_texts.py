"""Files of settings have exactly what is wrong, no more; doing it again changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forkd import programs
from forkd.host.tuning import SETTINGS, Seen, Setting, wrong
from forkd.service.setup import texts
from forkd.service.setup.texts import HEAD, MODPROBE_FILE, SYSCTL_FILE, TMPFILES_FILE

SHMEM = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
HALT_POLL = "/sys/module/kvm/parameters/halt_poll_ns"

WRONG = Seen(
    release=(6, 12),
    values={"vm.overcommit_memory": "2", "vm.max_map_count": "65530", SHMEM: "never"},
)


def written(host: Seen, existing: dict[Path, str] | None = None) -> dict[Path, str]:
    return texts.settings(host, wrong(host), existing or {})


def test_the_files_have_exactly_what_is_wrong() -> None:
    assert written(WRONG) == {
        SYSCTL_FILE: f"{HEAD}\nvm.overcommit_memory = 0\n",
        TMPFILES_FILE: f"{HEAD}\nw {SHMEM} - - - - advise\n",
    }


def test_a_host_with_nothing_wrong_gets_no_file() -> None:
    assert written(replace(WRONG, values={each.name: each.wanted for each in SETTINGS})) == {}


def test_files_that_are_as_they_should_be_stay() -> None:
    assert written(WRONG, written(WRONG)) == {}


def test_what_was_wrong_before_stays_set() -> None:
    """The values are good then because of the file, which another restart needs again."""
    now = Seen(values={"vm.overcommit_memory": "0", "user.max_user_namespaces": "0"})

    assert written(now, written(WRONG)) == {
        SYSCTL_FILE: f"{HEAD}\nvm.overcommit_memory = 0\nuser.max_user_namespaces = 65536\n"
    }


def test_a_line_that_did_not_help_is_replaced_and_others_are_kept() -> None:
    by_hand = "# mine\nvm.overcommit_memory=2\nvm.swappiness = 1\n"

    assert written(WRONG, {SYSCTL_FILE: by_hand})[SYSCTL_FILE] == (
        f"{HEAD}\n# mine\nvm.swappiness = 1\nvm.overcommit_memory = 0\n"
    )


def test_a_parameter_of_a_module_that_is_loaded_later_is_set_when_it_is_loaded() -> None:
    built_in = Seen(values={HALT_POLL: "400000"})
    loaded = replace(built_in, loadable=frozenset({"kvm"}))
    by_hand = "options kvm halt_poll_ns=1\noptions kvm ignore_msrs=1\n"

    assert written(built_in) == {TMPFILES_FILE: f"{HEAD}\nw {HALT_POLL} - - - - 200000\n"}
    assert written(loaded, {MODPROBE_FILE: by_hand}) == {
        MODPROBE_FILE: f"{HEAD}\noptions kvm ignore_msrs=1\noptions kvm halt_poll_ns=200000\n"
    }


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each.short_name)
def test_every_setting_has_a_line_of_its_kind_of_file(setting: Setting) -> None:
    host = replace(
        WRONG,
        memory_mib=1 << 20,
        vulnerabilities={"itlb_multihit": "Not affected"},
        values={setting.name: BAD[setting.short_name]},
    )

    (text,) = written(host).values()

    assert text.splitlines()[1:] == [setting.line]


BAD = {
    "vm.overcommit_memory": "2",
    "vm.max_map_count": "1",
    "kernel.threads-max": "1",
    "kernel.pid_max": "1",
    "fs.nr_open": "1",
    "user.max_user_namespaces": "0",
    "kernel.unprivileged_userns_clone": "0",
    "shmem_enabled": "never",
    "nx_huge_pages": "N",
    "halt_poll_ns": "400000",
}


def test_the_profile_that_comes_with_forkd_gets_the_path_of_the_vmm() -> None:
    ours = (programs.PACKAGING / "apparmor/forkd-vmm").read_text(encoding="utf-8")

    found = texts.profile(ours, Path('/home/a b/["x"]*/forkd-vmm'))

    assert found.count(r'profile forkd-vmm "/home/a b/\[\"x\"\]\*/forkd-vmm" flags=') == 1
    assert texts.PROFILE_PATH not in found
    plain = texts.profile(ours, Path("/srv/forkd-1.0/bin/forkd-vmm"))
    assert "profile forkd-vmm /srv/forkd-1.0/bin/forkd-vmm flags=(unconfined) {" in plain


def test_the_unit_names_every_option_that_cgroups_are_mounted_with() -> None:
    unit = texts.cgroups_unit({"rw", "nsdelegate"})

    assert "ExecStart=/bin/mount -o remount,nsdelegate,rw,favordynmods /sys/fs/cgroup\n" in unit
