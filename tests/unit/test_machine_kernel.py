"""Which cached kernel the helper machine boots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.machine.kernel import newest_kernel

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
