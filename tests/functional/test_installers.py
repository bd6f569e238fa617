"""pipx and uv install the wheel as a program; it works, and uninstalling it leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator  # noqa: TC003 - pytest reads annotations of fixtures
from dataclasses import dataclass
from pathlib import Path

import pytest

from forkd.installed import DISTRIBUTION, VERSION
from tests.functional.test_wheel import END_TIMEOUT_S
from tests.support.daemon_program import bare_environment, own_settings
from tests.support.docs import ROOT
from tests.support.pythons import VERSIONS
from tests.support.wheels import built

pytestmark = [
    pytest.mark.needs("binaries", "network"),
    pytest.mark.soak(only=True),
    pytest.mark.timeout(900),
]

TIMEOUT_S = 600.0

WORDS = {"pipx": (), "uv": ("tool",)}
"""What installs a program with each."""

FETCHED = ".cache/uv/"
"""uv's cache, which `uv cache clean` empties."""

LOCK = f".local/share/pipx/venvs/.{DISTRIBUTION}.lock"
"""What pipx keeps of any program: an empty file."""

OF_INSTALLERS = (
    ".local/share/pipx/",
    ".local/state/pipx/",
    ".local/share/uv/",
    FETCHED,
    ".cache/pipx/",
)
"""Where each keeps its own: environments, logs, and what it has fetched."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("platform", tmp_path_factory.mktemp("platform"))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both installers."""
    folder = tmp_path_factory.mktemp("installers")
    pip = str(folder / "bin/pip")
    for words in (
        [sys.executable, "-m", "venv", str(folder)],
        [pip, "install", "-q", "--no-cache-dir", *WORDS],
    ):
        subprocess.run(words, check=True, timeout=TIMEOUT_S)  # noqa: S603 - pip's
    return folder / "bin"


@dataclass(frozen=True, slots=True)
class Home:
    """A user's folder, in which programs are installed with one installer.

    Attributes:
        folder: Where it is.
        installer: Its program.
    """

    folder: Path
    installer: Path

    @property
    def environment(self) -> dict[str, str]:
        passed_on = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("PIP_", "UV_", "SSL_")) or name.lower().endswith("_proxy")
        }
        return passed_on | {
            **bare_environment(),
            **own_settings(self.folder),
            "PIPX_DEFAULT_PYTHON": sys.executable,
            "UV_PYTHON": sys.executable,
            "UV_PYTHON_DOWNLOADS": "never",
        }

    @property
    def bin(self) -> Path:
        return self.folder / ".local/bin"

    def run(self, program: Path, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # noqa: S603 - an installer, or ours
            [program, *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )

    def install(self, what: str) -> None:
        done = self.run(self.installer, *WORDS[self.installer.name], "install", what)
        assert done.returncode == 0, done.stdout + done.stderr

    def uninstall(self) -> None:
        done = self.run(self.installer, *WORDS[self.installer.name], "uninstall", DISTRIBUTION)
        assert done.returncode == 0, done.stdout + done.stderr

    def files(self) -> list[str]:
        """Return all files that are there, but for installers' own, and what uv has fetched."""
        found = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))
        return [
            each
            for each in found
            if (self.folder / each).is_symlink() or (self.folder / each).is_file()
            if each != LOCK
            if not each.startswith(OF_INSTALLERS)
            or ("forkd" in each and not each.startswith(FETCHED))
        ]


@pytest.fixture(params=list(WORDS))
def home(request: pytest.FixtureRequest, programs: Path) -> Iterator[Home]:
    with tempfile.TemporaryDirectory(prefix="fk-in-", dir="/tmp") as folder:
        made = Home(Path(folder), programs / request.param)
        yield made


def test_a_host_is_installed_serves_and_is_uninstalled(home: Home, wheel: Path) -> None:
    home.install(f"{wheel}[daemon]")

    assert sorted(path.name for path in home.bin.iterdir()) == ["forkd", "forkd-daemon"]
    assert home.run(home.bin / "forkd", "--version").stdout == f"forkd {VERSION}\n"
    said = home.run(home.bin / "forkd", "doctor", "--json")
    checks = {each["name"]: each["status"] for each in json.loads(said.stdout)}
    assert checks["programs"] == "PASS"
    log = home.folder / "log"
    command = [str(home.bin / "forkd-daemon"), "serve", "--log", str(log)]
    with subprocess.Popen(  # noqa: S603 - our own
        command, cwd=home.folder, env=home.environment, stdout=subprocess.PIPE
    ) as daemon:
        try:
            assert daemon.stdout is not None
            event = json.loads(daemon.stdout.readline() or "{}")
            assert event.get("event") == "listening", log.read_text()
            listed = home.run(home.bin / "forkd", "recipe", "ls", "--json")
        finally:
            daemon.terminate()
            daemon.wait(END_TIMEOUT_S)
    assert listed.returncode == 0, listed.stderr
    ours = {path.parent.name for path in (ROOT / "recipes").glob("*/recipe.toml")}
    assert {each["name"] for each in json.loads(listed.stdout)} == ours
    for name in ("run", "state", "cache"):
        subprocess.run(["rm", "-rf", home.folder / name], check=True)  # noqa: S603, S607 - a test's
    log.unlink()

    home.uninstall()

    assert home.files() == []


def test_a_client_is_installed_says_what_a_host_needs_and_is_uninstalled(
    home: Home, wheel: Path
) -> None:
    home.install(str(wheel))

    for program, words in (("forkd", ["up"]), ("forkd-daemon", ["serve"])):
        refused = home.run(home.bin / program, *words)
        assert refused.returncode == 1
        name = home.installer.name
        assert f"`{' '.join((name, *WORDS[name]))} install --force 'forkd-vm[" in refused.stderr
        assert "Traceback" not in refused.stderr
    assert home.run(home.bin / "forkd", "ls").returncode == 7

    home.uninstall()

    assert home.files() == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "platforms",
    [("manylinux_2_17_x86_64",), ("musllinux_1_1_x86_64", "musllinux_1_2_x86_64")],
    ids=["glibc-2.17", "musl-1.2"],
)
def test_with_the_oldest_c_library_a_host_needs_no_compiler(
    wheel: Path, tmp_path: Path, platforms: tuple[str, ...], version: str
) -> None:
    """All that is installed is a wheel for it, as docs/install.md says."""
    words = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
    words += ["--only-binary", ":all:", "--python-version", version, "--target", str(tmp_path)]
    words += [f"--platform={each}" for each in platforms]
    done = subprocess.run(  # noqa: S603 - pip's
        [*words, f"{wheel}[daemon]"], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )

    assert done.returncode == 0, done.stderr
