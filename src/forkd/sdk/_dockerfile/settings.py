"""What an image says of the programs that are run in it, and what instructions change of that."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from forkd.sdk._dockerfile.words import NAME, Expander, raw_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from forkd.sdk._dockerfile.reading import Instruction

SHELL_DEFAULT = ("/bin/sh", "-c")
WORKDIR_DEFAULT = "/"
USER_DEFAULT = "root"

_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?(?:ns|us|µs|ms|s|m|h))+|0")
_PORT = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?(?:/(tcp|udp|sctp))?", re.IGNORECASE)
_SIGNAL = re.compile(r"(?:SIG)?[A-Z][A-Z0-9+-]*|[0-9]{1,2}")
_PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class Config:
    """What an image says of programs in it.

    Attributes:
        env: Variables.
        cwd: Where programs start.
        user: Who they run as: a name or a number, with `:` and a group or without.
        entrypoint: The program that the image is for; None for none.
        cmd: Its arguments, or the program if there is no entrypoint; None for none.
        ports: Ports that programs listen on, as `80/tcp`.
        labels: Text by key.
        healthcheck: The program that says whether all is well, and how it is asked.
        stop_signal: What ends the program; empty for the usual one.
        volumes: Folders that are data.
        shell: What reads lines of RUN, CMD and ENTRYPOINT.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = WORKDIR_DEFAULT
    user: str = USER_DEFAULT
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    ports: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    healthcheck: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    stop_signal: str = ""
    volumes: tuple[str, ...] = ()
    shell: tuple[str, ...] = SHELL_DEFAULT

    @property
    def program(self) -> tuple[str, ...]:
        """The program that the image is for, with its arguments; empty if it names none."""
        return (*(self.entrypoint or ()), *(self.cmd or ()))


def apply(config: Config, each: Instruction, words: Expander) -> Config:
    """Return a configuration as an instruction changes it; one that changes none leaves it.

    Raises:
        ValueError: The instruction is malformed.
    """
    change = _CHANGES.get(each.keyword)
    return config if change is None else change(config, each, words)


def pairs(text: str, words: Expander, keyword: str) -> dict[str, str]:
    """Return what ENV and LABEL say: `key=value …`, or `key value` up to the end.

    Raises:
        ValueError: It is neither.
    """
    first, *behind = text.split(maxsplit=1)
    if "=" not in first:
        if not behind:
            raise ValueError(f"{keyword} {first[:80]} has no value; write {keyword} {first}=VALUE")
        return {words.word(first): words.word(behind[0])}
    found: dict[str, str] = {}
    for word in raw_words(text, words.escape):
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"{word[:80]!r} is not KEY=VALUE; values with blanks need quotes")
        found[words.word(name)] = words.word(value)
    return found


def joined(cwd: str, path: str) -> str:
    """Return a path from a working directory, without `.` and `..`."""
    made = posixpath.normpath(posixpath.join(cwd, path))
    return f"/{made.lstrip('/')}"


def _env(config: Config, each: Instruction, words: Expander) -> Config:
    found = pairs(each.rest, words, "ENV")
    for name in found:
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"{name[:80]!r} is no name of a variable")
    return replace(config, env={**config.env, **found})


def _label(config: Config, each: Instruction, words: Expander) -> Config:
    found = pairs(each.rest, words, "LABEL")
    return replace(config, labels={**config.labels, **found})


def _maintainer(config: Config, each: Instruction, _: Expander) -> Config:
    return replace(config, labels={**config.labels, "maintainer": each.rest})


def _workdir(config: Config, each: Instruction, words: Expander) -> Config:
    path = words.word(each.rest)
    if not path or "\0" in path:
        raise ValueError("WORKDIR names no folder")
    return replace(config, cwd=joined(config.cwd, path))


def _user(config: Config, each: Instruction, words: Expander) -> Config:
    user = words.word(each.rest)
    if not user or len(user.split()) != 1 or user.startswith(":"):
        raise ValueError(f"USER is a name or a number, with :GROUP or without, not {user[:80]!r}")
    return replace(config, user=user)


