"""What a build does: steps in their order, each with the key under which its result is cached.

A step is an instruction that changes files: RUN, COPY, ADD.  Its key is a digest of the key of the
step before it, of what it does and with which files, variables, folder and user.  What else an
instruction changes is the image's configuration, which only the last link of a build has.

A plan is made twice: before anything is asked of a daemon, when variables of base images are not
known, to find what is wrong; and afterwards, for the keys.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest
from forkd.limits import CHAIN_DEPTH_MAX
from forkd.sdk._dockerfile import settings
from forkd.sdk._dockerfile.copying import CopyAction, copy_action
from forkd.sdk._dockerfile.faults import wrong
from forkd.sdk._dockerfile.settings import Config
from forkd.sdk._dockerfile.stages import PLATFORM
from forkd.sdk._dockerfile.words import Expander

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forkd.sdk._dockerfile.context import Context
    from forkd.sdk._dockerfile.reading import Instruction
    from forkd.sdk._dockerfile.stages import Dockerfile, Stage

KEY_FORMAT = "forkd build 1"
"""Is part of each key: a change of what steps do needs other keys."""

PLATFORM_ARGS = {
    **dict.fromkeys(("TARGETPLATFORM", "BUILDPLATFORM"), PLATFORM),
    **dict.fromkeys(("TARGETOS", "BUILDOS"), "linux"),
    **dict.fromkeys(("TARGETARCH", "BUILDARCH"), "amd64"),
    **dict.fromkeys(("TARGETVARIANT", "BUILDVARIANT"), ""),
}
"""Build arguments that each Dockerfile can declare without a value."""

PROXY_ARGS = tuple(
    form
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for form in (name, name.lower())
)
"""Build arguments that need not be declared, and are in no key."""

_SECRET = re.compile(
    r"(?:^|_)(?:apikey|auth|credentials?|key|passwd|password|secret|token)(?:_|$)", re.IGNORECASE
)
_HEREDOC_ALONE = re.compile(r"[0-9]*<<-?\S+")


@dataclass(frozen=True, slots=True)
class RunAction:
    """A program that a step runs.

    Attributes:
        args: It, with its arguments; the script's own arguments if there is one.
        script: A program that is written to the machine for this, and removed; None for none.
        env: All variables that it has.
        hidden: Variables besides, which are in no key.
    """

    args: tuple[str, ...]
    script: str | None
    env: Mapping[str, str]
    hidden: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """A step.

    Attributes:
        number: Which instruction of the build it is, from 1.
        line: Where it is in the Dockerfile.
        shown: It, in one line.
        key: Names what comes of it.
        config: The image's configuration where it is.
        folders: Folders that are made before it.
        action: What is done.
    """

    number: int
    line: int
    shown: str
    key: str
    config: Config
    folders: tuple[str, ...]
    action: RunAction | CopyAction


@dataclass(frozen=True, slots=True)
class Base:
    """A snapshot that a stage begins with.

    Attributes:
        tag: Its name.
        identity: Names its contents.
        config: What it says of programs in it.
        depth: How many snapshots are under it.
    """

    tag: str
    identity: str
    config: Config
    depth: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What is done for one stage.

    Attributes:
        stage: Which.
        base: The snapshot, or the stage, that it begins with; None while that is not known.
        steps: What is done to it.
        notes: The instructions that are no steps: number, line and text of each.
        config: Its configuration at the end.
        folders: Folders that are made at the end.
        key: The key of its last step, or of what it begins with.
        depth: How many links are under its end.
    """

    stage: Stage
    base: Base | int | None
    steps: tuple[Step, ...]
    notes: tuple[tuple[int, int, str], ...]
    config: Config
    folders: tuple[str, ...]
    key: str
    depth: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done for a build.

    Attributes:
        stages: What is done for each stage that is needed, in order; the last is the one wanted.
        total: How many instructions these have.
        warnings: What was understood, and has no effect here, or a risk.
    """

    stages: tuple[StagePlan, ...]
    total: int
    warnings: tuple[str, ...]

    @property
    def last(self) -> StagePlan:
        """The stage that is wanted."""
        return self.stages[-1]

    def of(self, index: int) -> StagePlan:
        """Return the plan of a stage by its number in the Dockerfile."""
        return next(each for each in self.stages if each.stage.index == index)

    def image_key(self, *said: object) -> str:
        """Return the key of the last link, which has the configuration.

        Args:
            said: What else its contents depend on.
        """
        return digest("image", self.last.key, said, _said(self.last.config), self.last.folders)


def digest(*parts: object) -> str:
    """Return the digest of values that JSON has."""
    text = json.dumps([KEY_FORMAT, *parts], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for.

    Attributes:
        dockerfile: The Dockerfile.
        args: Build arguments.
        target: The stage; None for the last one.
        context: Where COPY and ADD find files.
    """

    dockerfile: Dockerfile
    args: Mapping[str, str]
    target: str | None
    context: Context

    def check(self) -> None:
        """Return if each build argument is declared.

        Raises:
            InvalidRequest: One is not, or there is no such stage.
        """
        self.dockerfile.target(self.target)
        lines = [
            *self.dockerfile.before,
            *(e for s in self.dockerfile.stages for e in s.instructions),
        ]
        known = {
            word.partition("=")[0]
            for each in lines
            if each.keyword == "ARG"
            for word in each.rest.split()
        }
        for name in self.args:
            if name not in known and name not in PROXY_ARGS:
                there_are = ", ".join(sorted(known)) or "none"
                message = f"no ARG declares the build argument {name!r}; declared are: {there_are}"
                raise wrong(self.dockerfile.file, 1, message)

    def globals(self) -> dict[str, str]:
        """Return the variables that FROM can use."""
        found: dict[str, str] = dict(PLATFORM_ARGS)
        for each in self.dockerfile.before:
            words = Expander(self.dockerfile.escape, found)
            with located(self.dockerfile.file, each):
                declared = settings.declared(each, words)
            for name, default in declared.items():
                value = self.args.get(name, default)
                if value is not None:
                    found[name] = value
        return found

    def base_of(self, stage: Stage) -> Stage | str:
        """Return what a stage begins with: another stage, or the name of an image.

        Raises:
            InvalidRequest: A variable in it is not set, or no machine can be made of it.
        """
        file, each = self.dockerfile.file, stage.instructions[0]
        words = Expander(self.dockerfile.escape, self.globals())
        with located(file, each):
            name = words.word(stage.base)
            platform = words.word(dict(each.flags).get("platform") or PLATFORM)
        if not name or words.unknown:
            unset = ", ".join(sorted(words.unknown)) or "nothing"
            message = (
                f"FROM {stage.base} needs {unset}, which is not set: declare it with ARG before "
                "FROM, and give it a value there or with --build-arg"
            )
            raise wrong(file, each.line, message)
        if platform != PLATFORM:
            raise wrong(file, each.line, f"--platform={platform} is not supported: {PLATFORM} is")
        if name == "scratch":
            message = (
                "FROM scratch is not supported: a machine needs a root file system to boot, and "
                "scratch has no files; begin with a small image, such as busybox or alpine"
            )
            raise wrong(file, each.line, message)
        return self.dockerfile.find(name, stage.index) or name

    def needed(self) -> tuple[Stage, ...]:
        """Return the stages that are needed for the one that is wanted, in order."""
        wanted = {self.dockerfile.target(self.target).index}
        for stage in reversed(self.dockerfile.stages):
            if stage.index not in wanted:
                continue
            base = self.base_of(stage)
            if not isinstance(base, str):
                wanted.add(base.index)
            for each in stage.instructions:
                origin = origin_of(self.dockerfile, stage, each)
                if isinstance(origin, int):
                    wanted.add(origin)
        return tuple(stage for stage in self.dockerfile.stages if stage.index in wanted)

    def images(self) -> dict[str, int]:
        """Return the images that are needed, by the name that is given, with a line that does."""
        found: dict[str, int] = {}
        for stage in self.needed():
            base = self.base_of(stage)
            if isinstance(base, str):
                found.setdefault(base, stage.line)
            for each in stage.instructions:
                origin = origin_of(self.dockerfile, stage, each)
                if isinstance(origin, str):
                    found.setdefault(origin, each.line)
        return found


