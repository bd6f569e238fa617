"""What settings of the host are worth to a fork: how they are set, measured and shown."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks import tuning, withheld
from benchmarks.harness import machine
from benchmarks.report import show
from benchmarks.run import PARTS, steps
from forkd.errors import EngineError, HostError
from tools import gen_host_times

if TYPE_CHECKING:
    from benchmarks.harness import Json

ASKED = """
import fcntl, sys
for number in sys.argv[1:]:
    try:
        print(fcntl.ioctl(0, 0xAE03, int(number)))
    except OSError as error:
        print(error.errno)
"""


def asked(*numbers: int, hidden: int) -> list[str]:
    """Return what a program is told of extensions by a device that knows none."""
    command = [sys.executable, "-S", withheld.__file__, str(hidden)]
    program = [sys.executable, "-S", "-c", ASKED, *map(str, numbers)]
    with Path(os.devnull).open("rb") as device:
        done = subprocess.run(  # noqa: S603 - ours
            [*command, *program], stdin=device, capture_output=True, text=True, check=True
        )
    return done.stdout.split()


def test_one_extension_is_hidden_and_every_other_call_goes_to_the_kernel() -> None:
    refusal = pytest.raises(OSError, match="Inappropriate")
    with Path(os.devnull).open("rb") as device, refusal as refused:
        fcntl.ioctl(device, withheld.KVM_CHECK_EXTENSION, 1)
    kernels = str(refused.value.errno)

    assert asked(235, 236, 237, hidden=withheld.PRE_FAULT_MEMORY) == [kernels, "0", kernels]
    assert asked(236, hidden=withheld.NOTHING) == [kernels]


def test_a_program_from_which_an_extension_is_hidden_gets_its_arguments(tmp_path: Path) -> None:
    program = tmp_path / "it's here" / "shows"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    program.chmod(0o700)

    made = tuning.withholding(program, tmp_path, withheld.NOTHING)

    told = subprocess.run([made, "a b", ""], capture_output=True, text=True, check=True)  # noqa: S603 - ours
    assert told.stdout == "a b||"


class Kernel:
    """Files that say how cgroups are mounted and how KVM was loaded, and what mounts them anew."""

    def __init__(self, folder: Path, *, never: bool = False, changes: bool = True) -> None:
        self.mounts, self.modules = folder / "mounts", folder / "module"
        parameters = self.modules / "kvm" / "parameters"
        parameters.mkdir(parents=True)
        (parameters / "nx_huge_pages").write_text("never\n" if never else "N\n")
        self.mount("rw,nsdelegate,favordynmods")
        self.changes = changes

    def mount(self, options: str) -> None:
        self.mounts.write_text(f"cgroup2 {tuning.CGROUPS} cgroup2 {options} 0 0\n")

    def run(self, *command: str) -> None:
        match command:
            case ("mount", "-t", "cgroup2", "-o", options, "cgroup2", _) if self.changes:
                self.mount(options.removeprefix("remount,"))


def on(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MOUNTS", kernel.mounts)
    monkeypatch.setattr(tuning, "MODULES", kernel.modules)
    monkeypatch.setattr(tuning, "run", kernel.run)


def test_the_machine_is_set_as_wanted_and_afterwards_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(Kernel(tmp_path), monkeypatch)

    with tuning.restored():
        for setting in tuning.here().values():
            tuning.apply(setting)
            assert tuning.is_favoring() == setting.favordynmods
        tuning.apply(tuning.Setting())

    assert tuning.mount_options() == ["rw", "nsdelegate", "favordynmods"]


def test_each_setting_is_one_of_either_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(Kernel(tmp_path / "stock"), monkeypatch)
    stock = set(tuning.here())
    on(Kernel(tmp_path / "tuned", never=True), monkeypatch)

    assert stock | set(tuning.here()) == set(tuning.SETTINGS)
    assert not stock & set(tuning.here())


def test_a_machine_that_cannot_be_set_so_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(Kernel(tmp_path, changes=False), monkeypatch)

    with pytest.raises(HostError, match="favordynmods"):
        tuning.apply(tuning.Setting())


def measured(*, offered: bool) -> Json:
    settings = {}
    for number, name in enumerate(tuning.SETTINGS, 1):
        samples = tuning.Samples()
        for each in (1.0, 2.0, 3.0, 4.0):
            samples.one_ms.append(each * 1000 / number)
            samples.hundred_ms.append(each * 9000)
            samples.slowest_ms.append(each)
            samples.mappings.append(40)
            samples.stages.setdefault("build", []).append(each)
            samples.stages.setdefault("agent", []).append(each)
        samples.faults = [318] if name != "never" else []
        settings[name] = samples.figures()
    host = {"width": 100, "rounds": 7, "singles": 63, "prefault_offered": offered}
    return {
        "machine": machine("a test") | {"cpus": 1, "kernel": "6.12"},
        "started_at": "2026-11-28T04:00:00",
        "rounds_repeated": 1,
        "host": {**host, "settings": settings},
    }


def test_the_figures_are_shown_and_become_a_table_of_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(measured(offered=True))
    tuning.publish(measured(offered=True), tmp_path / "figures.json")

    table = gen_host_times.table(json.loads((tmp_path / "figures.json").read_text()))

    assert "forks by how the host is set" in capsys.readouterr().out
    plain, favoring = table.splitlines()[2:4]
    assert plain == (
        "| as distributions set it | 2,000 ms (1,000 to 3,000) |  | 18,000 ms (9,000 to 27,000) |  "
        "| 318 |"
    )
    assert favoring.startswith("| cgroups with `favordynmods` | 1,000 ms (500 to 1,500) | 0.50 |")
    assert "Linux 6.12, 2026-11-28; 7 rounds" in table.replace("\n", " ")


def test_the_figures_of_two_machines_are_those_of_one_run() -> None:
    stock, tuned = measured(offered=True), measured(offered=True)
    for bench, never in ((stock, False), (tuned, True)):
        for name, setting in tuning.SETTINGS.items():
            if setting.never != never:
                del bench["host"]["settings"][name]

    both = tuning.joined(stock, tuned)

    assert set(both["host"]["settings"]) == set(tuning.SETTINGS)
    assert both["rounds_repeated"] == 2


def test_a_run_without_one_of_the_settings_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="FORKD_MACHINE_KERNEL"):
        tuning.publish(measured(offered=False), tmp_path / "figures.json")


def test_settings_are_measured_only_if_that_is_asked_for() -> None:
    assert "host" not in PARTS
    assert steps(frozenset({"host"}), quick=True) == 1 + tuning.QUICK.steps() + 1
