"""A Dockerfile as stages; what no build of it could do is refused here, before there is a build."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.sdk._dockerfile.faults import wrong
from forkd.sdk._dockerfile.reading import read

if TYPE_CHECKING:
    from forkd.sdk._dockerfile.reading import Instruction

SUPPORTED = {
    "ADD": {"chown", "chmod", "link"},
    "ARG": set(),
    "CMD": set(),
    "COPY": {"from", "chown", "chmod", "link"},
    "ENTRYPOINT": set(),
    "ENV": set(),
    "EXPOSE": set(),
    "FROM": {"platform"},
    "HEALTHCHECK": {"interval", "timeout", "start-period", "start-interval", "retries"},
    "LABEL": set(),
    "MAINTAINER": set(),
    "RUN": set(),
    "SHELL": set(),
    "STOPSIGNAL": set(),
    "USER": set(),
    "VOLUME": set(),
    "WORKDIR": set(),
}
"""Instructions, and the flags that each may have."""

REFUSED = {
    "ONBUILD": "it is for builds of other images; write the instruction into their Dockerfiles",
}
"""Instructions that Docker knows, and why there are none of them here."""

REFUSED_FLAGS = {
    ("RUN", "mount"): "a step sees only what the steps before it have left; COPY what it needs",
    ("RUN", "network"): "the network of all steps is chosen with `forkd build --network`",
    ("RUN", "security"): "each step has a machine of its own, in which it may be root",
    ("RUN", "device"): "a machine has no devices of the host",
    ("COPY", "parents"): "name each file with its folder",
    ("COPY", "exclude"): "list the files in .dockerignore",
    ("ADD", "exclude"): "list the files in .dockerignore",
    ("ADD", "checksum"): "it is for remote files, which ADD does not fetch here",
    ("ADD", "keep-git-dir"): "it is for repositories, which ADD does not fetch here",
    ("ADD", "unpack"): "an archive of the context is always unpacked by ADD, and never by COPY",
}
"""Flags that Docker knows, and what to do instead."""

PLATFORM = "linux/amd64"

_STAGE_NAME = re.compile(r"[a-z][a-z0-9_.-]*")
_FROM_PARTS = 3


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: a base, and what is done to it.

    Attributes:
        index: Its number, from 0.
        name: What it is called, in small letters; None for nothing.
        base: What its FROM names, variables not replaced.
        instructions: All of them, its FROM first.
    """

    index: int
    name: str | None
    base: str
    instructions: tuple[Instruction, ...]

    @property
    def line(self) -> int:
        """Where it begins."""
        return self.instructions[0].line


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """A Dockerfile in which nothing is wrong as far as its text says.

    Attributes:
        file: What it is called in errors.
        escape: Its escape character.
        before: The ARGs before the first FROM.
        stages: Its stages, at least one.
    """

    file: str
    escape: str
    before: tuple[Instruction, ...]
    stages: tuple[Stage, ...]

    def find(self, name: str, before: int) -> Stage | None:
        """Return the stage of a name or a number among the first `before`."""
        for stage in reversed(self.stages[:before]):
            if name.lower() == stage.name or name == str(stage.index):
                return stage
        return None

    def target(self, name: str | None) -> Stage:
        """Return the stage that is to be built: the last one unless another is named.

        Raises:
            InvalidRequest: There is none of that name.
        """
        if name is None:
            return self.stages[-1]
        found = self.find(name, len(self.stages))
        if found is None:
            raise wrong(self.file, self.stages[-1].line, f"no stage {name!r}; {self.names()}")
        return found

    def names(self) -> str:
        """Return which stages there are, as a part of a sentence."""
        named = [stage.name or str(stage.index) for stage in self.stages]
        return f"its stages are {', '.join(named)}"


def parse(text: str, file: str) -> Dockerfile:
    """Return what a Dockerfile says.

    Args:
        text: What is in it.
        file: What it is called in errors.

    Raises:
        InvalidRequest: Something in it is wrong or not supported; the line is named.
    """
    instructions, escape = read(text, file)
    for each in instructions:
        _check(each, file)
    before: list[Instruction] = []
    stages: list[Stage] = []
    for each in instructions:
        if each.keyword == "FROM":
            stages.append(_stage(each, stages, file))
        elif stages:
            last = stages[-1]
            stages[-1] = Stage(last.index, last.name, last.base, (*last.instructions, each))
        elif each.keyword == "ARG":
            before.append(each)
        else:
            raise wrong(file, each.line, f"{each.keyword} is before the first FROM")
    if not stages:
        raise wrong(file, 1, "there is no FROM, which says what to begin with")
    return Dockerfile(file, escape, tuple(before), tuple(stages))


def _check(each: Instruction, file: str) -> None:
    """Return if nothing is wrong with an instruction wherever it is."""
    keyword = each.keyword
    if keyword in REFUSED:
        raise wrong(file, each.line, f"{keyword} is not supported: {REFUSED[keyword]}")
    if keyword not in SUPPORTED:
        close = difflib.get_close_matches(keyword, SUPPORTED, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise wrong(file, each.line, f"{keyword[:40]!r} is no instruction{meant}")
    for name, value in each.flags:
        _check_flag(each, name, value, file)
    if not each.rest and not each.words:
        raise wrong(file, each.line, f"{keyword} needs an argument")


def _check_flag(each: Instruction, name: str, value: str | None, file: str) -> None:
    keyword = each.keyword
    if (why := REFUSED_FLAGS.get((keyword, name))) is not None:
        raise wrong(file, each.line, f"{keyword} --{name} is not supported: {why}")
    if name not in SUPPORTED[keyword]:
        known = ", ".join(f"--{flag}" for flag in sorted(SUPPORTED[keyword])) or "none"
        message = f"{keyword} has no flag --{name[:40]}; its flags are: {known}"
        raise wrong(file, each.line, message)
    if [flag for flag, _ in each.flags].count(name) > 1:
        raise wrong(file, each.line, f"--{name} is there twice")
    if not value and name != "link":
        raise wrong(file, each.line, f"--{name} needs a value, as --{name}=VALUE")


def _stage(each: Instruction, stages: list[Stage], file: str) -> Stage:
    """Return the stage that a FROM begins."""
    base, *rest = each.rest.split()
    name = None
    if rest:
        if len(rest) != _FROM_PARTS - 1 or rest[0].upper() != "AS":
            raise wrong(file, each.line, f"FROM is `FROM IMAGE [AS NAME]`, not {each.rest[:80]!r}")
        name = rest[1].lower()
        if _STAGE_NAME.fullmatch(name) is None:
            message = f"{rest[1][:80]!r} is no name of a stage: a letter, then letters, digits, _.-"
            raise wrong(file, each.line, message)
        if any(stage.name == name for stage in stages):
            raise wrong(file, each.line, f"another stage is called {name!r}")
    return Stage(len(stages), name, base, (each,))
