"""Which cached kernel the helper machine boots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.errors import InvalidRequest
from forkd.machine.kernel import find_kernel, newest_kernel

if TYPE_CHECKING:
    from pathlib import Path


def cache_kernel(folder: Path, name: str) -> None:
    (folder / name / "modules").mkdir(parents=True)
    (folder / name / "vmlinuz").touch()
    (folder / name / "modules/modules.dep").touch()


def test_versions_are_compared_as_numbers(tmp_path: Path) -> None:
    cache_kernel(tmp_path, "6.1.0-9-amd64_6.1.10-1")
    cache_kernel(tmp_path, "6.1.0-56-amd64_6.1.192-2")

    kernel = newest_kernel(tmp_path)

    assert kernel is not None
    assert kernel.release == "6.1.0-56-amd64"


def test_a_kernel_that_is_not_whole_is_not_used(tmp_path: Path) -> None:
    cache_kernel(tmp_path, ".partial-6.1.0-57-amd64_6.1.193-1")
    (tmp_path / "6.1.0-58-amd64_6.1.194-1").mkdir()

    assert newest_kernel(tmp_path) is None


def test_a_series_has_kernels_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = tmp_path / "kernels"
    cache_kernel(kernels, "6.1.0-56-amd64_6.1.192-2")
    cache_kernel(kernels / "6.12", "6.12.118+deb13-amd64_6.12.118-1")

    monkeypatch.delenv("FORKD_MACHINE_KERNEL", raising=False)
    assert find_kernel(tmp_path).release == "6.1.0-56-amd64"
    monkeypatch.setenv("FORKD_MACHINE_KERNEL", "6.12")
    assert find_kernel(tmp_path).release == "6.12.118+deb13-amd64"


@pytest.mark.parametrize("said", ["../6.12", "newest", "6.12-amd64"])
def test_a_series_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setenv("FORKD_MACHINE_KERNEL", said)

    with pytest.raises(InvalidRequest, match=f"FORKD_MACHINE_KERNEL is '{said}'"):
        find_kernel(tmp_path)
