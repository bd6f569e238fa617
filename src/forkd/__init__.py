"""fork(2) for virtual machines.

    from forkd import Sandbox

    with Sandbox("numpy") as sandbox:
        print(sandbox.run("ls | wc -l"))
        print(sandbox.eval("numpy.zeros(5).tolist()").value)
        with sandbox.branch(2) as (left, right):
            left.eval("x = 1")

The names below are public.  They are loaded when first used, so that the daemon, which shares
this package, never loads the client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from forkd.installed import VERSION, start_alone

if TYPE_CHECKING:
    from forkd import compat, errors, types
    from forkd.errors import CommandError, ExecTimeout, ForkdError
    from forkd.sdk import (
        AsyncClient,
        AsyncProcess,
        AsyncSandbox,
        AsyncSandboxes,
        Branch,
        Client,
        EvalError,
        EvalResult,
        ExecResult,
        Image,
        Output,
        Process,
        Sandbox,
        Sandboxes,
    )
    from forkd.sdk.compat import BranchMode, CommandResult, Controller, ControllerError

__version__ = VERSION

__all__ = [
    "AsyncClient",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncSandboxes",
    "Branch",
    "BranchMode",
    "Client",
    "CommandError",
    "CommandResult",
    "Controller",
    "ControllerError",
    "EvalError",
    "EvalResult",
    "ExecResult",
    "ExecTimeout",
    "ForkdError",
    "Image",
    "Output",
    "Process",
    "Sandbox",
    "Sandboxes",
    "__version__",
    "compat",
    "errors",
    "types",
]

start_alone()

_MODULES = {"compat", "errors", "types"}
_ERRORS = {"CommandError", "ExecTimeout", "ForkdError"}
_COMPAT = {"BranchMode", "CommandResult", "Controller", "ControllerError"}
"""Names of the reference's package that are none of ours."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        return import_module(f"forkd.{name}")
    home = "forkd.errors" if name in _ERRORS else "forkd.sdk"
    if name in _COMPAT:
        home = "forkd.sdk.compat"
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
