"""The TypeScript SDK: its own tests against a whole daemon over the fake VMM, and its package."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest

from forkd import AsyncClient
from forkd.daemon.settings import Bind
from tests.support.docs import ROOT, blocks
from tests.support.npm_project import NpmProject, colourless, npm_project, package
from tests.support.programs import said_by
from tests.support.served_host import served_host
from tests.support.soak import only_in_soak
from tools.node import BUN, DENO, PROGRAMS, TYPESCRIPT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.served_host import Served
    from tests.support.service_host import FakeHost

__all__ = ["npm_project", "package"]

VITEST_TIMEOUT_S = 150.0
"""Time for one project: seconds alone, and much more beside all that runs in `make test`."""

pytestmark = [pytest.mark.needs("node"), pytest.mark.timeout(VITEST_TIMEOUT_S + 30)]

DENO_FLAGS = (
    "--no-prompt",
    "--allow-env",
    "--allow-net",
    "--allow-read",
    "--allow-write",
)
"""What the package needs of Deno: a Unix socket is read and written."""

BUILD = """\
import { Client } from "@forkd/sdk";
const [url, folder] = process.argv.slice(2);
const client = new Client({ url });
const { snapshot, steps } = await client.builds.build(folder, { tag: "app" });
const done = steps.filter((each) => each.changesFiles && !each.cached).map((each) => each.line);
console.log(JSON.stringify({ done, createdAtUnix: snapshot.createdAtUnix }));
client.close();
"""

README = TYPESCRIPT / "README.md"
PAGE = ROOT / "docs/howto/use-typescript.md"


@contextlib.asynccontextmanager
async def serving(host: FakeHost) -> AsyncIterator[tuple[Served, str]]:
    """Serve a host at a socket and over TCP; gives a token, too.  Nothing is left afterwards."""
    async with served_host(host, bind=Bind("127.0.0.1", 0)) as served:
        body = {"name": "typescript", "scopes": ["read", "run", "snapshots"]}
        made = await served.http.post("/v2/tokens", json=body)
        assert made.status_code == 201, made.text
        yield served, made.json()["token"]
        assert await served.sandboxes() == []
    assert host.left_over() == []


async def run_vitest(project: str, **variables: str) -> None:
    """Have vitest run one project of the package; its output is in the error if it fails."""
    words = (PROGRAMS / "vitest", "run", f"--project={project}")
    environ = colourless(**variables)
    await said_by(*words, timeout_s=VITEST_TIMEOUT_S, cwd=TYPESCRIPT, env=environ)


async def test_the_suite_passes_without_a_daemon() -> None:
    await run_vitest("unit")


async def test_the_suite_passes_against_a_daemon(fake_host: FakeHost) -> None:
    async with serving(fake_host) as (served, token):
        await run_vitest(
            "daemon",
            FORKD_TEST_URL=served.url,
            FORKD_TEST_TCP_URL=served.tcp_url,
            FORKD_TEST_TOKEN=token,
        )


OTHERS = [only_in_soak(each, marks=[pytest.mark.needs(each)]) for each in ("bun", "deno")]
"""Other runtimes, which a soak installs."""


def program_of(runtime: str) -> tuple[str, ...]:
    """Return the words that run a program with a runtime."""
    return {
        "node": ("node",),
        "bun": (str(BUN),),
        "deno": (str(DENO), "run", *DENO_FLAGS),
    }[runtime]


@pytest.mark.soak(only=True)
@pytest.mark.parametrize("runtime", ["node", *OTHERS])
async def test_what_one_language_has_built_the_other_finds(
    runtime: str, fake_host: FakeHost, npm_project: NpmProject, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "Dockerfile").write_text(
        "FROM python\nWORKDIR /srv\nCOPY a .\nENV A=1\nRUN echo $A\nRUN echo two\nCMD run\n"
    )
    program = npm_project.folder / "build.mjs"
    program.write_text(BUILD)

    async with serving(fake_host) as (served, _), AsyncClient(served.url) as client:
        words = (*program_of(runtime), program.name, served.url, str(tmp_path))
        said = json.loads(await npm_project.run(*words))
        assert said["done"] == [3, 5, 6]
        found = await client.builds.build(tmp_path, tag="app")
        assert [each.cached for each in found.steps if each.changes_files] == [True] * 3
        assert found.snapshot.created_at_unix == said["createdAtUnix"]
        (tmp_path / "a").write_text("b")
        await client.builds.build(tmp_path, tag="app")
        assert json.loads(await npm_project.run(*words))["done"] == []


async def test_the_packed_package_runs_its_readme_and_its_page_in_an_empty_project(
    fake_host: FakeHost, npm_project: NpmProject
) -> None:
    (readme,) = blocks(README, "ts")
    (npm_project.folder / "readme.ts").write_text(readme.code)
    page = "\n".join(block.code for block in blocks(PAGE, "ts test"))
    page = page.replace('["sleep", "60"], { timeoutS', '["late"], { timeoutS')
    (npm_project.folder / "page.ts").write_text(page)  # `late` has no time in the fake guest

    async with serving(fake_host) as (served, token):
        said = await npm_project.run("node", "readme.ts", FORKD_URL=served.url)
        assert said == "hello\n42\n"
        said = await npm_project.run("node", "page.ts", FORKD_URL=served.tcp_url, FORKD_TOKEN=token)
        assert said.splitlines()[:3] == ["hello", "", "7"]
        assert {"200", "TimeoutError", "true ", "hello from a file"} <= {*said.splitlines()}
    await npm_project.check_types("readme.ts", "page.ts")


@pytest.mark.parametrize("runtime", ["node", *OTHERS])
async def test_the_package_runs_on(
    runtime: str, fake_host: FakeHost, npm_project: NpmProject
) -> None:
    program = npm_project.folder / "program.mjs"
    program.write_bytes((TYPESCRIPT / "tests/runtimes/program.mjs").read_bytes())
    words = program_of(runtime)

    async with serving(fake_host) as (served, token):
        assert await npm_project.run(*words, program.name, served.url) == "ok\n"
        assert await npm_project.run(*words, program.name, served.tcp_url, token) == "ok\n"
