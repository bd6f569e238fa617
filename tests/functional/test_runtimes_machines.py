"""Each warm runtime in a real guest: what protocol/runtime/CONTRACT.md promises to who evaluates.

tests/contract/test_runtimes.py asks the runtimes themselves for more, and the fakes of guests for
the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.limits import EVAL_OUTPUT_BYTES_MAX
from forkd.model.ids import parse_tag
from forkd.model.output import Kept
from forkd.model.sandbox import BranchOptions, ForkOptions
from tests.support.callers import CALLER
from tests.support.dialects import DIALECTS, Dialect
from tests.support.real_host import (
    EVAL_TIMEOUT_S,
    FORK_DEADLINE_S,
    REAL_IN_SOAK,
    RECIPE,
    ROOT,
    baked_host,
    shell,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from forkd.model.exec import EvalResult
    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from tests.support.bakes import Bakes
    from tests.support.real_host import RealHost

pytestmark = [*REAL_IN_SOAK, pytest.mark.timeout(1800)]

OPTIONS = ForkOptions(deadline_s=FORK_DEADLINE_S)

LIMIT_S, COMPILED_LIMIT_S = 2.0, 20.0
"""Time limit of code that never ends; of code that is compiled before, in an emulated machine."""

MUCH_BYTES = 8 << 20

RUNTIMES = ("java", "node", "python", "shell")


class Heard(Kept):
    """An output that tells when something is in it."""

    def __init__(self) -> None:
        super().__init__(EVAL_OUTPUT_BYTES_MAX)
        self.begun = asyncio.Event()

    def add(self, data: bytes) -> None:
        super().add(data)
        self.begun.set()


@dataclass(frozen=True)
class Warm:
    """A sandbox with a runtime, in which the word `kept` was remembered."""

    host: RealHost
    sandbox: Sandbox
    name: str
    dialect: Dialect

    async def eval(
        self,
        code: str,
        sandbox: SandboxId | None = None,
        *,
        timeout_s: float = EVAL_TIMEOUT_S,
        kept: tuple[Kept, Kept] | None = None,
    ) -> EvalResult:
        """Evaluate code, in the sandbox or in another one like it."""
        chosen, guests = sandbox or self.sandbox.id, self.host.service.guests
        return await guests.eval(
            CALLER, chosen, code, timeout_s=timeout_s, kept=kept, runtime=self.name
        )

    async def check_kept(self, sandbox: SandboxId | None = None) -> None:
        """Check that the word is remembered."""
        result = await self.eval(self.dialect.recall, sandbox)
        assert (result.stdout, result.error) == ("kept\n", None)

    @contextlib.asynccontextmanager
    async def running(self, code: str) -> AsyncIterator[asyncio.Task[EvalResult]]:
        """Have code run that has printed something; its client goes away in the end."""
        stdout = Heard()
        kept = (stdout, Kept(EVAL_OUTPUT_BYTES_MAX))
        task = asyncio.ensure_future(self.eval(code, kept=kept))
        try:
            async with asyncio.timeout(EVAL_TIMEOUT_S):
                await stdout.begun.wait()
            yield task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def recipe_of(name: str, folder: Path) -> Path:
    """Return a recipe with this runtime; of the shell there is none, so it is written."""
    if name != "shell":
        return RECIPE if name == "python" else ROOT / "recipes" / name
    shutil.copytree(RECIPE, folder)
    text = (folder / "recipe.toml").read_text()
    old = 'runtime = "python"\nfile = "warmup.py"\n'
    assert old in text
    (folder / "recipe.toml").write_text(text.replace(old, 'runtime = "shell"\n'))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=RUNTIMES)
async def hosted(
    bakes: Bakes, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[RealHost, str]]:
    """A host with a snapshot of each runtime, and the runtime's name."""
    recipe = recipe_of(request.param, tmp_path_factory.mktemp("runtime") / "recipe")
    async with baked_host(bakes, recipe) as host:
        yield host, request.param


@pytest_asyncio.fixture(loop_scope="module")
async def warm(hosted: tuple[RealHost, str]) -> AsyncIterator[Warm]:
    """A sandbox with a runtime."""
    host, name = hosted
    async with host.forked(1, OPTIONS) as (sandbox,):
        made = Warm(host, sandbox, name, DIALECTS[name])
        assert (await made.eval(made.dialect.keep)).error is None
        yield made


async def test_state_is_kept_after_what_fails(warm: Warm) -> None:
    await warm.check_kept()
    kind, message, trace = warm.dialect.fault
    failed = (await warm.eval(warm.dialect.raises)).error
    assert failed is not None
    assert failed.type == kind
    assert message in failed.message
    assert trace in failed.traceback
    assert (await warm.eval(warm.dialect.malformed)).error is not None
    await warm.check_kept()


async def test_output_of_code_and_children_is_kept_up_to_its_limit(warm: Warm) -> None:
    said = await warm.eval(warm.dialect.output)
    assert (said.stdout, said.stderr, said.output_truncated) == ("out\nchild\n", "err\n", False)
    much = await warm.eval(warm.dialect.much(MUCH_BYTES))
    assert (much.error, len(much.stdout), much.output_truncated) == (
        None,
        EVAL_OUTPUT_BYTES_MAX,
        True,
    )
    await warm.check_kept()


async def test_a_time_limit_ends_the_code_and_keeps_the_state(warm: Warm) -> None:
    for code in (warm.dialect.forever, *warm.dialect.loops):
        limit_s = COMPILED_LIMIT_S if warm.name == "java" else LIMIT_S
        late = await warm.eval(code, timeout_s=limit_s)
        assert late.timed_out, code
        assert late.error is not None, code
        await warm.check_kept()


async def test_output_is_streamed_and_code_whose_client_goes_is_interrupted(warm: Warm) -> None:
    async with warm.running(warm.dialect.forever) as task:
        assert not task.done()
    await warm.check_kept()


async def test_a_branch_and_forks_of_it_keep_the_state(warm: Warm) -> None:
    service, tag = warm.host.service, parse_tag("kept")
    made = await service.branches.branch(CALLER, warm.sandbox.id, 1, BranchOptions(), tag=tag)
    forks = (await service.sandboxes.fork(CALLER, tag, 1, OPTIONS)).sandboxes
    for each in (*made.fork.sandboxes, *forks):
        await warm.check_kept(each.id)
        await service.sandboxes.delete(CALLER, each.id)
    await service.snapshots.delete(CALLER, tag)


async def test_a_branch_in_the_middle_of_code_disturbs_neither(warm: Warm) -> None:
    service = warm.host.service
    async with warm.running(warm.dialect.waits) as task:
        made = await service.branches.branch(CALLER, warm.sandbox.id, 1, BranchOptions())
        (sibling,) = made.fork.sandboxes
        # Nobody waits for the code in the sibling: it is interrupted there.
        await warm.check_kept(sibling.id)
        assert not task.done()
        await shell(warm.host, warm.sandbox.id, "touch /tmp/go")
        result = await task
        assert (result.stdout, result.error) == ("now\ngone on\n", None)
        await service.sandboxes.delete(CALLER, sibling.id)
    await warm.check_kept()
