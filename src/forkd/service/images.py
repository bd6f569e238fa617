"""Build images in a thread, with progress, and end the build when nobody wants it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from forkd.host.process import Cancel
from forkd.images import builder
from forkd.images.layout import Cache

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forkd.images.builder import BuiltImage
    from forkd.model.progress import Progress
    from forkd.service.settings import HostSettings


async def build(
    settings: HostSettings, recipe_path: Path, tell: Callable[[Progress], None]
) -> BuiltImage:
    """Build the image of a recipe, unless it is built already.

    Args:
        settings: Where the cache and the agent are.
        recipe_path: A folder with a `recipe.toml`, or such a file.
        tell: Called in the event loop's thread with each step.

    Raises:
        ForkdError: As `forkd.images.builder.build`.
    """
    loop = asyncio.get_running_loop()

    def work(cancel: Cancel) -> BuiltImage:
        return builder.build(
            recipe_path,
            cache=Cache.open(settings.cache_dir),
            agent=settings.agent,
            progress=lambda step: _tell_from_thread(loop, tell, step),
            cancel=cancel,
        )

    with Cancel() as cancel:
        building = loop.run_in_executor(None, work, cancel)
        try:
            return await asyncio.shield(building)
        except asyncio.CancelledError:
            cancel.set()
            await asyncio.wait([building])
            building.exception()  # it says that it was cancelled, and we know
            raise


def _tell_from_thread(
    loop: asyncio.AbstractEventLoop, tell: Callable[[Progress], None], step: Progress
) -> None:
    loop.call_soon_threadsafe(tell, step)