def _command(config: Config, each: Instruction) -> tuple[str, ...]:
    return each.words if each.words is not None else (*config.shell, each.rest)


def _entrypoint(config: Config, each: Instruction, _: Expander) -> Config:
    return replace(config, entrypoint=_command(config, each) or None)


def _cmd(config: Config, each: Instruction, _: Expander) -> Config:
    return replace(config, cmd=_command(config, each) or None)


def _shell(config: Config, each: Instruction, _: Expander) -> Config:
    if not each.words:
        raise ValueError('SHELL is a list of strings, such as ["/bin/bash", "-c"]')
    return replace(config, shell=each.words)


def _expose(config: Config, each: Instruction, words: Expander) -> Config:
    ports = dict.fromkeys(config.ports)
    for text in words.word(each.rest).split():
        found = _PORT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:80]!r} is no port; ports are as 80, 80/udp or 8000-8010")
        first, last = int(found[1]), int(found[2] or found[1])
        if not 0 < first <= last <= _PORT_MAX:
            raise ValueError(f"{text!r}: ports are 1 to {_PORT_MAX}")
        ports[f"{first}{f'-{last}' if last > first else ''}/{(found[3] or 'tcp').lower()}"] = None
    return replace(config, ports=tuple(ports))


def _healthcheck(config: Config, each: Instruction, _: Expander) -> Config:
    kind, *command = each.rest.split(maxsplit=1)
    if kind.upper() == "NONE" and not command:
        return replace(config, healthcheck={"test": ("NONE",)})
    if kind.upper() != "CMD" or not command:
        raise ValueError("HEALTHCHECK is `HEALTHCHECK [FLAGS] CMD COMMAND`, or `HEALTHCHECK NONE`")
    test = ("CMD-SHELL", command[0]) if each.words is None else ("CMD", *each.words)
    said: dict[str, str | tuple[str, ...]] = {"test": test}
    for name, value in each.flags:
        good = (value or "").isdigit() if name == "retries" else _DURATION.fullmatch(value or "")
        if not good:
            what = "a number" if name == "retries" else "a time such as 30s or 1m30s"
            raise ValueError(f"--{name} is {what}, not {(value or '')[:80]!r}")
        said[name.replace("-", "_")] = value or ""
    return replace(config, healthcheck=said)


def _stopsignal(config: Config, each: Instruction, words: Expander) -> Config:
    signal = words.word(each.rest)
    if _SIGNAL.fullmatch(signal.upper()) is None:
        raise ValueError(f"{signal[:80]!r} is no signal; signals are as SIGTERM or 15")
    return replace(config, stop_signal=signal.upper())


def _volume(config: Config, each: Instruction, words: Expander) -> Config:
    texts = each.words if each.words is not None else tuple(each.rest.split())
    found = [words.word(text) for text in texts]
    if not all(found):
        raise ValueError("VOLUME names no folder")
    return replace(config, volumes=tuple(dict.fromkeys((*config.volumes, *found))))


_CHANGES: dict[str, Callable[[Config, Instruction, Expander], Config]] = {
    "CMD": _cmd,
    "ENTRYPOINT": _entrypoint,
    "ENV": _env,
    "EXPOSE": _expose,
    "HEALTHCHECK": _healthcheck,
    "LABEL": _label,
    "MAINTAINER": _maintainer,
    "SHELL": _shell,
    "STOPSIGNAL": _stopsignal,
    "USER": _user,
    "VOLUME": _volume,
    "WORKDIR": _workdir,
}


def declared(each: Instruction, words: Expander) -> dict[str, str | None]:
    """Return what an ARG declares, with its defaults; None for a name without one.

    Raises:
        ValueError: A name is none.
    """
    found: dict[str, str | None] = {}
    for word in raw_words(each.rest, words.escape):
        name, equals, value = word.partition("=")
        if NAME.fullmatch(name) is None:
            raise ValueError(f"{name[:80]!r} is no name of a variable")
        found[name] = words.word(value) if equals else None
    return found
