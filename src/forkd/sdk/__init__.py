"""The Python SDK: one daemon, seen from a program.

`AsyncClient` is written by hand, `Client` is made from it (docs/adr/0009); both talk HTTP over a
Unix socket or TCP and nothing else.  Every error is one of `forkd.errors`, of the same class and
with the same code as in the daemon.  `forkd` has the names that most programs need, `forkd.types`
those of what methods return.
"""

from forkd.sdk._async.client import AsyncClient
from forkd.sdk._async.files import AsyncFiles
from forkd.sdk._async.ports import AsyncPort
from forkd.sdk._async.process import AsyncProcess
from forkd.sdk._async.sandbox import AsyncSandbox, AsyncSandboxes
from forkd.sdk._endpoint import Endpoint, discover
from forkd.sdk._forwarding import AsyncForward, Forward
from forkd.sdk._image import Image
from forkd.sdk._results import Branch, EvalError, EvalResult, ExecResult, Output
from forkd.sdk._sync.client import Client
from forkd.sdk._sync.files import Files
from forkd.sdk._sync.ports import Port
from forkd.sdk._sync.process import Process
from forkd.sdk._sync.sandbox import Sandbox, Sandboxes

__all__ = [
    "AsyncClient",
    "AsyncFiles",
    "AsyncForward",
    "AsyncPort",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncSandboxes",
    "Branch",
    "Client",
    "Endpoint",
    "EvalError",
    "EvalResult",
    "ExecResult",
    "Files",
    "Forward",
    "Image",
    "Output",
    "Port",
    "Process",
    "Sandbox",
    "Sandboxes",
    "discover",
]
