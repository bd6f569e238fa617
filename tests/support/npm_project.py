"""An empty project into which the built package of the TypeScript SDK was installed."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.programs import said_by
from tools import typescript_package
from tools.node import PROGRAMS, TYPESCRIPT, environment, npm

if TYPE_CHECKING:
    from pathlib import Path

    from tools.typescript_package import Package

INSTALL_TIMEOUT_S = 120
RUN_TIMEOUT_S = 120.0

PARITY = TYPESCRIPT / "tests/parity"
"""What does in TypeScript what a test does in Python, to be compared."""

COMPILER_OPTIONS = {
    "strict": True,
    "noEmit": True,
    "target": "ES2022",
    "module": "NodeNext",
    "lib": ["ES2023", "ESNext.Disposable"],
    "types": ["node"],
    "typeRoots": [str(TYPESCRIPT / "node_modules/@types")],
}


def colourless(**variables: str) -> dict[str, str]:
    """Return an environment with Node.js, in which programs print plain text."""
    return {**environment(), "NO_COLOR": "1", **variables}


class NpmProject:
    """The project.

    Attributes:
        folder: Where it is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def run(self, *words: str, **variables: str) -> str:
        """Run a program there; return what it says.

        Raises:
            AssertionError: It failed.
            TimeoutError: It was not done within `RUN_TIMEOUT_S`.
        """
        environ = colourless(**variables)
        return await said_by(*words, timeout_s=RUN_TIMEOUT_S, cwd=self.folder, env=environ)

    async def check_types(self, *names: str) -> None:
        """Have the strict compiler of TypeScript read programs of the project.

        Raises:
            AssertionError: It finds something wrong.
        """
        options = {"compilerOptions": COMPILER_OPTIONS, "files": names}
        (self.folder / "tsconfig.json").write_text(json.dumps(options))
        await self.run(str(PROGRAMS / "tsc"), "-p", ".")


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The package, built and packed once."""
    return typescript_package.build(tmp_path_factory.mktemp("npm") / "built")


@pytest.fixture(scope="module")
def npm_project(tmp_path_factory: pytest.TempPathFactory, package: Package) -> NpmProject:
    """A project with the package, installed by npm without a network."""
    folder = tmp_path_factory.mktemp("npm")
    project = folder / "project"
    project.mkdir()
    (project / "package.json").write_text('{"private": true, "type": "module"}')

    def run(*words: str) -> None:
        subprocess.run(  # noqa: S603 - npm
            [*npm(), *words],
            cwd=project, env=environment(), check=True, timeout=INSTALL_TIMEOUT_S,
        )  # fmt: skip

    ws = str(TYPESCRIPT / "node_modules/ws")
    run("pack", "--silent", "--pack-destination", str(folder), ws)
    archives = [*folder.glob("ws-*.tgz"), package.archive]  # npm's cache may have no `ws`
    run("install", "--silent", "--offline", "--no-audit", *map(str, archives))
    return NpmProject(project)


def answer(package: Package, script: str, given: object, *args: str) -> Any:  # noqa: ANN401 - JSON
    """Run a script of the SDK's `tests/parity` with the package; return what it answers.

    Args:
        package: Where the script finds the SDK.
        script: Its name.
        given: What it reads, as JSON.
        args: Its arguments behind the package's folder.
    """
    done = subprocess.run(  # noqa: S603 - ours
        ["node", str(PARITY / script), str(package.archive.parent / "package"), *args],  # noqa: S607 - of the environment
        input=json.dumps(given),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
