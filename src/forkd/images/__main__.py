"""Build from the command line: `python -m forkd.images build RECIPE`, or only the `kernel`.

With `--json`, each line of standard output is one event:

    {"event": "progress", "stage": "rootfs", "fraction": 0.5, "message": "…"}
    {"event": "built", "key": …, "kernel": …, "initramfs": …, "rootfs": …, …}
    {"event": "built", "kernel": …, "kernel_version": …, "modules": …}     by `kernel`
    {"event": "failed", "code": "build", "message": "…", "context": {…}}

The exit status is 0 if the last event is `built`, else 1; 2 for a wrong command line.
SIGTERM and SIGINT end the build, which then leaves nothing behind.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkd.errors import ForkdError, InvalidRequest, NotFound
from forkd.host import files, folders, signals
from forkd.host.differences import write_differences
from forkd.host.process import Cancel
from forkd.images import namespace
from forkd.images.apart import MADE_NAME, PLAN_NAME
from forkd.images.bases import over_base
from forkd.images.builder import BuiltImage, build_recipe
from forkd.images.kernel import debian_kernel, is_debian, series_of
from forkd.images.layout import Cache
from forkd.images.plan import Plan, Workshop, make, result_name
from forkd.images.recipe import RECIPE_FILE_NAME, load_recipe
from forkd.images.registries import Access
from forkd.images.steps import Build
from forkd.images.stored import DOCKER_ARCHIVE, LAYOUT, OCI_ARCHIVE, Source
from forkd.images.unpacking import LayerLimits, unpack
from forkd.model.recipe import NamedRecipe, no_recipe, parse_base

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkd.images.apart import Cells
    from forkd.images.recipe import Recipe
    from forkd.model.progress import Progress

_TOLD_STEP = 0.05
"""How much more of an image is there each time that is told."""


def main(arguments: Sequence[str] | None = None, cells: Cells | None = None) -> int:
    """Run the command line `arguments`; return the exit status.

    Args:
        arguments: Those of this process if None.
        cells: Where what is somebody else's is handled; None for this very process.
    """
    options = _parser().parse_args(arguments)
    report = _report_json if options.json else _report_text
    with Cancel() as cancel:
        signals.on_stop(cancel.set)
        steps = Build(lambda progress: report(_progress_event(progress)), cancel)
        try:
            built = options.command(options, steps, cells)
        except ForkdError as error:
            report(_failed_event(error))
            return 1
    report(built)
    return 0


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--cache", type=Path, help="cache folder; yours by default")
    common.add_argument("--json", action="store_true", help="one JSON event per line")
    parser = argparse.ArgumentParser(prog="python -m forkd.images", description="Build images.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    image = commands.add_parser("build", parents=[common], help="build the image of a recipe")
    image.add_argument("recipe", type=Path, metavar="RECIPE", help="recipe file or its folder")
    image.add_argument("--agent", type=Path, help="the static guest agent")
    image.add_argument("--recipes", type=Path, help="folder of recipes that can be bases by name")
    image.add_argument("--memory-mib", type=int, help="of its machine, in place of the recipe's")
    image.add_argument("--memory-mib-max", type=int, help="of the helper machine that bakes it")
    image.set_defaults(command=_build_image)
    fetch = commands.add_parser("kernel", parents=[common], help="fetch Debian's kernel")
    fetch.add_argument("series", nargs="?", default="debian", help="such as 6.12 or 7")
    fetch.set_defaults(command=_fetch_kernel)
    differ = commands.add_parser("differ", help="write what a folder has that another lacks")
    for name in ("tree", "base", "output", "replaced"):
        differ.add_argument(name, type=Path)
    differ.set_defaults(command=_differ, json=True, cache=None)
    resolve = commands.add_parser("resolve", help="say which image of a registry a tag means")
    fetch = commands.add_parser("fetch", help="copy an image of a registry as an OCI layout")
    for each in (resolve, fetch):
        each.add_argument("--insecure", action="store_true", help="without TLS, if need be")
        each.add_argument("--auth-file", type=Path, help="credentials for registries")
        each.add_argument("reference", help="the image")
    fetch.add_argument("--bytes-max", type=int, required=True, help="what its layers may hold")
    fetch.add_argument("layout", type=Path, help="a folder that is made")
    resolve.set_defaults(command=_resolve, json=True)
    fetch.set_defaults(command=_fetch, json=True)
    unpack = commands.add_parser("unpack", help="unpack an image in files")
    unpack.add_argument("--bytes-max", type=int, required=True, help="what its layers may hold")
    unpack.add_argument("kind", choices=(LAYOUT, OCI_ARCHIVE, DOCKER_ARCHIVE))
    unpack.add_argument("path", type=Path, help="the file or folder")
    unpack.add_argument("tag", help="which image in it; empty for the only one")
    unpack.add_argument("folder", type=Path, help="where it is unpacked; is made")
    unpack.set_defaults(command=_unpack, json=True)
    make = commands.add_parser("make", help="make a planned root file system; for cells")
    make.add_argument("--json", action="store_true", help="one JSON event per line")
    make.add_argument("folder", type=Path, help="where the plan is, and what is made of it goes")
    make.add_argument("tools", type=Path, help="programs to find before others of their name")
    make.set_defaults(command=_make_planned)
    return parser


def _build_image(options: argparse.Namespace, steps: Build, cells: Cells | None) -> dict[str, Any]:
    recipe, cache = _load(options.recipe, options.recipes), Cache.open(options.cache)
    _check_memory(recipe, options.memory_mib, options.memory_mib_max)
    return built_event(build_recipe(recipe, cache, options.agent, steps, cells))


def _load(path: Path, known: Path | None) -> Recipe:
    """Return a recipe of this host, over its base if it has one.

    Raises:
        NotFound: There is no such recipe, or no such base.
        InvalidRequest: See `load_recipe` and `over_base`.
    """

    def find(recipe: Recipe, name: str) -> Recipe:
        source = parse_base(name, recipe.folder)
        if isinstance(source, Path):
            return load_recipe(source)
        if isinstance(source, NamedRecipe) and known is not None:
            found = folders.matching(known, f"*/{RECIPE_FILE_NAME}")
            there = {path.parent.name: path.parent for path in found}
            if source.name in there:
                return load_recipe(there[source.name])
            raise no_recipe(source.name, sorted(there))
        raise NotFound(f"no recipe {name!r} on this host")

    return over_base(load_recipe(path), find)


def _check_memory(recipe: Recipe, asked_mib: int | None, max_mib: int | None) -> None:
    """Return if the machine of a recipe fits the helper machine; known before its image is built.

    Raises:
        InvalidRequest: It does not.
    """
    wants_mib = recipe.machine.memory_mib if asked_mib is None else asked_mib
    if max_mib is not None and wants_mib > max_mib:
        source = "machine.memory_mib" if asked_mib is None else "--memory"
        raise InvalidRequest(
            f"the recipe {recipe.name} asks for {wants_mib} MiB of memory ({source}), but the "
            f"helper machine has {max_mib} MiB; lower {source}, or run `forkd down`, set "
            "FORKD_MACHINE_MEMORY_MIB, and run `forkd up`",
            field="machine.memory_mib",
        )


def _make_planned(options: argparse.Namespace, steps: Build, _: Cells | None) -> dict[str, Any]:
    folder: Path = options.folder
    planned = Plan.model_validate_json(files.read_all(folder / PLAN_NAME))
    scratch = folder / "scratch"
    files.make_folder(scratch)
    workshop = Workshop(scratch, folder / result_name(planned), options.tools)
    made = make(planned, workshop, steps)
    namespace.remove(scratch, steps)
    folders.write(folder / MADE_NAME, made.model_dump_json().encode())
    return {"event": "built", "kernel": ""}


def _differ(options: argparse.Namespace, _: Build, __: Cells | None) -> dict[str, Any]:
    replaced = write_differences(options.tree, options.base, options.output)
    folders.write(options.replaced, json.dumps(replaced).encode())
    return {"event": "built", "kernel": ""}


def _resolve(options: argparse.Namespace, _: Build, __: Cells | None) -> dict[str, Any]:
    from forkd.images.pulling import digest_now  # noqa: PLC0415 - loads httpx

    access = Access(options.insecure, options.auth_file)
    return {"event": "resolved", "digest": digest_now(options.reference, access)}


def _fetch(options: argparse.Namespace, steps: Build, _: Cells | None) -> dict[str, Any]:
    from forkd.images.pulling import fetch  # noqa: PLC0415 - loads httpx

    shown = -1.0

    def tell(done: int, total: int) -> None:
        nonlocal shown
        fraction = done / total if total else 1.0
        if fraction >= shown + _TOLD_STEP:
            shown = fraction
            text = f"{done >> 20} of {total >> 20} MiB of {options.reference}"
            steps.tell("packages", text, fraction / 2)

    access = Access(options.insecure, options.auth_file)
    fetch(options.reference, access, options.layout, bytes_max=options.bytes_max, tell=tell)
    return {"event": "fetched"}


def _unpack(options: argparse.Namespace, steps: Build, _: Cells | None) -> dict[str, Any]:
    def tell(fraction: float) -> None:
        steps.tell("packages", "unpacking layers", 0.5 + fraction / 2)

    source = Source(options.kind, options.path, options.tag)
    most = LayerLimits(options.bytes_max)
    return {"event": "unpacked", "bytes": unpack(source, options.folder, most, tell)}


def _fetch_kernel(options: argparse.Namespace, steps: Build, _: Cells | None) -> dict[str, Any]:
    if not is_debian(options.series):
        raise InvalidRequest(
            f"{options.series} is no version of Linux, such as 6.12", field="series"
        )
    found = debian_kernel(Cache.open(options.cache), steps, series_of(options.series))
    return {
        "event": "built",
        "kernel": str(found.vmlinuz),
        "kernel_version": found.version,
        "modules": str(found.modules),
    }


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
        sys.stdout.write(f"{event.get('rootfs', event['kernel'])}\n")


if __name__ == "__main__":
    sys.exit(main())
