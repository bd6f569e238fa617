"""Build the npm package of the TypeScript SDK into build/npm.

python -m tools.typescript_package
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.node import PROGRAMS, ROOT, TYPESCRIPT, environment, npm

if TYPE_CHECKING:
    from pathlib import Path

BUILT = ROOT / "build/npm"

SHIPPED = ("LICENSE", "README.md", "package.json", "tsconfig.json", "tsconfig.build.json")
"""What the package is made of, beside its sources."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package that was packed.

    Attributes:
        archive: The file that `npm install` takes.
        files: The paths in it.
    """

    archive: Path
    files: tuple[str, ...]


def build(folder: Path) -> Package:
    """Compile the SDK in a folder, which must not exist, and pack it there."""
    work = folder / "package"
    shutil.copytree(TYPESCRIPT / "src", work / "src")
    for name in SHIPPED:
        shutil.copy2(TYPESCRIPT / name, work / name)
    (work / "node_modules").symlink_to(TYPESCRIPT / "node_modules")
    _run([str(PROGRAMS / "tsc"), "-p", "tsconfig.build.json"], work)
    words = [*npm(), "pack", "--json", "--ignore-scripts", "--pack-destination", str(folder)]
    (packed,) = json.loads(_run(words, work))
    return Package(folder / packed["filename"], tuple(each["path"] for each in packed["files"]))


def _run(words: list[str], folder: Path) -> str:
    done = subprocess.run(  # noqa: S603 - ours
        words, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{words[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    """Build it; return the exit status."""
    shutil.rmtree(BUILT, ignore_errors=True)
    sys.stdout.write(f"{build(BUILT).archive}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
