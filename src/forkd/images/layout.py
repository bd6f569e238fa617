"""Where things lie in the cache folder.

    kernels/<version>/{vmlinuz,modules/,kernel.json}
    initramfs/<key>.cpio
    images/<key>/{rootfs.ext4,image.json,manifest.json}
    references/<sha256>.json                        what a tag meant last: `forkd.images.inventory`
    locks/<name>.lock

Everything but a lock is written aside, under a name that begins with `.partial-`, and
renamed when it is whole; so a name without that prefix always means a finished thing.
Everything can be deleted at any time: it is built again when next needed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import BuildError, ForkdError, HostError
from forkd.host import files, folders, proc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PARTIAL_PREFIX = ".partial-"


def default_cache_folder() -> Path:
    """Return where a user's cache is: `$XDG_CACHE_HOME/forkd` or `~/.cache/forkd`."""
    base = proc.environment().get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else proc.home() / ".cache") / "forkd"


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache folder."""

    folder: Path

    @classmethod
    def open(cls, folder: Path | None = None) -> Cache:
        """Return the cache in `folder`, or the user's; its folders exist from now on.

        Raises:
            BuildError: They cannot be made.
            CapacityError: There is no room for them.
        """
        cache = cls((folder or default_cache_folder()).absolute())
        try:
            for each in (cache.kernels, cache.initramfs, cache.images, cache.locks):
                folders.make(each)
        except HostError as error:
            raise BuildError(f"cannot use the cache {cache.folder}: {error}") from error
        return cache

    @property
    def kernels(self) -> Path:
        """Kernels, one folder for each version."""
        return self.folder / "kernels"

    @property
    def initramfs(self) -> Path:
        """Archives that a kernel runs first."""
        return self.folder / "initramfs"

    @property
    def images(self) -> Path:
        """Root file systems, one folder for each key."""
        return self.folder / "images"

    @property
    def locks(self) -> Path:
        """Lock files; they stay when their lock goes."""
        return self.folder / "locks"

    @contextlib.contextmanager
    def lock(self, name: str, wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Keep every other builder of the thing called `name` waiting; see `files.lock`."""
        with files.lock(self.locks / f"{name}.lock", wait=wait):
            yield

    @contextlib.contextmanager
    def partial(
        self, path: Path, remove: Callable[[Path], None] = files.remove_tree
    ) -> Iterator[Path]:
        """Give a new folder beside `path` to build in, and remove what is left of it after.

        Use it under the `lock` of the thing.  Renaming the folder to `path` finishes it.
        What an earlier builder of the same thing left in a crash is removed first.
        """
        aside = path.with_name(PARTIAL_PREFIX + path.name)
        remove(aside)
        folders.make(aside)
        try:
            yield aside
        finally:
            remove(aside)

    def sweep(self, remove: Callable[[Path], None] = files.remove_tree) -> None:
        """Remove what crashed builders of root file systems left and nobody is building now.

        What cannot be removed stays, as in a cache that we only read and others build in: it is
        in the way of no other image.
        """
        for aside in folders.matching(self.images, f"{PARTIAL_PREFIX}*"):
            name = f"image-{aside.name.removeprefix(PARTIAL_PREFIX)}"
            with files.try_lock(self.locks / f"{name}.lock") as mine:
                if mine:
                    with contextlib.suppress(ForkdError):
                        remove(aside)
