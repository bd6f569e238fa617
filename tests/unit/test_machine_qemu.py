"""The helper machine's command line and the files that its first stage reads."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from forkd.machine import qemu
from forkd.machine.accel import Accel
from forkd.machine.config import Forward, MachineConfig, Share

CONFIG = MachineConfig(
    kernel=Path("/k/vmlinuz"),
    modules=Path("/k/modules"),
    release="6.1.0-56-amd64",
    accel=Accel.TCG,
    cpus=2,
    memory_mib=2048,
)


def command(config: MachineConfig) -> str:
    return shlex.join(qemu.command(config, executor_port=4711, ready_fd=5))


def test_emulation_offers_virtualisation_with_nested_paging() -> None:
    assert "-cpu EPYC-v3,+svm,+npt" in command(CONFIG)


def test_the_machine_runs_in_the_qemu_that_is_chosen() -> None:
    assert command(replace(CONFIG, qemu="/opt/qemu")).startswith("/opt/qemu -nodefaults ")


def test_kvm_offers_the_host_processor() -> None:
    assert "-accel kvm -cpu host" in command(replace(CONFIG, accel=Accel.KVM))


def test_an_emulated_machine_is_told_how_fast_the_counter_runs_that_it_reads() -> None:
    known = replace(CONFIG, counter_khz=2_300_000)

    assert " tsc_early_khz=2300000'" in command(known)
    assert "tsc_early_khz" not in command(replace(known, counter_khz=None))
    assert "tsc_early_khz" not in command(replace(known, accel=Accel.KVM))


def test_a_kernel_makes_room_for_as_many_processors_as_is_asked() -> None:
    assert " possible_cpus=128'" in command(replace(CONFIG, possible_cpus=128))
    assert "possible_cpus" not in command(CONFIG)


def test_ports_are_forwarded_from_loopback_only() -> None:
    line = command(replace(CONFIG, forwards=(Forward(8000, 80),)))

    assert "hostfwd=tcp:127.0.0.1:4711-:1024,hostfwd=tcp:127.0.0.1:8000-:80" in line
    assert line.count("hostfwd=") == line.count("hostfwd=tcp:127.0.0.1:")


READ_ONLY = "security_model=none,multidevs=remap,readonly=on"


def test_a_machine_sees_a_root_of_its_own_and_the_programs_of_the_host() -> None:
    line = command(replace(CONFIG, system=(Path("/usr"),)))

    assert f"id=root,path=root,{READ_ONLY}" in line
    assert f"id=system0,path=/usr,{READ_ONLY}" in line
    assert "path=/," not in line
    assert qemu.system_table(replace(CONFIG, system=(Path("/usr"),))) == "system0\t/usr\n"


def test_a_machine_for_tests_sees_the_whole_host_and_changes_nothing_of_it() -> None:
    assert f"id=root,path=/,{READ_ONLY}" in command(replace(CONFIG, whole_host=True))


def test_a_comma_in_a_path_does_not_add_an_option() -> None:
    share = Share(Path("/a,readonly=off"), "/a")

    assert "path=/a,,readonly=off," in command(replace(CONFIG, shares=(share,)))


@pytest.mark.parametrize(
    ("share", "options"),
    [
        (Share(Path("/a"), "/a"), "cache=none,msize=524288,ro"),
        (Share(Path("/a"), "/a", writable=True), "cache=none,msize=524288"),
        (Share(Path("/a"), "/a", changing=False), "cache=loose,msize=524288,ro"),
        (Share(Path("/a"), "/a", layer="/own"), "cache=none,msize=524288,ro"),
    ],
)
def test_a_share_is_mounted_as_it_asks(share: Share, options: str) -> None:
    tag, mounted, layer, target = qemu.shares_table(replace(CONFIG, shares=(share,))).split("\t")

    assert (tag, layer, target) == ("share0", share.layer or "-", "/a\n")
    assert mounted.endswith(options)


def test_settings_survive_the_shell_that_reads_them() -> None:
    text = qemu.settings(CONFIG, python=Path("/a b/$HOME"), executor=Path("/s/r/c/e'x.py"))

    assert "PYTHON='/a b/$HOME'\n" in text
    assert shlex.split(text.splitlines()[-1]) == ["EXECUTOR=/s/r/c/e'x.py"]


def test_a_machine_is_told_whether_it_is_tuned() -> None:
    for tuned, said in ((True, "TUNED=yes"), (False, "TUNED=''")):
        config = replace(CONFIG, tuned=tuned)
        text = qemu.settings(config, python=Path("/p"), executor=Path("/s/r/c/x.py"))
        assert said in text.splitlines()


def test_what_the_executor_runs_from_is_kept_only_below_tmp() -> None:
    python, executor = Path("/tmp/v/bin/python"), Path("/tmp/c/src/forkd/executor.py")

    whole = replace(CONFIG, whole_host=True)

    below = qemu.settings(whole, python=python, executor=executor)
    above = qemu.settings(whole, python=Path("/v/bin/python"), executor=Path("/c/src/forkd/e.py"))

    assert "KEPT='/tmp/v\n/tmp/c\n'" in below
    assert "KEPT=''" in above
