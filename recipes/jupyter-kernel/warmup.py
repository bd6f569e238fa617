"""Start a kernel, execute a cell in it, and offer `cell` to those who evaluate.

The kernel is a process of its own, as a notebook server starts it.  Its client is here, over Unix
sockets: their connections go on in every child, each with the kernel of that child.
"""

import queue
import time

from jupyter_client import KernelManager

START_TIMEOUT_S = 300

_manager = KernelManager(transport="ipc", ip="/run/kernel")
_manager.start_kernel()
_client = _manager.blocking_client()
_client.start_channels()
_client.wait_for_ready(timeout=START_TIMEOUT_S)


def cell(code, timeout_s=60.0):
    """Execute a cell; return its outputs, each as a message's content with its `type`.

    A cell that runs out of time is interrupted, and raises `TimeoutError` here.
    """
    asked, outputs = _client.execute(code, stop_on_error=False), []
    end = time.monotonic() + timeout_s
    while True:
        try:
            message = _client.get_iopub_msg(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            _manager.interrupt_kernel()
            raise TimeoutError(f"the cell ran for more than {timeout_s} seconds") from None
        if message["parent_header"].get("msg_id") != asked:
            continue
        content, kind = message["content"], message["msg_type"]
        if kind == "status" and content["execution_state"] == "idle":
            return outputs
        if kind in {"stream", "execute_result", "display_data", "error"}:
            outputs.append({"type": kind, **content})


cell("import numpy as np\nnp.arange(3).sum()")
cell("print('warm')\n1 / 0")
