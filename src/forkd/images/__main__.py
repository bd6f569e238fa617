"""Build an image from the command line: `python -m forkd.images build RECIPE`.

With `--json`, each line of standard output is one event:

    {"event": "progress", "stage": "rootfs", "fraction": 0.5, "message": "…"}
    {"event": "built", "key": …, "kernel": …, "initramfs": …, "rootfs": …, …}
    {"event": "failed", "code": "build", "message": "…", "context": {…}}

The exit status is 0 if the last event is `built`, else 1; 2 for a wrong command line.
SIGTERM and SIGINT end the build, which then leaves nothing behind.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkd.errors import ForkdError
from forkd.host.process import Cancel
from forkd.images.builder import BuiltImage, build
from forkd.images.layout import Cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkd.model.progress import Progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments`; return the exit status."""
    options = _parser().parse_args(arguments)
    report = _report_json if options.json else _report_text
    with Cancel() as cancel:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: cancel.set())
        try:
            built = build(
                options.recipe,
                cache=Cache.open(options.cache),
                agent=options.agent,
                progress=lambda progress: report(_progress_event(progress)),
                cancel=cancel,
            )
        except ForkdError as error:
            report(_failed_event(error))
            return 1
    report(built_event(built))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m forkd.images", description="Build images.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("build", help="build the image of a recipe")
    command.add_argument("recipe", type=Path, metavar="RECIPE", help="recipe file or its folder")
    command.add_argument("--cache", type=Path, help="cache folder; yours by default")
    command.add_argument("--agent", type=Path, help="the static guest agent")
    command.add_argument("--json", action="store_true", help="one JSON event per line")
    return parser


def built_event(built: BuiltImage) -> dict[str, Any]:
    """Return what a finished build is reported as."""
    image = built.image
    return {
        "event": "built",
        "key": image.key,
        "name": image.name,
        "kernel": str(image.kernel),
        "kernel_version": built.kernel_version,
        "initramfs": None if image.initramfs is None else str(image.initramfs),
        "rootfs": str(image.rootfs),
        "disk_bytes": image.disk_bytes,
    }


def _progress_event(progress: Progress) -> dict[str, Any]:
    return {
        "event": "progress",
        "stage": progress.stage,
        "fraction": progress.fraction,
        "message": progress.message,
    }


def _failed_event(error: ForkdError) -> dict[str, Any]:
    return {
        "event": "failed",
        "code": error.code,
        "message": str(error),
        "context": error.context,
    }


def _report_json(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _report_text(event: dict[str, Any]) -> None:
    if event["event"] == "progress":
        sys.stderr.write(f"{event['stage']:>10}  {event['message']}\n")
    elif event["event"] == "failed":
        sys.stderr.write(f"error: {event['message']} ({event['code']})\n")
    else:
        sys.stdout.write(f"{event['rootfs']}\n")


if __name__ == "__main__":
    sys.exit(main())
