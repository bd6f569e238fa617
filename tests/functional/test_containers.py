"""A container that asks Docker for nothing says what is missing, and serves once that is waived.

The container is runc's, over this host's own programs and the fake VMM.  What containers of the
image can do with real machines is in `test_container_machines`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd import programs
from forkd.sdk._dockerfile.settings import Config
from tests.support.container_image import ContainerImage, config
from tests.support.containers import Confinement, container
from tests.support.daemon_program import PROGRAMS, environment_of
from tests.support.service_host import make_host, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.containers import Container

pytestmark = [pytest.mark.needs("root", "runc", "binaries"), pytest.mark.timeout(120)]

VMM = str(programs.find(programs.VMM))

WAIVED = {"FORKD_CGROUPS": "off", "FORKD_JAIL": "off", "FORKD_NETWORK_SLOTS": "0"}


@pytest.fixture
def started() -> Iterator[Container]:
    """A container of `docker run`, whose first process does nothing."""
    with tempfile.TemporaryDirectory(prefix="ctr-host-", dir="/tmp") as name:
        folder = Path(name)
        host = make_host(folder, folder / "run")
        host.recipe()
        environment = environment_of(host) | {"PATH": f"{PROGRAMS}:/usr/bin:/bin"}
        del environment["FORKD_CGROUPS"], environment["TMPDIR"]
        here = {str(folder): folder}
        image = ContainerImage(Path("/"), Config())
        wait = [sys.executable, "-c", "import signal; signal.pause()"]
        with container(
            image, Confinement(), environment=environment, volumes=here, program=wait
        ) as made:
            yield made


async def test_a_container_of_docker_names_what_is_missing_and_forks_without_it(
    started: Container,
) -> None:
    for missing, options in (
        ("no cgroup v2 with cpu, memory, pids", ()),
        ("machines cannot be jailed here: unshare", ("--cgroups", "off", "--vmm", VMM)),
    ):
        refused = started.run("forkd-daemon", "serve", *options)
        assert refused.returncode == 1
        assert missing in refused.stderr
        assert "--privileged" in refused.stderr

    with started.background("forkd-daemon", "serve", environment=WAIVED) as daemon:
        await until(lambda: '"listening"' in daemon.read_text())
        health = config().healthcheck["test"]
        started.check(*health[1:])
        started.check("forkd", "snapshot", "create", "py", "--recipe", "fake")
        children = json.loads(started.check("forkd", "fork", "py", "-n", "2", "--json"))
        assert len(children) == 2
