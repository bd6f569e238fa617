"""A daemon in a container of the image bakes, forks, and leaves nothing, in each kind that can."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.images.layout import default_cache_folder
from forkd.limits import IMAGE_CACHE_MIB_MAX
from tests.support.container_kinds import KINDS, LIMITED, NEEDED_LATER
from tests.support.containers import container, listening
from tests.support.real_host import REAL, RECIPE, STATE_PARENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.container_image import ContainerImage
    from tests.support.container_kinds import Kind
    from tests.support.containers import Container

pytestmark = [
    REAL,
    pytest.mark.needs("runc"),
    pytest.mark.soak(only=True),
    pytest.mark.timeout(1200),
]

CACHE = Path("/var/lib/forkd/cache")
"""Where a daemon in a container keeps images."""

LEFT = ("/run/forkd/s", "/run/forkd/b", "/var/lib/forkd/snapshots", "/var/lib/forkd/staging")
"""Folders that have nothing in them once sandboxes and snapshots are deleted."""

SETTINGS = {
    "FORKD_IMAGE_CACHE_MIB": str(IMAGE_CACHE_MIB_MAX),  # the images are those of all tests
    "FORKD_MEMORY_PRESSURE_MAX": "100",  # what ran before may still be felt
    "FORKD_MEMORY_RESERVE_MIB": "64",
}


@contextlib.contextmanager
def daemon_in(kind: Kind, image: ContainerImage) -> Iterator[Container]:
    """Start a daemon in a container of a kind, with the images of this host's user."""
    with tempfile.TemporaryDirectory(prefix="test-container-", dir=STATE_PARENT) as name:
        state = Path(name)
        for folder in (state, state / "cache", state / "cache/images", state / "cache/kernels"):
            folder.mkdir(exist_ok=True)
            os.chown(folder, kind.confinement.user, kind.confinement.user)
        shared = default_cache_folder()
        images = {str(CACHE / each): shared / each for each in ("images", "kernels")}
        with container(
            image,
            kind.confinement,
            environment={**SETTINGS, **kind.environment},
            volumes={"/var/lib/forkd": state},
            readable=images,
            program=kind.program or None,
        ) as made:
            yield made


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.jail])
async def test_a_daemon_in_a_container_forks_machines(
    name: str, container_image: ContainerImage
) -> None:
    kind = KINDS[name]
    with daemon_in(kind, container_image) as made:
        await listening(made)
        made.check("forkd", "snapshot", "create", "py", "--recipe", RECIPE.name)
        network = ("--network", "internet") if kind.has_networks else ()
        forked = json.loads(made.check("forkd", "fork", "py", "-n", "2", "--json", *network))
        first, second = [each["id"] for each in forked]

        routes = made.check("forkd", "exec", first, "--", "cat", "/proc/net/route").splitlines()
        assert (len(routes) > 1) is kind.has_networks, routes
        assert made.check("forkd", "eval", second, "int(numpy.arange(9).sum())") == "36\n"
        made.check("forkd", "branch", first, "-n", "1", "--tag", "later", "--wait")
        groups = made.check("find", "/sys/fs/cgroup", "-name", "sb-*").split()
        assert (first in {Path(each).name for each in groups}) is kind.has_cgroups

        made.check("forkd", "kill", "--all")
        made.check("forkd", "snapshot", "rm", "py", "--cascade")
        assert made.check("find", "/sys/fs/cgroup", "-name", "sb-*") == ""
        assert made.check("find", *LEFT, "-mindepth", "1") == ""
    assert not made.group.exists()


@pytest.mark.parametrize("missing", NEEDED_LATER)
async def test_a_daemon_without_a_capability_says_what_is_refused(
    missing: str, container_image: ContainerImage
) -> None:
    few = replace(LIMITED, capabilities=LIMITED.capabilities - {missing})
    with daemon_in(replace(KINDS["root, limits"], confinement=few), container_image) as made:
        await listening(made)
        steps = (
            ("snapshot", "create", "py", "--recipe", RECIPE.name),
            ("fork", "py", "--name", "first"),
            ("branch", "first"),
        )
        done = next(done for each in steps if (done := made.run("forkd", *each)).returncode)
        assert NEEDED_LATER[missing] in done.stderr
