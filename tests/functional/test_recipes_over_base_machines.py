"""A recipe over a base in a real machine: its fork has both, and its link is small."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING

import pytest

from forkd.model.ids import parse_tag
from forkd.model.sandbox import ForkOptions
from forkd.model.snapshot import Snapshot, SnapshotRequest
from forkd.service.host import open_host
from tests.support.callers import CALLER
from tests.support.host_settings import settings_in
from tests.support.real_host import (
    EVAL_TIMEOUT_S,
    FORK_DEADLINE_S,
    REAL,
    RECIPE,
    STATE_PARENT,
    fresh_folders,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from forkd.service.host import Host

pytestmark = [REAL, pytest.mark.soak(only=True), pytest.mark.timeout(900)]

logger = logging.getLogger(__name__)

APP = parse_tag("app")

OVER = f"""
name = "app"
image = {{ base = "{RECIPE}" }}
files = [
    {{ source = "greeting", target = "/srv/greeting", mode = 0o640 }},
    {{ source = "greeting", target = "/etc/pip.conf" }},
]

[warmup]
run = ["cat /srv/greeting > /srv/copy"]
runtime = "python"
code = "loaded = numpy.arange(3).tolist() + [open('/srv/copy').read()]"
post_fork = "forked = True"
"""

LINK_SHARE_MAX = 0.5
"""What part of its base a link may take that adds nothing but a line of text."""


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    STATE_PARENT.mkdir(exist_ok=True)
    state, run_dir = fresh_folders(STATE_PARENT)
    try:
        settings = settings_in(state, run_dir)
        images = state / "cache" / "images"
        shared = images.readlink()
        images.unlink()  # what is added is built here, and images may be where nothing can be made
        images.mkdir()
        for each in shared.iterdir():
            (images / each.name).symlink_to(each)
        async with open_host(settings) as host:
            yield host
    finally:
        shutil.rmtree(run_dir)
        shutil.rmtree(state)


async def test_a_recipe_over_python_numpy_is_a_small_link_that_has_both(
    host: Host, tmp_path: Path
) -> None:
    (tmp_path / "recipe.toml").write_text(OVER)
    (tmp_path / "greeting").write_text("hello")
    request = SnapshotRequest(APP, tmp_path)
    *_, made = [each async for each in host.snapshots.bake(CALLER, request)]
    assert isinstance(made, Snapshot)
    base = await host.snapshots.get(CALLER, made.parent or APP)
    logger.info("link %d KiB, base %d KiB", made.stored_bytes >> 10, base.stored_bytes >> 10)
    assert (made.recipe, made.runtime, base.recipe) == ("app", "python", "python-numpy")
    assert made.stored_bytes < LINK_SHARE_MAX * base.stored_bytes

    options = ForkOptions(deadline_s=FORK_DEADLINE_S)
    (fork,) = (await host.sandboxes.fork(CALLER, APP, 1, options)).sandboxes
    try:
        code = "import os; [loaded, forked, oct(os.stat('/srv/greeting').st_mode & 0o777)]"
        said = await host.guests.eval(CALLER, fork.id, code, timeout_s=EVAL_TIMEOUT_S)
        assert said.error is None
        assert said.value == [[0, 1, 2, "hello"], True, "0o640"]
        async with await host.guests.read_file(CALLER, fork.id, "/etc/pip.conf") as file:
            assert b"".join([piece async for piece in file]) == b"hello"
    finally:
        await host.sandboxes.delete(CALLER, fork.id)
