"""A release is whole: what is in it is listed, its sums verify, and a changed byte is found."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from typing import TYPE_CHECKING

import pytest

from forkd import __version__
from tests.support.docs import ROOT
from tools import release

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.needs("binaries", "minisign", "release-tools"),
    pytest.mark.soak(only=True),
]

RELEASE_TIMEOUT_S = 120

COMMENT = f"forkd {__version__}"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a key of minisign's that has no password, and its public key."""
    folder = tmp_path_factory.mktemp("keys")
    minisign("-G", "-W", "-p", str(folder / "public"), "-s", str(folder / "secret"))
    return folder


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Path:
    """A folder with a release of this checkout, signed."""
    folder = tmp_path_factory.mktemp("release")
    done = make_release(
        folder, FORKD_RELEASE_KEY=str(keys / "secret"), SOURCE_DATE_EPOCH="1700000000"
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copied(released: Path, tmp_path: Path) -> Path:
    return shutil.copytree(released, tmp_path / "copy")


def make_release(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - ours
        [sys.executable, "-m", "tools.release", "--dirty", "--no-deb", *words],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=RELEASE_TIMEOUT_S,
    )


def minisign(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["minisign", *words], capture_output=True, text=True, check=False)  # noqa: S603, S607 - as a reader types it


def check_sums(folder: Path) -> subprocess.CompletedProcess[str]:
    words = ["sha256sum", "--check", "--strict", "--quiet", release.SUMS]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603 - coreutils


def the(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.mark.timeout(RELEASE_TIMEOUT_S)
def test_every_file_of_a_release_has_a_sum_that_verifies(released: Path) -> None:
    summed = [line.split("  ")[1] for line in (released / release.SUMS).read_text().splitlines()]

    assert check_sums(released).returncode == 0
    assert sorted([*summed, release.SUMS, f"{release.SUMS}.minisig"]) == sorted(
        path.name for path in released.iterdir()
    )
    assert len(summed) == 8


@pytest.mark.parametrize(
    "pattern", ["*x86_64.whl", "*linux.tar.gz", "requirements.txt", "*programs.cdx.json"]
)
def test_a_changed_byte_is_found(copied: Path, pattern: str) -> None:
    path = the(copied, pattern)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    found = check_sums(copied)

    assert found.returncode == 1
    assert found.stdout == f"{path.name}: FAILED\n"


def test_the_sums_are_signed_and_changed_sums_are_refused(copied: Path, keys: Path) -> None:
    words = ("-V", "-p", str(keys / "public"), "-m", str(copied / release.SUMS))
    good = minisign(*words)
    assert good.returncode == 0, good.stderr
    assert f"Trusted comment: {COMMENT}\n" in good.stdout

    with (copied / release.SUMS).open("a") as file:
        file.write(f"{'0' * 64}  another\n")

    assert minisign(*words).returncode != 0


def test_pip_installs_the_wheel_and_refuses_another(copied: Path) -> None:
    """Its dependencies are in the same file, with the digests of the lock."""
    lines = (copied / "requirements.txt").read_text().splitlines(keepends=True)
    assert [line for line in lines if line.startswith("./")] == lines[:1]
    (copied / "wheel.txt").write_text(lines[0])
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    words += ["--require-hashes", "--target", "installed", "-r", "wheel.txt"]

    subprocess.run(words, cwd=copied, check=True)  # noqa: S603 - pip
    installed = copied / "installed/forkd/__init__.py"
    assert installed.read_bytes() == (ROOT / "src/forkd/__init__.py").read_bytes()

    with the(copied, "*x86_64.whl").open("ab") as file:
        file.write(b"\0")
    refused = subprocess.run(words, cwd=copied, capture_output=True, text=True, check=False)  # noqa: S603 - pip
    assert "DO NOT MATCH THE HASHES" in refused.stderr


@pytest.mark.needs("network")
@pytest.mark.timeout(RELEASE_TIMEOUT_S)
def test_a_release_is_installed_with_all_that_it_needs(released: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    pip, forkd = (str(tmp_path / "venv/bin" / name) for name in ("pip", "forkd"))
    words = [pip, "install", "-q", "--require-hashes", "-r", "requirements.txt"]

    subprocess.run(words, cwd=released, check=True)  # noqa: S603 - pip

    subprocess.run([pip, "check"], check=True)  # noqa: S603 - pip
    shown = subprocess.run([forkd, "--version"], capture_output=True, text=True, check=True)  # noqa: S603 - ours
    assert shown.stdout == f"forkd {__version__}\n"


def test_the_archive_has_the_programs_as_they_were_built(released: Path, tmp_path: Path) -> None:
    with tarfile.open(the(released, "*linux.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
        times = {each.mtime for each in archive.getmembers()}
    top = tmp_path / f"forkd-{__version__}"

    assert times == {1700000000}
    for name in ("forkd-vmm", "forkd-agent"):
        assert (top / name).read_bytes() == (ROOT / "build/bin" / name).read_bytes()
        assert os.access(top / name, os.X_OK)


def test_the_lists_of_parts_name_what_is_in_packages_and_programs(released: Path) -> None:
    packages = json.loads((released / "python.cdx.json").read_text())["components"]
    programs = json.loads((released / "programs.cdx.json").read_text())
    pins = re.findall(
        r"^([\w.-]+)==(\S+)", (released / "requirements.txt").read_text(), re.MULTILINE
    )

    assert sorted((each["name"], each["version"]) for each in packages) == sorted(pins)
    assert {"httpx", "pydantic"} <= {name for name, _ in pins}
    parts = {each["name"]: each for each in programs["components"]}
    assert {"forkd-vmm", "forkd-agent", "kvm-ioctls", "libc", "glibc", "rust-std"} <= parts.keys()
    assert not {"syn", "cc", "forkd-witness"} & parts.keys()  # build others, or are not shipped
    assert [each["name"] for each in parts.values() if not each.get("licenses")] == []
    refs = {each["bom-ref"] for each in programs["components"]} | {"forkd"}
    assert {each["ref"] for each in programs["dependencies"]} <= refs
    assert {below for each in programs["dependencies"] for below in each["dependsOn"]} <= refs


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")

    done = make_release(tmp_path)

    assert (done.returncode, done.stderr) == (1, f"release: {tmp_path} is not empty\n")
    assert [path.name for path in tmp_path.iterdir()] == ["note"]
