"""A release is whole: what is in it is listed, its sums verify, and a changed byte is found.

Lists are compared with what packages and programs really have, not with what lists are made of.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import distributions
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from forkd import __version__
from tests.support.docs import ROOT
from tools import deb, release

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.metadata import Distribution
    from pathlib import Path

RELEASE_TIMEOUT_S = 1800
"""Most of it goes into the Debian packages, whose parts come one by one from a package index."""

pytestmark = [
    pytest.mark.needs("binaries", "minisign", "release-tools", "network"),
    pytest.mark.soak(only=True),
    pytest.mark.timeout(RELEASE_TIMEOUT_S),
]

COMMENT = f"forkd {__version__}"

PACKAGED = "forkd/bundled/bin"
"""Where the wheel for hosts has the programs."""

CRATE = re.compile(rb"/crates/([\w-]+?)-(\d+\.[^/]*)/")
"""Where a crate's sources were, as a program has it in messages of panics."""

Parts = set[tuple[str, str]]
"""Names and versions."""


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
        [sys.executable, "-m", "tools.release", "--dirty", *words],
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


def listed(folder: Path, name: str) -> Parts:
    """Return the parts that a list has."""
    parts = json.loads((folder / name).read_text())["components"]
    return {(canonicalize_name(each["name"]), each["version"]) for each in parts}


def installed(folders: Iterable[Path]) -> Parts:
    found = distributions(path=[str(each) for each in folders])
    return {(canonicalize_name(each.name), each.version) for each in found}


def missing(present: list[Distribution], python: str) -> Iterator[str]:
    """Name what distributions need under a version of Python and is not there."""
    versions = {canonicalize_name(each.name): each.version for each in present}
    for each in present:
        extra = deb.EXTRA if canonicalize_name(each.name) == deb.PROJECT else ""
        for need in map(Requirement, each.requires or []):
            about = {"python_version": python, "python_full_version": f"{python}.0", "extra": extra}
            if need.marker is not None and not need.marker.evaluate(about):
                continue
            version = versions.get(canonicalize_name(need.name))
            if version is None or not need.specifier.contains(version, prereleases=True):
                yield f"{each.name} needs {need}, and there is {version}"


def unpacked_programs(folder: Path, into: Path) -> Path:
    """Unpack the archive of programs; return where they are."""
    with tarfile.open(the(folder, "*linux.tar.gz")) as archive:
        archive.extractall(into, filter="data")
    return into / f"forkd-{__version__}"


def test_every_file_of_a_release_has_a_sum_that_verifies(released: Path) -> None:
    summed = [line.split("  ")[1] for line in (released / release.SUMS).read_text().splitlines()]

    assert check_sums(released).returncode == 0
    assert sorted([*summed, release.SUMS, f"{release.SUMS}.minisig"]) == sorted(
        path.name for path in released.iterdir()
    )
    assert len(summed) == 10


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


def test_a_release_is_installed_with_all_that_it_needs_and_nothing_that_is_not_listed(
    released: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    packages = [the(tmp_path, "venv/lib/python*/site-packages")]
    before = installed(packages)
    pip, forkd = (str(tmp_path / "venv/bin" / name) for name in ("pip", "forkd"))
    words = [pip, "install", "-q", "--require-hashes", "-r", "requirements.txt"]

    subprocess.run(words, cwd=released, check=True)  # noqa: S603 - pip

    subprocess.run([pip, "check"], check=True)  # noqa: S603 - pip
    shown = subprocess.run([forkd, "--version"], capture_output=True, text=True, check=True)  # noqa: S603 - ours
    assert shown.stdout == f"forkd {__version__}\n"
    assert installed(packages) - before == listed(released, "python.cdx.json") | {
        (deb.PROJECT, __version__)
    }


@pytest.mark.parametrize(("python", "mark"), deb.RELEASES.items())
def test_a_debian_package_has_what_is_listed_and_all_that_it_needs(
    released: Path, tmp_path: Path, python: str, mark: str
) -> None:
    package = the(released, f"*+{mark}_amd64.deb")
    words = ["dpkg-deb", "--raw-extract", str(package), str(tmp_path / "root")]
    subprocess.run(words, check=True)  # noqa: S603 - dpkg
    sums = ["md5sum", "--check", "--strict", "--quiet", "DEBIAN/md5sums"]
    subprocess.run(sums, cwd=tmp_path / "root", check=True)  # noqa: S603 - coreutils
    packages = tmp_path / "root" / deb.HOME / f"lib/python{python}/site-packages"

    assert installed([packages]) == listed(released, "python.cdx.json") | {
        (deb.PROJECT, __version__)
    }
    assert list(missing(list(distributions(path=[str(packages)])), python)) == []
    archive = unpacked_programs(released, tmp_path)
    for name in ("forkd-vmm", "forkd-agent"):
        packaged = packages / PACKAGED / name
        assert packaged.read_bytes() == (archive / name).read_bytes()


def test_the_wheel_has_the_programs_of_the_archive_and_the_one_for_clients_none(
    released: Path, tmp_path: Path
) -> None:
    archive = unpacked_programs(released, tmp_path)

    for name in ("forkd-vmm", "forkd-agent"):
        with zipfile.ZipFile(the(released, "*x86_64.whl")) as wheel:
            assert wheel.read(f"{PACKAGED}/{name}") == (archive / name).read_bytes()
        with zipfile.ZipFile(the(released, "*none-any.whl")) as wheel:
            assert [each for each in wheel.namelist() if each.endswith(f"/bin/{name}")] == []


def test_the_archive_has_the_programs_as_they_were_built(released: Path, tmp_path: Path) -> None:
    with tarfile.open(the(released, "*linux.tar.gz")) as archive:
        times = {each.mtime for each in archive.getmembers()}
    top = unpacked_programs(released, tmp_path)

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


@pytest.mark.parametrize("name", ["forkd-vmm", "forkd-agent"])
def test_every_crate_that_a_program_names_is_listed(
    released: Path, tmp_path: Path, name: str
) -> None:
    program = (unpacked_programs(released, tmp_path) / name).read_bytes()
    named = {(crate.decode(), version.decode()) for crate, version in CRATE.findall(program)}

    assert len(named) > 5
    parts = json.loads((released / "programs.cdx.json").read_text())["components"]
    assert named - {(each["name"], each["version"]) for each in parts} == set()


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")

    done = make_release(tmp_path)

    assert (done.returncode, done.stderr) == (1, f"release: {tmp_path} is not empty\n")
    assert [path.name for path in tmp_path.iterdir()] == ["note"]
