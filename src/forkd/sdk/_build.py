"""What builds of Dockerfiles need besides a daemon: options, what is told, values of the wire."""

from __future__ import annotations

import json
import re
import tarfile
import time
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING

from forkd.errors import InvalidRequest
from forkd.sdk._dockerfile.packing import Owner, Packer
from forkd.sdk._dockerfile.plan import Base
from forkd.sdk._dockerfile.settings import Config
from forkd.sdk._images import ARCHIVE_SUFFIXES, SCHEMES
from forkd.wire.v2 import ProgressEvent
from forkd.wire.v2_builds import ImageConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from forkd.sdk._dockerfile.context import Context
    from forkd.sdk._dockerfile.copying import CopyAction
    from forkd.sdk._results import BuildStep
    from forkd.wire.v2 import SnapshotInfoDetail

LAST_LINES = 20
"""How many lines of a failed step's output are in its error."""

LINE_CHARS_MAX = 200
"""How much of a line that a step prints is told."""

OFFLINE = ("resolve", "resolution", "network is unreachable", "network unreachable")
"""What programs say that find no network."""

PROGRAM_LOG = "/tmp/forkd-program.log"  # noqa: S108 - a guest's
"""Where the image's own program writes in the machine, if it is started."""

_RESERVED = re.compile(r"image-[0-9a-f]{12}")

_READY = """\
"$@" </dev/null >{log} 2>&1 &
pid=$!
{wait}"""

_WAIT = """\
until /bin/sh -c {ready}; do
  if ! kill -0 "$pid" 2>/dev/null; then
    wait "$pid"; code=$?
    cat {log}; echo "the program has ended with $code"
    exit 1
  fi
  sleep 0.1
done
"""


@dataclass(frozen=True, slots=True)
class Options:
    """How a build is done; `builds.build` documents each."""

    tag: str | None
    cache: bool
    network: bool | str | list[str] | None
    machine: dict[str, int | None]
    pull: str
    warm: bool
    ready: str | None
    step_timeout_s: float

    def check(self) -> None:
        """Return if a build can have these.

        Raises:
            InvalidRequest: It cannot.
        """
        if self.tag is not None and _RESERVED.fullmatch(self.tag):
            raise InvalidRequest(
                f"tag: {self.tag!r} is kept for snapshots of the daemon; choose another name",
                field="tag",
            )
        if self.ready is not None and not self.warm:
            raise InvalidRequest("ready goes with warm, which starts the program", field="ready")


@dataclass(slots=True)
class Seen:
    """What a build has done, and who is told.

    Attributes:
        on_step: Is told of each instruction that is done.
        on_progress: Is told what happens meanwhile.
        steps: What was done.
        last: The last lines that a program has printed.
    """

    on_step: Callable[[BuildStep], object] | None
    on_progress: Callable[[ProgressEvent], object] | None
    steps: list[BuildStep] = field(default_factory=list)
    last: list[str] = field(default_factory=list)

    def step(self, step: BuildStep) -> None:
        """Note an instruction that is done."""
        self.steps.append(step)
        if self.on_step is not None:
            self.on_step(step)

    def progress(self, stage: str, message: str) -> None:
        """Tell what happens now."""
        if self.on_progress is not None:
            self.on_progress(ProgressEvent(stage=stage, message=message[:LINE_CHARS_MAX]))

    def output(self, text: str) -> None:
        """Tell what a program prints."""
        for line in text.splitlines():
            if line.strip():
                self.last = [*self.last, line[:LINE_CHARS_MAX]][-LAST_LINES:]
                self.progress("run", line)

    def said(self) -> str:
        """Return the end of what a program has printed, and what that may mean."""
        text = "\n".join(self.last) or "it printed nothing"
        if any(words in text.lower() for words in OFFLINE):
            text += "\nsteps have no network unless the build is given one: --network internet"
        return text


