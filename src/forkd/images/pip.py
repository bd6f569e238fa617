"""Install Python packages into a root file system, without running anything in it.

Our own pip downloads wheels for the image's version of Python and unpacks them; packages
that have no wheel are refused, since building one would run code from elsewhere.  Of the programs
that a package brings (its `bin/`), those in machine code go to `/usr/local/bin`; scripts are left
out, because they would name our interpreter.

Where our Python is of the image's version, the packages arrive compiled, so that no child
compiles them again.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from forkd.errors import BuildError
from forkd.host import files, folders, process
from forkd.images.rootfs import install, install_tree, resolve, walk_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkd.images.steps import Build

PIP_TIMEOUT_S = 1_800.0
COMPILE_TIMEOUT_S = 900.0
PYTHON_LINKS_MAX = 8
"""Most links from `python3` to the interpreter."""

_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (36, 34, 31, 28, 27, 24, 17, 12, 5)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"),
)
"""What runs on the C library of Debian 12, and on what is newer."""

PROGRAMS = PurePosixPath("/usr/local/bin")
"""Where programs of packages go."""

_ELF = b"\x7fELF"

SETTINGS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "PIP_NO_INDEX")
"""What pip is told of this host's package indexes."""

_INTERPRETERS = (
    ("/usr/local/bin/python3", "site-packages"),
    ("/usr/bin/python3", "dist-packages"),
)


def install_requirements(
    requirements: Sequence[str], root: Path, scratch: Path, build: Build
) -> None:
    """Install `requirements`, and what they need, into the root file system `root`.

    Raises:
        BuildError: The image has no Python, or a requirement has no wheel for it.
    """
    version, target = image_python(root)
    build.tell("pip", f"{len(requirements)} requirements for Python {version}", 0.0)
    staging = scratch / "pip"
    args: list[str | Path] = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-compile"),
        *("--disable-pip-version-check", "--only-binary=:all:", "--implementation=cp"),
        *(f"--python-version={version}", f"--abi=cp{version.replace('.', '')}"),
        *("--abi=abi3", "--abi=none", "--target", staging),
        *(f"--platform={platform}" for platform in _PLATFORMS),
        *("--", *requirements),
    ]
    environment = process.plain_environment(*SETTINGS)
    build.run(args, timeout_s=PIP_TIMEOUT_S, env=environment)
    _install_programs(staging / "bin", root)
    files.remove_tree(staging / "bin")
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        _compile(staging, target, build)
    install_tree(root, target, staging)
    build.tell("pip", "requirements installed", 1.0)


def _install_programs(folder: Path, root: Path) -> None:
    """Install the programs in a folder that are machine code, such as those of ruff and uv."""
    for path, name in walk_files(folder):
        start = files.read_start(path, len(_ELF))
        if start is not None and start[0] == _ELF:
            install(root, PROGRAMS / name, path, 0o755)


def image_python(root: Path) -> tuple[str, PurePosixPath]:
    """Return the version of a root file system's `python3`, and where its packages go.

    Raises:
        BuildError: It has none.
    """
    for name, packages in _INTERPRETERS:
        if (version := _version(root, PurePosixPath(name))) is not None:
            return version, PurePosixPath(f"/usr/local/lib/python{version}/{packages}")
    raise BuildError("pip requirements need an image with python3 in it")


def _version(root: Path, path: PurePosixPath) -> str | None:
    """Read the version off the name that the links from `path` lead to."""
    for _ in range(PYTHON_LINKS_MAX):
        if (match := re.fullmatch(r"python(3\.\d+)", path.name)) is not None:
            return match[1]
        here = resolve(root, path)
        if (link := folders.link_target(here)) is None:
            return None
        path = path.parent / link
    return None


def _compile(staging: Path, target: PurePosixPath, build: Build) -> None:
    """Compile what was installed; caches that are never checked survive any copying."""
    args: list[str | Path] = [
        *(sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"),
        *("-s", staging, "-p", str(target), staging),
    ]
    try:
        build.run(args, timeout_s=COMPILE_TIMEOUT_S)
    except BuildError as error:
        if error.context.get("status") != 1:  # 1: a file that is no Python of this version
            raise
