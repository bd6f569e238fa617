"""What a daemon says in each kind of container without cgroups, of an image made here."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.container_kinds import KINDS, LIMITED, NEEDED, NEITHER, REFUSED_BY_SECCOMP
from tests.support.containers import container, ended, listening

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.support.container_image import ContainerImage
    from tests.support.container_kinds import Kind
    from tests.support.containers import Confinement, Container

pytestmark = [
    pytest.mark.needs("root", "runc", "binaries", "mmdebstrap", "network"),
    pytest.mark.soak(only=True),
    pytest.mark.timeout(1200),
]


def daemon_in(kind: Kind, image: ContainerImage, state: Path) -> AbstractContextManager[Container]:
    """Start a daemon in a container of a kind, with its state in a folder of this host."""
    os.chown(state, kind.confinement.user, kind.confinement.user)
    volumes = {"/var/lib/forkd": state}
    return container(image, kind.confinement, environment=kind.environment, volumes=volumes)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.own == NEITHER])
async def test_a_daemon_serves_and_the_doctor_says_which_jail_there_is(
    name: str, container_image: ContainerImage, tmp_path: Path
) -> None:
    kind = KINDS[name]
    with daemon_in(kind, container_image, tmp_path) as made:
        await listening(made)
        made.check(*container_image.config.healthcheck["test"][1:])
        said = made.run("forkd-daemon", "doctor").stdout
    (jail,) = re.findall("^WARN  jail: (.*)$", said, re.MULTILINE)
    assert jail.startswith(kind.says)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.jail])
async def test_a_daemon_that_cannot_run_says_what_is_missing(
    name: str, container_image: ContainerImage, tmp_path: Path
) -> None:
    kind = KINDS[name]
    with daemon_in(kind, container_image, tmp_path) as made:
        await ended(made)
        assert kind.says in made.log.read_text()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.jail])
def test_the_doctor_names_the_profile_that_keeps_a_daemon_from_running(
    name: str, container_image: ContainerImage
) -> None:
    kind = KINDS[name]
    with container(
        container_image, kind.confinement, environment=kind.environment, program=["sleep", "inf"]
    ) as made:
        said = made.run("forkd-daemon", "doctor").stdout
    assert "clone3: hidden, as by Docker's default profile" in said
    assert re.search("(FAIL|WARN)  jail: .*Operation not permitted", said), said


@pytest.mark.parametrize(
    ("confinement", "says"),
    [
        *(
            pytest.param(
                replace(LIMITED, capabilities=LIMITED.capabilities - {missing}), says, id=missing
            )
            for missing, says in NEEDED.items()
        ),
        pytest.param(replace(LIMITED, seccomp=True), REFUSED_BY_SECCOMP, id="seccomp"),
    ],
)
async def test_a_root_daemon_without_something_that_it_needs_says_what_is_refused(
    confinement: Confinement, says: str, container_image: ContainerImage, tmp_path: Path
) -> None:
    with container(
        container_image,
        replace(confinement, writes_cgroups=False),
        environment={"FORKD_CGROUPS": "off"},  # so that a host without cgroup v2 can try
        volumes={"/var/lib/forkd": tmp_path},
    ) as made:
        await ended(made)
        assert says in made.log.read_text()
