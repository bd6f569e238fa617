"""The wheel for Linux on x86_64, installed with no checkout near: it has all that a host needs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator  # noqa: TC003 - pytest reads annotations of fixtures
from dataclasses import dataclass
from pathlib import Path

import pytest

from forkd.installed import VERSION
from tests.support.daemon_program import bare_environment, own_settings
from tests.support.docs import ROOT
from tests.support.wheels import built

pytestmark = [pytest.mark.needs("binaries"), pytest.mark.timeout(300)]

TIMEOUT_S = 240

END_TIMEOUT_S = 30


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("platform", tmp_path_factory.mktemp("platform"))


@dataclass(frozen=True, slots=True)
class Installed:
    """A virtual environment with the wheel.

    Attributes:
        folder: Where it is.
        home: What its programs have to themselves.
    """

    folder: Path
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            **bare_environment(),
            **own_settings(self.home),
            "FORKD_HOME": str(self.home / "home"),
        }

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment to its end."""
        return subprocess.run(  # noqa: S603 - our own
            [self.folder / "bin" / program, *words],
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Iterator[Installed]:
    """Install the wheel into an empty environment; other packages are those of this one."""
    home = Path(tempfile.mkdtemp(prefix="forkd-wheel-"))  # short: paths of sockets are below it
    try:
        made = Installed(home / "venv", home)
        subprocess.run([sys.executable, "-m", "venv", made.folder], check=True, timeout=TIMEOUT_S)  # noqa: S603 - our own
        done = made.run("pip", "install", "-q", "--no-index", "--no-deps", str(wheel))
        assert done.returncode == 0, done.stderr
        (packages,) = made.folder.glob("lib/python3*/site-packages")
        (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        yield made
    finally:
        shutil.rmtree(home)


def test_the_programs_find_the_vmm_the_agent_and_the_recipes(installed: Installed) -> None:
    code = (
        "from forkd import programs as p; "
        "print(p.find(p.VMM), p.find(p.AGENT), p.RECIPES, (p.RECIPES / 'python-numpy').is_dir())"
    )
    done = installed.run("python", "-c", code)

    inside = next(installed.folder.glob("lib/python3*/site-packages")) / "forkd/bundled"
    found = [str(inside / each) for each in ("bin/forkd-vmm", "bin/forkd-agent", "recipes")]
    assert done.stdout.split() == [*found, "True"], done.stderr


def test_the_command_says_its_version_and_examines_the_host(installed: Installed) -> None:
    assert installed.run("forkd", "--version").stdout == f"forkd {VERSION}\n"
    said = installed.run("forkd", "doctor", "--json")
    checks = {each["name"]: each["status"] for each in json.loads(said.stdout)}
    assert checks["programs"] == "PASS"


def test_its_daemon_serves_and_lists_the_recipes(installed: Installed) -> None:
    program, log = installed.folder / "bin/forkd-daemon", installed.home / "log"
    command = [str(program), "serve", "--log", str(log)]
    with subprocess.Popen(  # noqa: S603 - our own
        command, cwd=installed.home, env=installed.environment, stdout=subprocess.PIPE
    ) as daemon:
        try:
            assert daemon.stdout is not None
            said = json.loads(daemon.stdout.readline() or "{}")
            assert said.get("event") == "listening", log.read_text()
            done = installed.run("forkd", "recipe", "ls", "--json")
        finally:
            daemon.terminate()
            daemon.wait(END_TIMEOUT_S)

    assert done.returncode == 0, done.stderr
    ours = {path.parent.name for path in (ROOT / "recipes").glob("*/recipe.toml")}
    assert {each["name"] for each in json.loads(done.stdout)} == ours


def test_its_vmm_runs(installed: Installed) -> None:
    code = "from forkd import programs as p; print(p.find(p.VMM))"
    vmm = installed.run("python", "-c", code).stdout.strip()
    done = subprocess.run([vmm, "--help"], capture_output=True, text=True, check=False, timeout=60)  # noqa: S603 - ours

    assert "zygote" in done.stdout + done.stderr


def test_the_unit_and_the_completions_go_along(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    tracked = subprocess.run(
        ["git", "ls-files", "recipes", "packaging"],  # noqa: S607 - git
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert tracked
    assert [each for each in tracked if f"forkd/bundled/{each}" not in names] == []


def test_the_wheel_of_other_systems_is_the_client_alone(tmp_path: Path) -> None:
    wheel = built("pure", tmp_path)

    assert wheel.name == f"forkd_vm-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert [each for each in archive.namelist() if "bundled" in each] == []


@pytest.mark.parametrize(
    ("platform", "fits"),
    [
        ("manylinux_2_17_x86_64", True),
        ("musllinux_1_1_x86_64", True),
        ("manylinux_2_16_x86_64", False),
        ("manylinux_2_17_aarch64", False),
        ("macosx_14_0_arm64", False),
    ],
)
def test_an_installer_takes_the_wheel_where_it_runs_and_leaves_nothing_elsewhere(
    wheel: Path, tmp_path: Path, platform: str, *, fits: bool
) -> None:
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    words += ["--only-binary", ":all:", "--platform", platform, "--target", str(tmp_path / "to")]
    done = subprocess.run(  # noqa: S603 - pip's
        [*words, str(wheel)], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )

    if fits:
        assert (done.returncode, (tmp_path / "to/forkd").is_dir()) == (0, True), done.stderr
        return
    assert done.returncode == 1
    assert f"{wheel.name} is not a supported wheel on this platform" in done.stderr
    assert list(tmp_path.iterdir()) == []
