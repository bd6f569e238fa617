"""Check what we depend on: licences and sources of crates, known vulnerabilities, workflows.

    python -m tools.audit              what `make audit` runs
    python -m tools.audit --offline    without what needs the network

Licences, bans and sources of crates are read from this checkout.  Vulnerabilities are in two
databases that have to be fetched, and one that cannot be fetched is neither clean nor a finding:
the exit status is 3 then, and 1 if something was found.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "build" / "audit-tools"
LOCKS = (ROOT / "requirements.lock", ROOT / "tests/requirements.lock")

FOUND = 1
UNREACHABLE = 3
"""Exit statuses."""

NO_ADVISORIES = "failed to fetch advisory database"
"""What cargo-deny says if it cannot fetch the database of crates' vulnerabilities."""


ACTIONLINT = "github.com/rhysd/actionlint/cmd/actionlint@v1.7.12"
"""What checks workflows, and its version; Go compares it with its own database of sums."""


class State(Enum):
    """How a check ended."""

    CLEAN = "ok"
    FOUND = "FOUND"
    UNREACHABLE = "NOT CHECKED"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check says.

    Attributes:
        state: How it ended.
        said: What was found, or why nothing could be looked for.
    """

    state: State
    said: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """Something to look at.

    Attributes:
        name: As the report shows it.
        run: Looks at it.
        online: Whether that needs the network.
    """

    name: str
    run: Callable[[], Outcome]
    online: bool = False


def main() -> int:
    """Run each check and report; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="make audit", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--offline", action="store_true", help="leave out what needs the network")
    offline = parser.parse_args().offline
    outcomes = []
    for check in CHECKS:
        if offline and check.online:
            continue
        outcomes.append(outcome := check.run())
        sys.stdout.write(f"audit: {check.name}: {outcome.state.value}\n")
        sys.stdout.writelines(f"    {line}\n" for line in outcome.said.splitlines())
        sys.stdout.flush()
    return status(outcomes)


def status(outcomes: Iterable[Outcome]) -> int:
    """Return the exit status for what checks said."""
    states = {each.state for each in outcomes}
    if State.FOUND in states:
        return FOUND
    return UNREACHABLE if State.UNREACHABLE in states else 0


def crates() -> Outcome:
    """Check licences, versions and sources of crates, as `deny.toml` says."""
    return of_crates(_cargo_deny("--offline", "check", "licenses", "bans", "sources"))


def advisories() -> Outcome:
    """Look for vulnerabilities of crates."""
    return of_crates(_cargo_deny("check", "advisories"))


def of_crates(done: subprocess.CompletedProcess[str]) -> Outcome:
    """Return what a run of cargo-deny means."""
    said = done.stdout + done.stderr
    if done.returncode == 0:
        return Outcome(State.CLEAN)
    if NO_ADVISORIES in said:
        return Outcome(State.UNREACHABLE, f"the database of advisories cannot be fetched:\n{said}")
    return Outcome(State.FOUND, said)


def packages() -> Outcome:
    """Look for vulnerabilities of Python packages."""
    locks = [word for lock in LOCKS for word in ("--requirement", str(lock))]
    words = [*locks, "--require-hashes", "--disable-pip"]
    words += ["--format", "json", "--progress-spinner", "off"]
    return of_packages(
        _run([sys.executable, "-m", "pip_audit", *words], {"PYTHONPATH": str(TOOLS)})
    )


def of_packages(done: subprocess.CompletedProcess[str]) -> Outcome:
    """Return what a run of pip-audit means.

    It counts a package that its database does not have as no finding, and so does a database that
    answers nothing at all.
    """
    try:
        listed = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return Outcome(State.UNREACHABLE, f"the database cannot be asked:\n{_last(done.stderr)}")
    found = [each for each in listed if each.get("vulns")]
    if found:
        return Outcome(State.FOUND, "\n".join(map(_vulnerable, found)))
    unknown = [each["name"] for each in listed if "skip_reason" in each]
    if unknown:
        few = ", ".join(unknown[:3]) + (", …" if unknown[3:] else "")
        said = f"the database does not know {len(unknown)} of {len(listed)} packages: {few}"
        return Outcome(State.UNREACHABLE, said)
    return Outcome(State.CLEAN)


def workflows() -> Outcome:
    """Check workflows with actionlint, which Go builds where it is not installed."""
    path = f"{TOOLS / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    if shutil.which("actionlint", path=path) is None:
        if shutil.which("go") is None:
            return Outcome(
                State.UNREACHABLE, "neither actionlint nor Go, which builds it, is installed"
            )
        built = _run(["go", "install", ACTIONLINT], {"GOBIN": str(TOOLS / "bin")})
        if built.returncode != 0:
            return Outcome(State.UNREACHABLE, f"actionlint cannot be built: {_last(built.stderr)}")
    done = _run(["actionlint", "-no-color"], {"PATH": path})
    return (
        Outcome(State.FOUND, done.stdout + done.stderr) if done.returncode else Outcome(State.CLEAN)
    )


def _vulnerable(package: dict[str, object]) -> str:
    listed = package["vulns"]
    known = listed if isinstance(listed, list) else []
    ids = ", ".join(f"{each['id']} (mended in {_mended(each)})" for each in known)
    return f"{package['name']} {package['version']}: {ids}"


def _mended(vulnerability: dict[str, list[str]]) -> str:
    return ", ".join(vulnerability["fix_versions"]) or "no version"


def _last(text: str) -> str:
    """Return the last line of a text that has one."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no answer")


def _cargo_deny(*words: str) -> subprocess.CompletedProcess[str]:
    paths = {"PATH": f"{TOOLS / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    return _run(["cargo", "deny", "--locked", "--color", "never", *words], paths)


def _run(words: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - of the lock files
        words,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


CHECKS = (
    Check("licences, versions and sources of crates", crates),
    Check("vulnerabilities of crates", advisories, online=True),
    Check("vulnerabilities of Python packages", packages, online=True),
    Check("workflows", workflows, online=True),
)


if __name__ == "__main__":
    sys.exit(main())
