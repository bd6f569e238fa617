"""Read or write one pack in a process of its own, beside the daemon.

    python -m forkd.packs write        JSON of a job on standard input, the pack on output
    python -m forkd.packs read FOLDER  the pack on standard input, JSON of its head on output

The daemon forks machines in milliseconds and a pack takes seconds of processor, so they do not
share an interpreter; nor does a hostile pack get near the daemon's memory.  An error is one line
of JSON on standard error, `{"code", "message", "context"}`, and status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from forkd.errors import ForkdError
from forkd.packs.manifest import Link
from forkd.packs.reader import Terms, read
from forkd.packs.writer import Source, write

if TYPE_CHECKING:
    from collections.abc import Sequence

NICE = 10
"""Packing waits for whatever machines and the daemon do."""


class Job(BaseModel):
    """What to pack, as the daemon says it; the members of `Source`."""

    links: tuple[Link, ...]
    folders: tuple[Path, ...]
    rootfs: Path | None
    descriptors: tuple[int, ...] | None = None


class Outcome(BaseModel):
    """What was read: the manifest, as it stands in the pack, and who signed it, as hex."""

    manifest: str
    key: str | None


def main(args: Sequence[str]) -> int:
    """Do one of the two; return the exit status."""
    parser = argparse.ArgumentParser(prog="forkd.packs")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write")
    reading = commands.add_parser("read")
    reading.add_argument("folder", type=Path)
    reading.add_argument("--trusted", type=bytes.fromhex, action="append", default=[])
    reading.add_argument("--allow-unsigned", action="store_true")
    reading.add_argument("--room-bytes", type=int, required=True)
    given = parser.parse_args(args)
    os.nice(NICE)
    try:
        if given.command == "write":
            _write()
        else:
            terms = Terms(tuple(given.trusted), given.allow_unsigned, given.room_bytes)
            _read(given.folder, terms)
    except ForkdError as error:
        return _failed(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _write() -> None:
    job = Job.model_validate_json(sys.stdin.buffer.read())
    for piece in write(Source(job.links, job.folders, job.rootfs, job.descriptors)):
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


def _read(folder: Path, terms: Terms) -> None:
    head = read(sys.stdin.buffer, folder, terms)
    key = None if head.key is None else head.key.hex()
    sys.stdout.write(Outcome(manifest=head.raw.decode(), key=key).model_dump_json())
    sys.stdout.flush()


def _failed(error: ForkdError) -> int:
    said = {"code": error.code, "message": str(error), "context": error.context}
    sys.stderr.write(json.dumps(said) + "\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
