"""Start a program of forkd, or say in one line why it cannot start."""

from __future__ import annotations

import sys
from importlib import import_module

from forkd import installed
from forkd.loading import without_collecting


def run(module: str) -> None:
    """Load the module of a program, and call its `main`.

    Ends the process with status 1, and says what to install, if another program has replaced the
    package, or if the extra of this one is missing.
    """
    try:
        installed.check_alone()  # again: another program may have replaced `forkd/__init__.py`
    except ImportError as error:
        sys.exit(f"error: {error}")
    try:
        with without_collecting():
            main = import_module(module).main
    except ImportError as error:
        said = installed.advice(error.name)
        if said is None:
            raise
        sys.exit(f"error: {said}")
    main()
