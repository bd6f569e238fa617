"""The names of the reference's Python package, with its results and its errors.

`forkd.sdk.compat` documents them; docs/howto/move-from-forkd.md says when you need them.
"""

from forkd.sdk.compat import (
    BranchMode,
    CommandResult,
    Commands,
    Controller,
    ControllerError,
    Sandbox,
)

__all__ = [
    "BranchMode",
    "CommandResult",
    "Commands",
    "Controller",
    "ControllerError",
    "Sandbox",
]
