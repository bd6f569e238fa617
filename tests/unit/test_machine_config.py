"""Limits of a helper machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forkd.errors import InvalidRequest
from forkd.machine.accel import Accel
from forkd.machine.config import (
    CPUS_EMULATED,
    CPUS_MAX,
    MEMORY_MIB_MIN,
    POSSIBLE_CPUS_MAX,
    SHARES_MAX,
    MachineConfig,
    Share,
    default_cpus,
    default_memory_mib,
    default_qemu,
)

SHARE = Share(Path("/a"), "/a")


def config(**changes: Any) -> MachineConfig:  # noqa: ANN401 - any field
    return MachineConfig(Path("/k"), Path("/m"), "6.1", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"cpus": CPUS_MAX},
        {"memory_mib": MEMORY_MIB_MIN},
        {"shares": (SHARE,) * SHARES_MAX},
        {"possible_cpus": POSSIBLE_CPUS_MAX},
    ],
)
def test_a_machine_may_be_at_its_limits(changes: dict[str, Any]) -> None:
    assert config(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"cpus": 0},
        {"cpus": CPUS_MAX + 1},
        {"memory_mib": MEMORY_MIB_MIN - 1},
        {"shares": (SHARE,) * (SHARES_MAX + 1)},
        {"possible_cpus": POSSIBLE_CPUS_MAX + 1},
        {"possible_cpus": 0},
    ],
)
def test_a_machine_past_a_limit_is_refused_by_the_name_of_its_field(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        config(**changes)

    assert caught.value.context["field"] in changes


def test_defaults_follow_the_host_within_the_limits() -> None:
    assert 1 <= default_cpus(Accel.KVM) <= CPUS_MAX
    assert default_cpus(Accel.TCG) == CPUS_EMULATED
    assert default_memory_mib() >= MEMORY_MIB_MIN
    assert default_memory_mib() % 64 == 0


def test_the_memory_of_a_machine_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKD_MACHINE_MEMORY_MIB", "2048")
    assert default_memory_mib() == 2048

    monkeypatch.setenv("FORKD_MACHINE_MEMORY_MIB", "8g")
    with pytest.raises(InvalidRequest, match=r"FORKD_MACHINE_MEMORY_MIB is '8g': .*such as 8192"):
        default_memory_mib()


def test_the_qemu_of_a_machine_can_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORKD_MACHINE_QEMU", raising=False)
    assert default_qemu() == "qemu-system-x86_64"

    program = tmp_path / "qemu"
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORKD_MACHINE_QEMU", "./qemu")
    assert config().qemu == str(program), "QEMU starts in another folder"

    monkeypatch.setenv("FORKD_MACHINE_QEMU", "/none/qemu")
    with pytest.raises(InvalidRequest, match=r"FORKD_MACHINE_QEMU is '/none/qemu': .*no such"):
        default_qemu()
