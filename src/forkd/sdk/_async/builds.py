"""Builds of Dockerfiles: each step in a fork of the snapshot that the step before it has left."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from forkd.errors import BuildError, Conflict, InvalidRequest, NotFound
from forkd.limits import TAG_PATTERN
from forkd.sdk._async.recipes import image_snapshot
from forkd.sdk._async.sandbox import fork_one
from forkd.sdk._async.steps import Machine
from forkd.sdk._build import (
    Clock,
    Options,
    Seen,
    base_of,
    image_path,
    ready_script,
    wire_config,
)
from forkd.sdk._dockerfile.opening import open_wish
from forkd.sdk._dockerfile.plan import RunAction, Step, plan
from forkd.sdk._parallel import async_aside
from forkd.sdk._requests import build, explicit
from forkd.sdk._results import BuildResult, BuildStep
from forkd.wire.v2 import SnapshotInfo, SnapshotInfoDetail
from forkd.wire.v2_builds import BuildLink
from forkd.wire.v2_images import ImageSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from os import PathLike

    from forkd.sdk._async.http import AsyncHttp
    from forkd.sdk._async.recipes import AsyncRecipes
    from forkd.sdk._async.sandbox import AsyncSandbox
    from forkd.sdk._dockerfile.plan import Base, Plan, StagePlan, Wish
    from forkd.sdk._dockerfile.settings import Config
    from forkd.sdk._requests import NamedForkOptions
    from forkd.wire.v2 import ProgressEvent

STEP_TIMEOUT_S = 3_600.0
"""Time that one step may take, unless a call says otherwise."""

WRITE_TIMEOUT_S = 3_600.0
"""Time that writing a link may take."""

TTL_MARGIN_S = 600.0
"""How long a step's sandbox outlives its time, if the program that builds is gone."""

_TAG = re.compile(TAG_PATTERN.removesuffix("$"))


class AsyncBuilds:
    """Builds of Dockerfiles by a daemon."""

    def __init__(self, http: AsyncHttp, recipes: AsyncRecipes) -> None:
        self._http = http
        self._recipes = recipes

    @explicit
    async def build(  # noqa: PLR0913 - one for each option
        self,
        context: str | PathLike[str] = ".",
        *,
        dockerfile: str | PathLike[str] | None = None,
        tag: str | None = None,
        build_args: Mapping[str, str] | None = None,
        target: str | None = None,
        cache: bool = True,
        pull: Literal["missing", "always"] = "missing",
        network: bool | str | list[str] | None = None,
        memory_mib: int | None = None,
        vcpus: int | None = None,
        disk_mib: int | None = None,
        warm: bool = False,
        ready: str | None = None,
        step_timeout_s: float | None = None,
        on_step: Callable[[BuildStep], object] | None = None,
        on_progress: Callable[[ProgressEvent], object] | None = None,
    ) -> BuildResult:
        """Build a snapshot from a Dockerfile.

        Each RUN, COPY and ADD is done in a sandbox of its own, a fork of what the step before it
        has left, and its result is kept.  A later build goes on behind the last step that is the
        same.  Forks of the result begin with the ENV, WORKDIR and USER of the Dockerfile.

        Args:
            context: The folder that COPY and ADD take files from.
            dockerfile: The Dockerfile; None for `Dockerfile` in that folder.
            tag: Name of the snapshot; one that a build made is replaced.  None: it has no name,
                and the daemon may remove it for want of room.
            build_args: Values of ARGs.
            target: The stage to build; None for the last one.
            cache: Whether results of earlier builds are used.
            pull: "always" asks the registry which image a FROM names now.
            network: What steps may reach, as of `Client.fork`; None for nothing.
            memory_mib: Memory of each fork, where FROM is an image.
            vcpus: Virtual CPUs of each fork, likewise.
            disk_mib: Disk size of each fork, likewise.
            warm: Start the image's ENTRYPOINT and CMD, and have forks begin with it running.
            ready: Shell command that is repeated until it exits with 0, with `warm`.
            step_timeout_s: Time that one step may take; an hour if None.
            on_step: Called with each instruction that is done.
            on_progress: Called with what happens meanwhile, and each line that a step prints.

        Raises:
            InvalidRequest: Something in the Dockerfile is wrong or not supported; file and line are
                named, and nothing was built.
            NotFound: There is no such folder, file or image.
            BuildError: A step failed; what the steps before it have left stays for the next build.
            Conflict: The tag is taken by a snapshot that no build made, or that is in use.
        """
        machine = {"memory_mib": memory_mib, "vcpus": vcpus, "disk_mib": disk_mib}
        limit_s = STEP_TIMEOUT_S if step_timeout_s is None else step_timeout_s
        options = Options(tag, cache, network, machine, pull, warm, ready, limit_s)
        options.check()

        wish = await async_aside(partial(open_wish, context, dockerfile, build_args or {}, target))
        seen = Seen(on_step, on_progress)
        return await _Build(self._http, self._recipes, wish, options, seen).run()


