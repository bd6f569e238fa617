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


def test_the_public_names_are_these() -> None:
    assert forkd.__all__ == PUBLIC
    assert dir(forkd) == PUBLIC


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

CLIENT = {
    "_distutils_hack", "annotated_types", "certifi", "forkd", "httpcore", "httpx", "h11", "idna",
    "anyio", "sniffio", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection",
    "websockets",
}  # fmt: skip
"""What the SDK needs, with what that needs itself."""

TERMINAL = {"click", "pygments", "rich", "zstandard"}
"""What httpx loads for a command and a decoder of its own, if it is there."""


@pytest.mark.parametrize("module", ["forkd.sdk", "forkd.cli.main"])
def test_clients_load_no_host_code(module: str) -> None:
    """What the import contracts forbid by name, seen in a fresh interpreter."""
    assert loaded_by(f"import {module}") & {f"forkd.{each}" for each in HOST} == set()


@pytest.mark.parametrize(
    "statement", ["import forkd", "import forkd.sdk", "import forkd; forkd.Sandbox; forkd.types"]
)
def test_the_sdk_loads_what_it_needs_and_nothing_of_the_daemon_or_the_command(
    statement: str,
) -> None:
    loaded = {each.partition(".")[0] for each in loaded_by(statement)}
    foreign = {each for each in loaded - sys.stdlib_module_names if not each.startswith("__")}

    assert {each for each in foreign if not each.startswith("_sysconfig")} <= CLIENT | TERMINAL


def test_the_package_alone_loads_nothing_else() -> None:
    assert "httpx" not in loaded_by("import forkd; dir(forkd); forkd.__version__")


def test_the_package_is_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "forkd", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert forkd.__version__ in done.stdout


def test_the_daemon_loads_no_client_and_no_netlink_before_it_is_needed() -> None:
    assert loaded_by("import forkd.daemon.main") & {"httpx", "forkd.sdk", "pyroute2"} == set()
