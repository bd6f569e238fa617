"""`forkd-daemon`, also as `python -m forkd.daemon`."""

from __future__ import annotations

import sys

from forkd import installed
from forkd.loading import without_collecting


def main() -> None:
    """Load the program and run it."""
    try:
        installed.check_alone()  # again: another program may have replaced `forkd/__init__.py`
    except ImportError as error:
        sys.exit(f"error: {error}")
    try:
        with without_collecting():
            from forkd.daemon.main import main as run  # noqa: PLC0415 - what loading is about
    except ImportError as error:
        said = installed.advice(error.name)
        if said is None:
            raise
        sys.exit(f"error: {said}")
    run()


if __name__ == "__main__":
    main()
