"""The Python SDK: one daemon, seen from a program.

`AsyncClient` is written by hand, `Client` is made from it (docs/adr/0009); both talk HTTP over a
Unix socket or TCP and nothing else.  Every error is one of `forkd.errors`, of the same class and
with the same code as in the daemon.
"""

from forkd.sdk._async.client import AsyncClient
from forkd.sdk._async.files import AsyncFiles
from forkd.sdk._async.process import AsyncProcess
from forkd.sdk._async.sandbox import AsyncSandbox
from forkd.sdk._endpoint import Endpoint, discover
from forkd.sdk._results import Branch, EvalError, EvalResult, Output
from forkd.sdk._sync.client import Client
from forkd.sdk._sync.files import Files
from forkd.sdk._sync.process import Process
from forkd.sdk._sync.sandbox import Sandbox

__all__ = [
    "AsyncClient",
    "AsyncFiles",
    "AsyncProcess",
    "AsyncSandbox",
    "Branch",
    "Client",
    "Endpoint",
    "EvalError",
    "EvalResult",
    "Files",
    "Output",
    "Process",
    "Sandbox",
    "discover",
]
