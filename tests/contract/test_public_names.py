"""What users may import is a list, and it is this one."""

from __future__ import annotations

import subprocess
import sys

import pytest

import forkd

PUBLIC = [
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


def test_the_public_names_are_these() -> None:
    assert forkd.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(forkd, name) is not None


def test_any_other_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        forkd.nothing  # noqa: B018 - reading it is the point


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after `statement`."""
    code = f"{statement}; import sys; print(*sys.modules)"
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


HOST = {"daemon", "service", "engine", "store", "images", "host", "model", "cgroups", "network"}


@pytest.mark.parametrize("module", ["forkd.sdk", "forkd.cli.main"])
def test_clients_load_no_host_code(module: str) -> None:
    """What the import contracts forbid by name, seen in a fresh interpreter."""
    assert loaded_by(f"import {module}") & {f"forkd.{each}" for each in HOST} == set()


def test_the_daemon_loads_no_client_and_no_netlink_before_it_is_needed() -> None:
    assert loaded_by("import forkd.daemon.main") & {"httpx", "forkd.sdk", "pyroute2"} == set()
