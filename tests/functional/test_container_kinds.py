"""What a daemon says in each kind of container without privileges, of an image made here."""

from __future__ import annotations

import asyncio
import os
import re
from typing import TYPE_CHECKING

import pytest

from tests.support import container_image, wheels
from tests.support.container_kinds import KINDS
from tests.support.containers import container

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.support.container_image import ContainerImage
    from tests.support.container_kinds import Kind
    from tests.support.containers import Container

pytestmark = [
    pytest.mark.needs("root", "runc", "binaries", "mmdebstrap", "network"),
    pytest.mark.soak(only=True),
    pytest.mark.timeout(1200),
]

START_TIMEOUT_S = 120.0

LOOK_S = 0.2
"""How often a log is looked at, for which there is no event."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> ContainerImage:
    """The image of this checkout's wheel."""
    return container_image.made(wheels.built("platform", tmp_path_factory.mktemp("wheel")))


def daemon_in(kind: Kind, image: ContainerImage, state: Path) -> AbstractContextManager[Container]:
    """Start a daemon in a container of a kind, with its state in a folder of this host."""
    os.chown(state, kind.confinement.user, kind.confinement.user)
    volumes = {"/var/lib/forkd": state}
    return container(image, kind.confinement, environment=kind.environment, volumes=volumes)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.jail])
async def test_a_daemon_serves_and_the_doctor_says_which_jail_there_is(
    name: str, image: ContainerImage, tmp_path: Path
) -> None:
    kind = KINDS[name]
    with daemon_in(kind, image, tmp_path) as made:
        await listening(made)
        made.check(*image.config.healthcheck["test"][1:])
        said = made.run("forkd-daemon", "doctor").stdout
    (jail,) = re.findall("^WARN  jail: (.*)$", said, re.MULTILINE)
    assert jail.startswith(kind.says)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.jail])
async def test_a_daemon_that_cannot_run_says_what_is_missing(
    name: str, image: ContainerImage, tmp_path: Path
) -> None:
    kind = KINDS[name]
    with daemon_in(kind, image, tmp_path) as made:
        await ended(made)
        assert kind.says in made.log.read_text()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.jail])
def test_the_doctor_names_the_profile_that_keeps_a_daemon_from_running(
    name: str, image: ContainerImage
) -> None:
    kind = KINDS[name]
    with container(
        image, kind.confinement, environment=kind.environment, program=["sleep", "inf"]
    ) as made:
        said = made.run("forkd-daemon", "doctor").stdout
    assert "clone3: hidden, as by Docker's default profile" in said
    assert re.search("(FAIL|WARN)  jail: .*Operation not permitted", said), said


async def listening(made: Container) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while '"listening"' not in made.log.read_text():
            assert made.is_running(), made.log.read_text()
            await asyncio.sleep(LOOK_S)


async def ended(made: Container) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while made.is_running():
            assert '"listening"' not in made.log.read_text()
            await asyncio.sleep(LOOK_S)
