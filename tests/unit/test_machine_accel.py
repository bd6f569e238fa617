"""Whether the helper machine is emulated."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest

from forkd.machine.accel import Accel, KvmFacts, choose_accel, look_at_kvm

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("facts", [KvmFacts(*three) for three in product([True, False], repeat=3)])
def test_kvm_runs_the_machine_only_if_it_opens_is_real_and_nests(facts: KvmFacts) -> None:
    works = facts == KvmFacts(opens=True, paravirtual=False, nests=True)

    assert choose_accel(facts) is (Accel.KVM if works else Accel.TCG)


@pytest.mark.parametrize(("said", "nests"), [("1\n", True), ("Y\n", True), ("0\n", False)])
def test_nesting_is_what_the_module_says(tmp_path: Path, said: str, *, nests: bool) -> None:
    (tmp_path / "kvm_amd/parameters").mkdir(parents=True)
    (tmp_path / "kvm_amd/parameters/nested").write_text(said)

    assert look_at_kvm(tmp_path).nests is nests


def test_pvm_is_recognised_by_its_module(tmp_path: Path) -> None:
    (tmp_path / "kvm_pvm").mkdir()

    assert look_at_kvm(tmp_path).paravirtual