class located:  # noqa: N801 - used as a function
    """Have what is wrong in the block said with file and line."""

    def __init__(self, file: str, each: Instruction) -> None:
        self._file, self._each = file, each

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if type(error) is ValueError:
            raise wrong(self._file, self._each.line, f"{self._each.keyword}: {error}") from error


def origin_of(dockerfile: Dockerfile, stage: Stage, each: Instruction) -> int | str | None:
    """Return what a COPY copies from: a stage's number, an image's name; None for the context.

    Raises:
        InvalidRequest: There is no such stage before it.
    """
    name = dict(each.flags).get("from")
    if each.keyword != "COPY" or name is None:
        return None
    if "$" in name:
        message = "--from cannot have variables; name a stage, and use the variable in its FROM"
        raise wrong(dockerfile.file, each.line, message)
    found = dockerfile.find(name, stage.index)
    if found is not None:
        return found.index
    if set(name) & set(":/@"):
        return name
    later = dockerfile.find(name, len(dockerfile.stages))
    where = f", as it is not before line {each.line}" if later is not None else ""
    message = (
        f"--from={name[:80]}: there is no such stage{where}; {dockerfile.names()}. An image is "
        f"written with its tag, as {name[:80]}:latest"
    )
    raise wrong(dockerfile.file, each.line, message)


