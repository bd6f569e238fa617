"""The packed TypeScript package, in an empty project, over real machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.docs import blocks
from tests.support.npm_project import NpmProject, npm_project, package
from tests.support.real_daemon import daemon_of
from tests.support.real_host import REAL_IN_SOAK, TAG
from tools.node import TYPESCRIPT

if TYPE_CHECKING:
    from tests.support.real_host import RealHost

__all__ = ["npm_project", "package"]

pytestmark = [*REAL_IN_SOAK, pytest.mark.needs("node"), pytest.mark.timeout(900)]

PROGRAM = """
import { Client } from "@forkd/sdk";

const client = new Client();
await using sandbox = await client.sandbox("TAG");
await sandbox.eval("import numpy; x = numpy.arange(5)", { check: true });
await using siblings = await sandbox.branch(2);
await siblings[0].eval("x += 1", { check: true });
console.log((await siblings.eval("int(x.sum())")).map((each) => each.value).join(" "));
await sandbox.files.write("/tmp/a", "file");
const serve = ["python3", "-u", "-m", "http.server", "-b", "127.0.0.1", "8080"];
await using server = await sandbox.execStream(serve, { cwd: "/tmp" }).start();
for await (const _ of server) break;
await using forward = await sandbox.forward(8080);
console.log(await (await fetch(`http://${forward.address}/a`)).text());
await sandbox.kill();
console.log(await sandbox.wait());
"""


async def test_the_readme_and_a_branch_and_a_port(
    real_host: RealHost, npm_project: NpmProject
) -> None:
    (readme,) = blocks(TYPESCRIPT / "README.md", "ts")
    (npm_project.folder / "readme.ts").write_text(readme.code.replace('"python"', f'"{TAG}"'))
    (npm_project.folder / "program.ts").write_text(PROGRAM.replace("TAG", TAG))

    async with daemon_of(real_host) as url:
        assert await npm_project.run("node", "readme.ts", FORKD_URL=url) == "hello\n42\n"
        said = await npm_project.run("node", "program.ts", FORKD_URL=url)
        assert said == "15 10\nfile\ndeleted\n"
