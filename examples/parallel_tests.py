"""Run the test files of a folder in parallel, each in its own sandbox.

python examples/parallel_tests.py FOLDER [COMMAND]
"""

from __future__ import annotations

import sys
from pathlib import Path

from forkd import Client, CommandError, Sandbox

COMMAND = "python3 -m pytest -q"


def run_file(sandbox: Sandbox, path: Path, command: str) -> str:
    """Copy one test file into a sandbox and run it; return its output."""
    sandbox.files.write(f"/tmp/{path.name}", path.read_bytes())
    return sandbox.run(f"{command} /tmp/{path.name}", timeout_s=600, check=True).stdout


def main(folder: Path, command: str = COMMAND) -> dict[str, bool]:
    """Return which test files passed."""
    paths = sorted(folder.glob("test_*.py"))
    passed: dict[str, bool] = {}
    with Client() as client, client.fork("numpy", len(paths)) as sandboxes:
        names = {sandbox.id: path for sandbox, path in zip(sandboxes, paths, strict=True)}

        def one(sandbox: Sandbox) -> None:
            path = names[sandbox.id]
            try:
                run_file(sandbox, path, command)
                passed[path.name] = True
            except CommandError as error:
                print(path.name, "failed:", error)
                passed[path.name] = False

        sandboxes.map(one, parallel_max=8)
    return dict(sorted(passed.items()))


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), *sys.argv[2:3]))
