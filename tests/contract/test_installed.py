"""What forkd is called where packages come from, what extras bring, what it cannot be beside."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import forkd
from forkd import installed
from tests.support.docs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

BASE = {"httpx", "pydantic", "rich", "typer", "websockets"}

REFERENCE = "forkd-0.5.3.dist-info"

ALSO_IN_BASE = {"h11"}
"""What an extra names and a client has, too: httpx needs it."""


def named(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=]", each)[0] for each in requirements}


def test_name_and_version_are_said_once_more_and_are_the_same() -> None:
    assert PROJECT["name"] == installed.DISTRIBUTION
    assert PROJECT["version"] == installed.VERSION == forkd.__version__


def test_a_client_needs_five_packages() -> None:
    assert named(PROJECT["dependencies"]) == BASE


@pytest.mark.parametrize("extra", installed.EXTRAS)
def test_the_modules_of_an_extra_are_those_of_its_packages(extra: str) -> None:
    brought = named(PROJECT["optional-dependencies"][extra]) - {installed.DISTRIBUTION}
    by_module = packages_distributions()

    found = {each for module in installed.EXTRAS[extra] for each in by_module[module]}
    assert {each.replace("_", "-") for each in found} == (brought - ALSO_IN_BASE)


def copied(folder: Path) -> Path:
    """Copy the package to a folder, as an installer does."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(forkd.__file__).parent, folder / "forkd", ignore=ignored)
    return folder


def run(folder: Path, *words: str, hidden: tuple[str, ...] = ()) -> tuple[int, str]:
    """Run Python with the package of a folder, and without some modules; return what it says."""
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); "
        f"sys.modules.update(dict.fromkeys({hidden!r})); "
        f"sys.argv = {['forkd', *words[1:]]!r}; {words[0]}"
    )
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stderr


def test_beside_the_references_package_the_import_says_what_to_do(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    assert run(folder, "import forkd") == (0, "")
    (folder / REFERENCE).mkdir()

    status, said = run(folder, "import forkd")

    assert status == 1
    assert said.splitlines()[-1] == (
        f"ImportError: two programs are installed as the package `forkd` in {folder}: forkd-vm, "
        "and forkd-0.5.3, which is another one. They overwrite each other's files. Run "
        "`pip uninstall forkd forkd-vm`, then install the one that you want"
    )


@pytest.mark.parametrize(("program", "name"), [("cli", "forkd"), ("daemon", "forkd-daemon")])
def test_programs_say_so_where_ours_has_replaced_the_reference(
    program: str, name: str, tmp_path: Path
) -> None:
    folder = copied(tmp_path / "packages")
    (folder / REFERENCE).mkdir()
    started = tmp_path / name
    started.write_text(
        f"import sys\nsys.path[0] = {str(folder)!r}\n"
        f"from forkd.{program}.__main__ import main\nmain()\n"
    )

    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, started, "--help"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip

    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: two programs are installed as the package `forkd` in ")


@pytest.mark.parametrize("program", ["cli", "daemon"])
def test_programs_say_so_where_the_reference_has_replaced_our_package(
    program: str, tmp_path: Path
) -> None:
    folder = copied(tmp_path)
    (folder / REFERENCE).mkdir()
    (folder / "forkd" / "__init__.py").write_text("class Controller: pass\n")

    status, said = run(folder, f"from forkd.{program}.__main__ import main; main()", "--help")

    assert (status, said.count("\n")) == (1, 1)
    assert said.startswith("error: two programs are installed as the package `forkd` in ")


@pytest.mark.parametrize(
    "name", ["forkd_vm-0.1.0.dist-info", "forkd_mcp-0.2.1.dist-info", "forkd-vm-0.1.0.dist-info"]
)
def test_other_names_are_no_reason(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    installed.check_alone(str(tmp_path))


@pytest.mark.parametrize(
    ("module", "extra"),
    [("fastapi.routing", "daemon"), ("blake3", "packs"), ("zstandard", "packs")],
)
def test_a_missing_module_is_named_with_its_extra(module: str, extra: str) -> None:
    said = installed.advice(module)
    assert said is not None
    assert said.startswith(f"the Python package {module.partition('.')[0]} is not installed: ")
    assert f"`pip install 'forkd-vm[{extra}]'`" in said


@pytest.mark.parametrize("module", [None, "forkd.cli.missing", "numpy"])
def test_of_any_other_module_nothing_is_said(module: str | None) -> None:
    assert installed.advice(module) is None


@pytest.mark.parametrize(
    ("line", "module"),
    [("daemon doctor", "fastapi"), ("cli key show", "cryptography"), ("cli up", "uvicorn")],
)
def test_a_program_whose_extra_is_missing_says_which(
    line: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FORKD_HOME", str(tmp_path))
    program, *words = line.split()
    code = f"from forkd.{program}.__main__ import main; main()"

    status, said = run(ROOT / "src", code, *words, hidden=(module,))

    assert status == 1
    assert said.startswith(f"error: the Python package {module} is not installed: `pip install ")
    assert "Traceback" not in said


def test_where_python_lacks_unixs_modules_all_commands_load_but_those_of_this_host() -> None:
    code = """
import importlib, sys
from forkd.cli.commands import LISTED
import forkd
[getattr(forkd, name) for name in forkd.__all__]
for file in sorted({each.file for each in LISTED.values()}):
    try:
        importlib.import_module("forkd.cli." + file)
    except ModuleNotFoundError as error:
        print(file, error.name, file=sys.stderr)
"""
    status, said = run(ROOT / "src", f"exec({code!r})", hidden=installed.UNIX_MODULES)

    assert (status, said.splitlines()) == (0, ["host fcntl", "quickstart fcntl"])


def test_a_command_that_needs_unix_says_so_in_a_line() -> None:
    code = "from forkd.cli.__main__ import main; main()"

    status, said = run(ROOT / "src", code, "up", hidden=installed.UNIX_MODULES)

    assert (status, said.count("\n")) == (1, 2)
    assert said.startswith("error: this command needs Python's module fcntl, which ")
    assert "FORKD_URL" in said