class Clock:
    """How long something takes."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()

    @property
    def took_s(self) -> float:
        """The time since then."""
        return round(time.monotonic() - self._begun_s, 3)


def base_of(info: SnapshotInfoDetail, salt: str, where: str) -> Base:
    """Return a snapshot as what a stage begins with.

    Raises:
        InvalidRequest: It cannot be forked, or it is not known what its image says of programs.
    """
    if info.status != "ready":
        raise InvalidRequest(f"{where}: snapshot {info.tag} is {info.status}", field="dockerfile")
    said = info.config
    if said is None:
        raise InvalidRequest(
            f"{where}: snapshot {info.tag} does not say which variables and user its image has: it "
            "was made by an earlier release, or unpacked; make it again",
            field="dockerfile",
        )
    members = said.model_dump()
    lists = ("entrypoint", "cmd", "ports", "volumes", "shell")
    members |= {name: None if members[name] is None else tuple(members[name]) for name in lists}
    identity = f"{info.tag} {info.created_at_unix} {info.image_key} {info.build_key} {salt}"
    return Base(info.tag, identity, Config(**members), info.chain_depth)


def wire_config(config: Config) -> ImageConfig:
    """Return a configuration as requests have it."""
    return ImageConfig.model_validate_json(json.dumps(asdict(config)))


def image_path(name: str, root: Path) -> str:
    """Return an image of FROM for `image_reference`: paths are below the context."""
    for scheme in SCHEMES:
        if name.startswith(scheme):
            return f"{scheme}{root / name.removeprefix(scheme)}"
    if name.startswith(("./", "../", "/")) or name.lower().endswith(ARCHIVE_SUFFIXES):
        return str(root / name)
    return name


def ready_script(ready: str | None, log: str = PROGRAM_LOG) -> str:
    """Return what `sh` reads to start a program, its arguments, and to wait until it is ready."""
    quoted = "" if ready is None else "'" + ready.replace("'", "'\\''") + "'"
    wait = "" if ready is None else _WAIT.format(ready=quoted, log=log)
    return _READY.format(log=log, wait=wait)


def owner_of(text: str, passwd: str, group: str) -> Owner:
    """Return the numbers of a user and a group.

    Args:
        text: Names or numbers, with `:` and a group or without.
        passwd: The machine's `/etc/passwd`.
        group: Its `/etc/group`.

    Raises:
        ValueError: The machine has no such user or group.
    """
    user, _, wanted = text.partition(":")
    accounts = {each[0]: each for line in passwd.splitlines() if len(each := line.split(":")) > 3}  # noqa: PLR2004 - name, password, numbers
    if user.isdigit():
        uid = gid = int(user)
    elif (account := accounts.get(user)) is not None:
        uid, gid = int(account[2]), int(account[3])
    else:
        raise ValueError(f"the image has no user {user!r}")
    if not wanted:
        return Owner(uid, gid)
    if wanted.isdigit():
        return Owner(uid, int(wanted))
    for line in group.splitlines():
        parts = line.split(":")
        if parts[0] == wanted and len(parts) > 2:  # noqa: PLR2004 - name, password, number
            return Owner(uid, int(parts[2]))
    raise ValueError(f"the image has no group {wanted!r}")


def context_archive(
    action: CopyAction, context: Context, packers: list[Packer], name: str | None
) -> Iterator[bytes]:
    """Yield the archive of what a step copies from the context.

    Args:
        action: It.
        context: Where files are.
        packers: One for each part.
        name: What its only file is called in the machine; None for as they are called here.
    """
    for part, packer in zip(action.parts, packers, strict=True):
        yield from packer.of_context(context, part, name or part.name)
    yield Packer.end()


def is_folder(file: IO[bytes]) -> bool:
    """Whether an archive that another machine has sent has a folder's contents."""
    file.seek(0)
    with tarfile.open(fileobj=file) as archive:
        first = archive.next()
    file.seek(0)
    return first is None or first.isdir()


def archive_of(
    packer: Packer, file: IO[bytes], name: str | None, skipped: list[str]
) -> Iterator[bytes]:
    """Yield the archive of what another machine has sent; as `Packer.of_archive`."""
    yield from packer.of_archive(file, name, skipped)
    yield Packer.end()
