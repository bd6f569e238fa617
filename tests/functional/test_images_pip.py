"""What a wheel brings is installed into an image: its modules, and its programs in machine code."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

from forkd.host.process import Cancel
from forkd.images.pip import install_requirements
from forkd.images.steps import Build

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NATIVE = b"\x7fELF\x02 a program"

WHEEL = {
    "tool.py": b"answer = 42\n",
    "tool-1.data/scripts/native": NATIVE,
    "tool-1.data/scripts/script": b"#!python\nprint('hello')\n",
    "tool-1.data/scripts/short": b"\x7fE",
    "tool-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tool\nVersion: 1\n",
    "tool-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tool-1.dist-info/RECORD": b"",
}


def test_programs_in_machine_code_are_installed_and_scripts_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/python3").symlink_to("python3.11")
    (root / "usr/bin/python3.11").touch()
    with zipfile.ZipFile(tmp_path / "tool-1-py3-none-any.whl", "w") as wheel:
        for name, data in WHEEL.items():
            wheel.writestr(name, data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with Cancel() as cancel:
        install_requirements(["tool"], root, tmp_path, Build(lambda _: None, cancel))

    programs = root / "usr/local/bin"
    assert [each.name for each in programs.iterdir()] == ["native"]
    assert (programs / "native").read_bytes() == NATIVE
    assert (programs / "native").stat().st_mode & 0o777 == 0o755
    packages = root / "usr/local/lib/python3.11/dist-packages"
    assert (packages / "tool.py").read_bytes() == WHEEL["tool.py"]
    assert not (packages / "bin").exists()
