"""fork(2) for virtual machines.

    from forkd import Client

    with Client() as client:
        for sandbox in client.fork("python-numpy", 100):
            print(sandbox.eval("numpy.zeros(5).tolist()").value)

The names below are public.  They are loaded when first used, so that the daemon, which shares
this package, never loads the client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forkd.errors import ForkdError
    from forkd.sdk import (
        AsyncClient,
        AsyncProcess,
        AsyncSandbox,
        Branch,
        Client,
        EvalError,
        EvalResult,
        Output,
        Process,
    )
    from forkd.sdk.compat import (
        BranchMode,
        CommandResult,
        Controller,
        ControllerError,
        Sandbox,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncProcess",
    "AsyncSandbox",
    "Branch",
    "BranchMode",
    "Client",
    "CommandResult",
    "Controller",
    "ControllerError",
    "EvalError",
    "EvalResult",
    "ForkdError",
    "Output",
    "Process",
    "Sandbox",
    "__version__",
]


_COMPAT = {"BranchMode", "CommandResult", "Controller", "ControllerError", "Sandbox"}
"""Names that are those of the reference's package, too; a sandbox of a `Client` is another."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "forkd.errors" if name == "ForkdError" else "forkd.sdk"
    if name in _COMPAT:
        home = "forkd.sdk.compat"
    return getattr(import_module(home), name)
