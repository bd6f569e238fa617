"""Two files set what is wrong on a host, no more; doing it again changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd.host.tuning import SETTINGS, Seen, Setting
from forkd.service.tuning_files import (
    HEAD,
    SYSCTL_FILE,
    TMPFILES_FILE,
    existing,
    plan,
    write,
)

if TYPE_CHECKING:
    from pathlib import Path

SHMEM = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"

WRONG = Seen(
    release=(6, 12),
    values={"vm.overcommit_memory": "2", "vm.max_map_count": "65530", SHMEM: "never"},
)


def test_the_files_have_exactly_what_is_wrong() -> None:
    planned = plan(WRONG, {})

    assert planned.files == {
        SYSCTL_FILE: f"{HEAD}\nvm.overcommit_memory = 0\n",
        TMPFILES_FILE: f"{HEAD}\nw {SHMEM} - - - - advise\n",
    }
    assert [each.name for each in planned.settings] == ["vm.overcommit_memory", SHMEM]


def test_a_host_with_nothing_wrong_gets_no_file() -> None:
    good = replace(WRONG, values={each.name: each.wanted for each in SETTINGS})

    planned = plan(good, {})

    assert (planned.files, planned.settings) == ({}, ())


def test_files_that_are_as_they_should_be_stay() -> None:
    assert plan(WRONG, plan(WRONG, {}).files).files == {}


def test_what_was_wrong_before_stays_set() -> None:
    """The values are good then because of the file, which another restart needs again."""
    before = plan(WRONG, {}).files
    now = Seen(values={"vm.overcommit_memory": "0", "user.max_user_namespaces": "0"})

    planned = plan(now, before)

    assert planned.files == {
        SYSCTL_FILE: f"{HEAD}\nvm.overcommit_memory = 0\nuser.max_user_namespaces = 65536\n"
    }


def test_a_line_that_did_not_help_is_replaced_and_others_are_kept() -> None:
    by_hand = "# mine\nvm.overcommit_memory=2\nvm.swappiness = 1\n"

    planned = plan(WRONG, {SYSCTL_FILE: by_hand})

    assert planned.files[SYSCTL_FILE] == (
        f"{HEAD}\n# mine\nvm.swappiness = 1\nvm.overcommit_memory = 0\n"
    )


def test_files_are_written_below_a_root_and_read_again(tmp_path: Path) -> None:
    assert existing(tmp_path) == {}
    planned = plan(WRONG, {})

    write(planned, tmp_path)

    assert existing(tmp_path) == planned.files
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.relative_to(tmp_path) for path in written) == [SYSCTL_FILE, TMPFILES_FILE]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each.short_name)
def test_every_setting_has_a_line_of_its_kind_of_file(setting: Setting) -> None:
    host = replace(
        WRONG,
        memory_mib=1 << 20,
        vulnerabilities={"itlb_multihit": "Not affected"},
        values={setting.name: BAD[setting.short_name]},
    )

    (text,) = plan(host, {}).files.values()

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
