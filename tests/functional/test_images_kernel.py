"""Debian's kernels come in packages of three shapes."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from forkd.errors import BuildError
from forkd.images.compressed import read_module
from forkd.images.kernel_packages import unpack
from forkd.images.steps import Build

if TYPE_CHECKING:
    from pathlib import Path

RELEASE = "7.3.4+deb13-amd64"

MODULES = f"usr/lib/modules/{RELEASE}"

SHAPES = {
    "Debian 12": [[f"boot/vmlinuz-{RELEASE}", f"lib/modules/{RELEASE}/kernel/a.ko"]],
    "Debian 13": [[f"boot/vmlinuz-{RELEASE}", f"{MODULES}/kernel/a.ko"]],
    "Debian 14": [
        ["usr/share/bug/x"],
        [f"{MODULES}/modules.builtin"],
        [f"{MODULES}/vmlinuz"],
        [f"{MODULES}/kernel/a.ko"],
    ],
}
"""Which files are in which package."""


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True)  # noqa: S603 - ours


def packages(folder: Path, contents: list[list[str]]) -> list[Path]:
    """Make a Debian package of each list of files."""
    made = []
    for number, names in enumerate(contents):
        tree = folder / f"tree{number}"
        for name in names:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes(b"kernel" if "vmlinuz" in name else b"\x7fELF")
        (tree / "DEBIAN").mkdir(parents=True)
        (tree / "DEBIAN/control").write_text(
            f"Package: part{number}\nVersion: 1\nArchitecture: all\n"
            "Maintainer: nobody <nobody@localhost>\nDescription: x\n"
        )
        made.append(folder / f"part{number}.deb")
        run("dpkg-deb", "-b", "-Znone", tree, made[-1])
    return made


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_and_modules_are_found_in_every_shape(tmp_path: Path, shape: str) -> None:
    target = tmp_path / "target"
    target.mkdir()

    unpack(packages(tmp_path, SHAPES[shape]), RELEASE, target, Build())

    assert (target / "vmlinuz").read_bytes() == b"kernel"
    assert (target / "modules/kernel/a.ko").is_file()
    assert not (target / "modules/vmlinuz").exists()
    assert "kernel/a.ko:" in (target / "modules/modules.dep").read_text()
    assert sorted(path.name for path in target.iterdir()) == ["modules", "vmlinuz"]


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ([["usr/share/bug/x"]], f"lib/modules/{RELEASE}, usr/lib/modules/{RELEASE}"),
        ([[f"{MODULES}/kernel/a.ko"]], f"boot/vmlinuz-{RELEASE}, {MODULES}/vmlinuz"),
    ],
)
def test_what_packages_lack_is_named(tmp_path: Path, contents: list[list[str]], words: str) -> None:
    with pytest.raises(BuildError) as caught:
        unpack(packages(tmp_path, contents), RELEASE, tmp_path, Build())

    assert str(caught.value) == f"the packages of Debian's kernel {RELEASE} have none of {words}"


def test_modules_packed_with_zstd_are_unpacked(tmp_path: Path) -> None:
    module = tmp_path / "a.ko"
    module.write_bytes(b"module" * 1000)
    run("zstd", "-q", module)
    packed = tmp_path / "a.ko.zst"

    assert read_module(packed) == module.read_bytes()

    packed.write_bytes(packed.read_bytes()[:20])
    with pytest.raises(BuildError, match=r"a\.ko\.zst is damaged: "):
        read_module(packed)
