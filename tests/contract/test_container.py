"""The container image installs what a host needs and nothing of the builder's host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from forkd.host import nftables
from forkd.host.rlimits import PRLIMIT
from forkd.service import packages
from forkd.service.doctor import BUILDERS, OCI_TOOLS
from tests.support.container_image import DOCKERFILE, RELEASES, config
from tests.support.container_kinds import (
    CONNECTED,
    FOR_NETWORKS,
    KINDS,
    LIMITED,
    NEEDED,
    NEEDED_LATER,
    REFUSED_BY_SECCOMP,
    REMOUNT,
    TUN,
    USER,
    options,
    row,
)
from tests.support.docs import ROOT

PAGE = ROOT / "docs/howto/run-in-a-container.md"

HADOLINT = Path(sys.executable).parent / "hadolint"


def linted(text: str) -> str:
    """Return what the linter says of a Dockerfile; nothing if it is well."""
    done = subprocess.run(  # noqa: S603 - of our environment
        [HADOLINT, "--no-color", "-"], input=text, capture_output=True, text=True, check=False,
        timeout=30,
    )  # fmt: skip
    assert (done.returncode == 0) is (done.stdout == ""), done
    return done.stdout


def test_the_linter_has_nothing_to_say_and_sees_what_is_wrong() -> None:
    text = DOCKERFILE.read_text()

    assert linted(text) == ""
    assert "DL3015" in linted(text.replace("--no-install-recommends ", ""))


@pytest.mark.parametrize("program", [*BUILDERS, *OCI_TOOLS, PRLIMIT, nftables.LIBRARY])
def test_what_the_doctor_asks_for_is_installed(program: str) -> None:
    wanted = packages.advice([program], "apt").removeprefix("apt install ").split()

    assert set(wanted) <= set(DOCKERFILE.read_text().split())


def test_the_wheel_is_all_that_the_builder_gives() -> None:
    text = DOCKERFILE.read_text()

    (copied,) = re.findall(r"^(?:COPY|ADD) (.*)$", text, re.MULTILINE)
    bases = re.findall(r"^FROM (.*)$", text, re.MULTILINE)
    assert copied.split()[0].endswith(".whl")
    assert set(bases) <= RELEASES.keys()


def test_the_daemon_is_the_program_and_a_user_for_those_without_root_is_there() -> None:
    found = config()

    assert found.program == ("forkd-daemon", "serve")
    assert found.user == "root"
    assert f"--uid {USER} " in DOCKERFILE.read_text()


@pytest.mark.parametrize("name", KINDS)
def test_the_page_says_of_each_kind_of_container_what_was_tried(name: str) -> None:
    assert row(KINDS[name]) in PAGE.read_text().splitlines()


def test_the_page_has_the_command_of_a_root_container_without_privileged() -> None:
    commands = PAGE.read_text().replace("\\\n", "").split("docker run ")
    (said,) = [each.partition("```")[0] for each in commands if "writable-cgroups" in each]

    options_said = re.findall(r"--(?:device|cap-drop|cap-add|security-opt) \S+", said)
    assert sorted(options_said) == sorted(options(CONNECTED))
    assert f"--entrypoint sh forkd:0.1.0 -c '{REMOUNT}'\n" in PAGE.read_text()


def test_the_page_says_what_a_container_without_networks_goes_without() -> None:
    more = set(options(CONNECTED)) - set(options(LIMITED))
    text = PAGE.read_text()

    assert more == {
        f"--device {TUN}",
        *(f"--cap-add {each}" for each in FOR_NETWORKS),
        "--security-opt systempaths=unconfined",
    }
    assert f"Leave out {', '.join(f'`{each}`' for each in sorted(more))}" in " ".join(text.split())


@pytest.mark.parametrize(("name", "says"), [*NEEDED.items(), *NEEDED_LATER.items()])
def test_the_page_says_what_fails_without_each_capability(name: str, says: str) -> None:
    assert f"| `{name}` | `{says} …` |" in PAGE.read_text()


def test_the_page_says_what_a_seccomp_profile_refuses() -> None:
    assert f"which the jail needs: `{REFUSED_BY_SECCOMP} …` |" in PAGE.read_text()
