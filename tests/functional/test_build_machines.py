"""A Dockerfile of twelve instructions is built in real machines: in full, again, and in part."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd import AsyncClient
from forkd.daemon.app import create_app
from forkd.daemon.server import listening
from forkd.daemon.settings import Settings
from forkd.errors import BuildError
from forkd.service.host import open_host
from tests.support import oci
from tests.support.real_host import FORK_DEADLINE_S, REAL, settings_without_images

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.types import BuildResult

pytestmark = [
    REAL,
    pytest.mark.timeout(900),
    pytest.mark.soak(only=True),  # over the fake VMM: test_build.py
]

logger = logging.getLogger(__name__)

BUSYBOX = Path("/bin/busybox")
"""Static, so that it is a whole image."""

PROGRAMS = ("sh", "cat", "dd", "env", "id", "kill", "ls", "mkdir", "pwd", "sleep", "stat", "wc")

AGAIN_SHARE_MAX = 0.05
"""What part of the time of a build the same build may take again."""

TWELVE = """\
FROM ./layout
WORKDIR /srv
ENV MODE=test PATH=/srv/bin:$PATH
COPY --chown=app:app --chmod=0750 tool bin/tool
RUN tool > said && test "$(cat said)" = "test in /srv"
RUN dd if=/dev/urandom of=data bs=64k count=64
COPY folder folder
RUN mkdir -p out && cat folder/*.txt > out/all
USER app
RUN test "$(id -u)" = 1000 && echo ten > /tmp/ten
RUN cat /tmp/ten > /tmp/eleven
RUN ["/bin/sh", "-c", "wc -c data > /tmp/twelve"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "app"
    (made / "folder").mkdir(parents=True)
    for name in ("one", "two"):
        (made / "folder" / f"{name}.txt").write_text(f"{name}\n")
    (made / "tool").write_text('#!/bin/sh\necho "$MODE in $(pwd)"\n')
    passwd = b"root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/srv:/bin/sh\n"
    members = [
        *(oci.folder(each) for each in ("bin", "etc")),
        oci.folder("tmp", mode=0o1777),
        oci.regular("bin/busybox", BUSYBOX.read_bytes(), mode=0o755),
        oci.regular("etc/passwd", passwd),
        oci.regular("etc/group", b"root:x:0:\napp:x:1000:\n"),
        *(oci.symlink(f"bin/{each}", "busybox") for each in PROGRAMS),
    ]
    config = {"Env": ["PATH=/bin", "BASE=1"], "WorkingDir": "/tmp", "Cmd": ["cat", "/etc/passwd"]}
    oci.write_layout(made / "layout", [members], config)
    return made


@pytest.fixture
async def client() -> AsyncIterator[AsyncClient]:
    with settings_without_images() as settings:
        bind = Settings(socket=settings.run_dir / "forkd.sock")
        async with (
            open_host(settings) as host,
            listening(create_app(host), bind, host.tokens) as (url,),
            AsyncClient(url) as client,
        ):
            yield client


async def build(
    client: AsyncClient, folder: Path, text: str, tag: str
) -> tuple[BuildResult, float]:
    """Return what a build has made, and how long it took."""
    (folder / "Dockerfile").write_text(text)
    begun_s = time.monotonic()
    made = await client.builds.build(folder, tag=tag, memory_mib=256, disk_mib=64)
    return made, time.monotonic() - begun_s


def done(made: BuildResult) -> list[int]:
    return [each.line for each in made.steps if each.changes_files and not each.cached]


async def says(client: AsyncClient, tag: str, line: str) -> str:
    async with await client.sandbox(tag, deadline_s=FORK_DEADLINE_S) as sandbox:
        return str((await sandbox.run(line, check=True)).stdout)


async def test_twelve_instructions_are_built_again_and_in_part(
    client: AsyncClient, folder: Path
) -> None:
    made, first_s = await build(client, folder, TWELVE, "app")  # the image of its FROM, too
    assert done(made) == [4, 5, 6, 7, 8, 10, 11, 12]
    for step in made.steps:
        logger.info("%s: %.2f s", step.text, step.seconds)
    again, again_s = await build(client, folder, TWELVE, "app")
    assert done(again) == []
    changed, changed_s = await build(client, folder, TWELVE.replace("echo ten", "echo 10"), "app")
    assert done(changed) == [10, 11, 12]
    logger.info(
        "first build %.1f s, again %.3f s, changed tenth %.1f s, %d MiB",
        first_s,
        again_s,
        changed_s,
        sum(each.stored_bytes for each in await client.snapshots.list() if each.cached) >> 20,
    )
    assert again_s < AGAIN_SHARE_MAX * first_s

    said = await says(client, "app", "pwd; id -u; echo $MODE $BASE $PATH; tool; cat /tmp/eleven")
    assert said.splitlines() == ["/srv", "1000", "test 1 /srv/bin:/bin", "test in /srv", "10"]
    said = await says(client, "app", "stat -c '%a %u %g' bin/tool; cat out/all /tmp/twelve")
    assert said.splitlines() == ["750 1000 1000", "one", "two", "4194304 data"]
    info = await client.snapshots.info("app")
    assert info.config is not None
    assert info.config.cmd == ["cat", "/etc/passwd"]


async def test_a_stage_is_copied_from_and_the_program_of_an_image_is_warm(
    client: AsyncClient, folder: Path
) -> None:
    text = (
        "FROM ./layout AS build\nRUN mkdir -p /out/sub && echo made > /out/sub/it\n"
        "FROM ./layout\nCOPY --from=build /out /in\nCOPY --from=build /bin/busybox /in/\n"
        'ENTRYPOINT ["sh", "-c", "echo $$ > /in/pid; while :; do sleep 1; done"]\nCMD []\n'
    )
    (folder / "Dockerfile").write_text(text)
    await client.builds.build(
        folder, tag="warm", memory_mib=256, disk_mib=64, warm=True, ready="test -s /in/pid"
    )
    line = "cat /in/sub/it; kill -0 $(cat /in/pid) && echo runs; stat -c %a /in/busybox"
    assert (await says(client, "warm", line)).splitlines() == ["made", "runs", "755"]

    with pytest.raises(BuildError, match=r"^Dockerfile:2: RUN .*: exited with 3\nwhy\n?$"):
        await build(client, folder, "FROM ./layout\nRUN echo why >&2; exit 3\n", "failed")
    assert "failed" not in [each.tag for each in await client.snapshots.list()]
    assert await client.sandboxes.list() == []