def plan(wish: Wish, bases: Mapping[str, Base] | None = None) -> Plan:
    """Return what is to be done.

    Args:
        wish: What is asked for.
        bases: The images that are needed, by the names of `Wish.images`; None to look for errors
            before they are known.

    Raises:
        InvalidRequest: Something is wrong; the line is named.
    """
    wish.check()
    stages = wish.needed()
    made: dict[int, StagePlan] = {}
    warnings: list[str] = []
    number = 0
    for stage in stages:
        planner = _Planner(wish, stage, made, bases, number)
        made[stage.index] = planner.plan()
        number += len(stage.instructions)
        warnings += planner.warnings
    return Plan(tuple(made.values()), number, tuple(warnings))


class _Planner:
    """Plans one stage."""

    def __init__(
        self,
        wish: Wish,
        stage: Stage,
        made: Mapping[int, StagePlan],
        bases: Mapping[str, Base] | None,
        number: int,
    ) -> None:
        self.warnings: list[str] = []
        self._wish = wish
        self._file = wish.dockerfile.file
        self._stage = stage
        self._made = made
        self._bases = bases
        self._number = number
        self._args: dict[str, str] = {}
        self._folders: list[str] = []
        self._steps: list[Step] = []
        self._notes: list[tuple[int, int, str]] = []
        self._cmd_is_own = False
        named = wish.base_of(stage)
        self._base: Base | int | None
        if not isinstance(named, str):
            under = made[named.index]
            self._base, self._config = named.index, under.config
            self._key, self._depth = under.key, under.depth
            self._folders += under.folders
            self._is_known = bases is not None
        elif bases is not None:
            self._base = base = bases[named]
            self._config = base.config
            self._key, self._depth = digest("base", base.identity), base.depth
            self._is_known = True
        else:
            self._base, self._config, self._key, self._depth = None, Config(), "", 0
            self._is_known = False

    def plan(self) -> StagePlan:
        for each in self._stage.instructions:
            self._number += 1
            words = Expander(self._wish.dockerfile.escape, self._variables())
            try:
                with located(self._file, each):
                    self._take(each, words)
            except InvalidRequest:
                # What a base image sets may be what is missing.
                if self._is_known or not words.unknown:
                    raise
        return StagePlan(
            self._stage,
            self._base,
            tuple(self._steps),
            tuple(self._notes),
            self._config,
            tuple(self._folders),
            self._key,
            self._depth,
        )

    def _variables(self) -> dict[str, str]:
        return {**self._args, **self._config.env}

    def _take(self, each: Instruction, words: Expander) -> None:
        if each.keyword == "RUN":
            self._step(each, self._run(each))
            return
        if each.keyword in {"COPY", "ADD"}:
            origin = origin_of(self._wish.dockerfile, self._stage, each)
            action = copy_action(each, words, self._config.cwd, self._wish.context, origin)
            self._step(each, action)
            return
        self._notes.append((self._number, each.line, each.shown))
        if each.keyword == "ARG":
            self._declare(each, words)
            return
        self._config = settings.apply(self._config, each, words)
        if each.keyword == "WORKDIR":
            self._folders.append(self._config.cwd)
        elif each.keyword == "CMD":
            self._cmd_is_own = True
        elif each.keyword == "ENTRYPOINT" and not self._cmd_is_own:
            self._config = replace(self._config, cmd=None)  # the base's are for its own program
        elif each.keyword == "VOLUME":
            self._warn(each, "VOLUME has no effect: each sandbox has a disk of its own")
        elif each.keyword == "MAINTAINER":
            self._warn(each, "MAINTAINER is out of date; write LABEL maintainer=…")
        elif each.keyword == "ENV":
            self._warn_of_secrets(each, settings.pairs(each.rest, words, "ENV"))

    def _declare(self, each: Instruction, words: Expander) -> None:
        declared = settings.declared(each, words)
        known = self._wish.globals()
        self._warn_of_secrets(each, declared)
        for name, default in declared.items():
            value = self._wish.args.get(name, known.get(name) if default is None else default)
            if value is not None:
                self._args[name] = value

    def _run(self, each: Instruction) -> RunAction:
        env = self._variables()
        hidden = {
            name: value
            for name, value in self._wish.args.items()
            if name in PROXY_ARGS and name not in env
        }
        if each.words is not None:
            if not each.words:
                raise ValueError("there is no program to run")
            return RunAction(each.words, None, env, hidden)
        shell = self._config.shell
        if len(each.heredocs) == 1 and _HEREDOC_ALONE.fullmatch(each.rest):
            text = each.heredocs[0].content
            if text.startswith("#!"):
                return RunAction((), text, env, hidden)
            return RunAction((*shell, text), None, env, hidden)
        behind = "".join(f"\n{heredoc.raw}" for heredoc in each.heredocs)
        return RunAction((*shell, each.rest + behind), None, env, hidden)

    def _step(self, each: Instruction, action: RunAction | CopyAction) -> None:
        self._depth += 1
        if self._depth >= CHAIN_DEPTH_MAX:
            raise ValueError(
                f"this is step {self._depth} of a chain, and a chain has at most {CHAIN_DEPTH_MAX} "
                "links with the last one; join steps, or begin with a compacted snapshot"
            )
        config = self._config
        places = (config.env, config.cwd, config.user)
        said = self._said(action)
        self._key = digest("step", self._key, said, places, self._folders)
        folders = tuple(dict.fromkeys(self._folders))
        step = Step(self._number, each.line, each.shown, self._key, config, folders, action)
        self._steps.append(step)
        self._folders = []

    def _said(self, action: RunAction | CopyAction) -> object:
        if isinstance(action, RunAction):
            return ["run", action.args, action.script, action.env]
        origin: object = None
        if isinstance(action.origin, int):
            origin = self._made[action.origin].key
        elif action.origin is not None and self._bases is not None:
            origin = self._bases[action.origin].identity
        return ["copy", origin, *action.said()]

    def _warn(self, each: Instruction, message: str) -> None:
        self.warnings.append(f"{self._file}:{each.line}: {message}")

    def _warn_of_secrets(self, each: Instruction, names: Mapping[str, object]) -> None:
        for name in names:
            if _SECRET.search(name):
                self._warn(
                    each, f"{each.keyword} {name} looks like a secret, and stays in snapshots"
                )


def _said(config: Config) -> dict[str, object]:
    """Return a configuration as values that JSON has."""
    return {
        "env": config.env,
        "cwd": config.cwd,
        "user": config.user,
        "entrypoint": config.entrypoint,
        "cmd": config.cmd,
        "ports": config.ports,
        "labels": config.labels,
        "healthcheck": config.healthcheck,
        "stop_signal": config.stop_signal,
        "volumes": config.volumes,
        "shell": config.shell,
    }