@dataclass(slots=True)
class _Build:
    """One build.

    Attributes:
        wish: What is built.
        options: How.
        seen: What was done.
        ends: The snapshot that each stage has ended with, by its number.
    """

    http: AsyncHttp
    recipes: AsyncRecipes
    wish: Wish
    options: Options
    seen: Seen
    ends: dict[int, str] = field(default_factory=dict)

    async def run(self) -> BuildResult:
        """Build it."""
        wish, options = self.wish, self.options

        await async_aside(partial(plan, wish))
        replaced = await self._replaced()
        bases = {name: await self._base(name, line) for name, line in wish.images().items()}

        made = await async_aside(partial(plan, wish, bases))
        if options.warm and not made.last.config.program:
            raise InvalidRequest("warm: the image has no ENTRYPOINT and no CMD", field="warm")
        key = made.image_key(options.warm, options.ready)
        found = await self._found(key, made.last.config, options.tag)
        if found is None:
            _check_unused(replaced, bases)
            end = await self._end(made, made.last, bases)
            found = await self._finish(made, key, end, replaced)
        else:
            self._tell_cached(made)
        return BuildResult(found, tuple(self.seen.steps), made.warnings)

    async def _replaced(self) -> SnapshotInfoDetail | None:
        """Return the snapshot that has the tag now.

        Raises:
            Conflict: No build made it.
        """
        tag = self.options.tag
        if tag is None:
            return None
        build(BuildLink, key="0" * 64, tag=tag)
        try:
            found = await self._info(tag)
        except NotFound:
            return None
        if found.build_key is None:
            raise Conflict(
                f"snapshot {tag} exists, and no build made it; choose another tag, or delete it",
                tag=tag,
            )
        return found

    async def _info(self, tag: str) -> SnapshotInfoDetail:
        path = f"/v2/snapshots/{self.http.quoted(tag)}/info"
        return await self.http.call(SnapshotInfoDetail, "GET", path)

    async def _base(self, name: str, line: int) -> Base:
        """Return the snapshot of an image that a FROM or a COPY names."""
        where = f"{self.wish.dockerfile.file}:{line}"
        salt = "" if self.options.cache else secrets.token_hex(16)
        if _TAG.fullmatch(name):
            try:
                return base_of(await self._info(name), salt, where)
            except NotFound:
                pass  # an image of a registry, then
        try:
            image = image_path(name, self.wish.context.root)
            reference = await self.recipes.image_reference(image, self.seen.on_progress)
            machine = {**self.options.machine, "pull": self.options.pull}
            request = build(ImageSnapshot, image=reference, **machine)
            made = await image_snapshot(self.http, request, self.seen.on_progress)
        except (NotFound, BuildError, InvalidRequest) as error:
            raise type(error)(f"{where}: {name}: {error}", **error.context) from error
        return base_of(await self._info(made.tag), salt, where)

    async def _found(self, key: str, config: Config, tag: str | None) -> SnapshotInfo | None:
        """Return a result of an earlier build; None if it is not there."""
        try:
            return await self._link(key, config, None, tag)
        except NotFound:
            return None

    async def _link(
        self, key: str, config: Config, sandbox: str | None, tag: str | None
    ) -> SnapshotInfo:
        """Return a result, written from a sandbox unless it is there.

        Raises:
            NotFound: It is not there, and there is no sandbox.
        """
        request = build(BuildLink, key=key, config=wire_config(config), sandbox=sandbox, tag=tag)
        return await self.http.call(
            SnapshotInfo,
            "POST",
            "/v2/snapshots:build",
            body=request,
            creates=sandbox is not None,
            timeout_s=WRITE_TIMEOUT_S,
        )

    async def _end(self, made: Plan, stage: StagePlan, bases: Mapping[str, Base]) -> str:
        """Return the snapshot that a stage ends with, after the steps that are not cached."""
        index = stage.stage.index
        if index in self.ends:
            return self.ends[index]
        at, parent = len(stage.steps), None
        while at > 0 and parent is None:
            found = await self._found(stage.steps[at - 1].key, stage.config, None)
            if found is None:
                at -= 1
            else:
                parent = found.tag
        if parent is None:
            parent = await self._begin(made, stage, bases)
        tell = _Teller(made, stage, self.seen)
        for step in stage.steps[:at]:
            tell.step(step, 0.0, cached=True)
        for step in stage.steps[at:]:
            clock = Clock()
            parent = await self._do(made, step, parent, bases)
            tell.step(step, clock.took_s, cached=False)
        tell.end()
        self.ends[index] = parent
        return parent

    async def _begin(self, made: Plan, stage: StagePlan, bases: Mapping[str, Base]) -> str:
        """Return the snapshot that a stage begins with."""
        base = stage.base
        if isinstance(base, int):
            return await self._end(made, made.of(base), bases)
        if base is None:
            raise InvalidRequest("a stage has no base", field="dockerfile")
        return base.tag

    async def _do(self, made: Plan, step: Step, parent: str, bases: Mapping[str, Base]) -> str:
        """Do a step; return the snapshot that it leaves."""
        self.seen.progress("step", f"[{step.number}/{made.total}] {step.shown}")
        where = f"{self.wish.dockerfile.file}:{step.line}"
        action = step.action
        origin: str | None = None
        if not isinstance(action, RunAction) and action.origin is not None:
            origin = (
                await self._end(made, made.of(action.origin), bases)
                if isinstance(action.origin, int)
                else bases[action.origin].tag
            )
        online = isinstance(action, RunAction)
        async with await self._fork(parent, online=online) as sandbox:
            machine = Machine(sandbox, where, self.seen)
            await machine.make_folders(step.folders)
            if isinstance(action, RunAction):
                await machine.run(step, action, self.options.step_timeout_s)
            elif origin is None:
                await machine.copy(step, action, self.wish.context)
            else:
                async with await self._fork(origin, online=False) as source:
                    await machine.copy_from(step, action, source)
            return (await self._link(step.key, step.config, sandbox.id, None)).tag

    async def _fork(self, tag: str, *, online: bool) -> AsyncSandbox:
        options: NamedForkOptions = {
            "network": self.options.network if online else None,
            "ttl_s": self.options.step_timeout_s + TTL_MARGIN_S,
        }
        return await fork_one(self.http, tag, options)

    async def _finish(
        self, made: Plan, key: str, end: str, replaced: SnapshotInfoDetail | None
    ) -> SnapshotInfo:
        """Write the result: the last link, with the configuration, and the program if asked."""
        options, config = self.options, made.last.config
        self.seen.progress("save", "writing the result")
        async with await self._fork(end, online=False) as sandbox:
            machine = Machine(sandbox, self.wish.dockerfile.file, self.seen)
            await machine.make_folders(made.last.folders)
            if options.warm:
                self.seen.progress("warm", " ".join(config.program))
                args = ("/bin/sh", "-c", ready_script(options.ready), "sh", *config.program)
                env = dict(config.env)
                line = made.last.stage.line
                step = Step(made.total, line, "the image's program", key, config, (), _NOTHING)
                await machine.execute(step, args, env, options.step_timeout_s)
            if replaced is not None:
                path = f"/v2/snapshots/{self.http.quoted(replaced.tag)}"
                await self.http.send("DELETE", path, timeout_s=WRITE_TIMEOUT_S)
            return await self._link(key, config, sandbox.id, options.tag)

    def _tell_cached(self, made: Plan) -> None:
        for stage in made.stages:
            tell = _Teller(made, stage, self.seen)
            for step in stage.steps:
                tell.step(step, 0.0, cached=True)
            tell.end()


class _Teller:
    """Tells of the instructions of a stage in their order, those included that are no steps."""

    def __init__(self, made: Plan, stage: StagePlan, seen: Seen) -> None:
        self._total = made.total
        self._notes = list(stage.notes)
        self._seen = seen

    def step(self, step: Step, took_s: float, *, cached: bool) -> None:
        """Tell of a step that is done, and of what is before it."""
        self._until(step.number)
        self._seen.step(
            BuildStep(
                number=step.number,
                total=self._total,
                line=step.line,
                text=step.shown,
                changes_files=True,
                cached=cached,
                seconds=took_s,
            )
        )

    def end(self) -> None:
        """Tell of what is behind the last step."""
        self._until(self._total + 1)

    def _until(self, behind: int) -> None:
        while self._notes and self._notes[0][0] < behind:
            number, line, text = self._notes.pop(0)
            self._seen.step(BuildStep(number, self._total, line, text))


_NOTHING = RunAction((), None, {})


def _check_unused(replaced: SnapshotInfoDetail | None, bases: Mapping[str, Base]) -> None:
    """Return if a snapshot can be replaced.

    Raises:
        Conflict: Sandboxes or other snapshots need it, or the build itself does.
    """
    if replaced is None:
        return
    if replaced.tag in {base.tag for base in bases.values()}:
        raise Conflict(
            f"the build begins with snapshot {replaced.tag}, and cannot replace it; choose another "
            "tag",
            tag=replaced.tag,
        )
    users = replaced.sandbox_ids or replaced.dependents
    if users:
        raise Conflict(
            f"snapshot {replaced.tag} is needed by {', '.join(users[:5])}, and cannot be replaced; "
            "choose another tag, or delete those first",
            tag=replaced.tag,
        )
