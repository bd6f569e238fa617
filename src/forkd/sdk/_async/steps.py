"""What a step of a build does in its machine: run a program, copy files."""

from __future__ import annotations

import fnmatch
import posixpath
import tempfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from forkd.errors import BuildError, ForkdError, InvalidRequest, NotFound
from forkd.sdk._build import archive_of, context_archive, is_folder, owner_of
from forkd.sdk._dockerfile import limits
from forkd.sdk._dockerfile.packing import Look, Owner, Packer
from forkd.sdk._transport import async_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.sdk._async.sandbox import AsyncSandbox
    from forkd.sdk._build import Seen
    from forkd.sdk._dockerfile.context import Context
    from forkd.sdk._dockerfile.copying import CopyAction, Part
    from forkd.sdk._dockerfile.plan import RunAction, Step
    from forkd.wire.v2_files import ArchiveWritten

SCRIPT = "/tmp/.forkd-build-script"  # noqa: S108 - a guest's
"""Where a script is while a step runs it."""

SKIPPED_SHOWN = 3
"""How many files that could not be made an error names."""

ROOT = "0:0"


@dataclass(frozen=True, slots=True)
class Machine:
    """The sandbox of a step.

    Attributes:
        sandbox: It.
        where: File and line of the step, for errors.
        seen: Is told what programs print.
    """

    sandbox: AsyncSandbox
    where: str
    seen: Seen

    async def make_folders(self, folders: tuple[str, ...]) -> None:
        """Make working directories that are missing."""
        for folder in folders:
            await self.sandbox.files.make_dir(folder, parents=True, user=ROOT)

    async def run(self, step: Step, action: RunAction, timeout_s: float) -> None:
        """Run a program.

        Raises:
            BuildError: It failed; the end of what it printed is in the message.
        """
        if action.script is None:
            await self.execute(step, action.args, {**action.env, **action.hidden}, timeout_s)
            return
        await self.sandbox.files.write(SCRIPT, action.script, mode=0o755, make_parents=True)
        await self.execute(step, (SCRIPT,), {**action.env, **action.hidden}, timeout_s)
        await self.sandbox.files.remove(SCRIPT)

    async def execute(
        self, step: Step, args: tuple[str, ...], env: dict[str, str], timeout_s: float
    ) -> None:
        """Run a program with the folder and the user of a step; raises as `run`."""
        self.seen.last = []
        try:
            result = await self.sandbox.exec(
                list(args),
                check=False,
                timeout_s=timeout_s,
                env=env,
                cwd=step.config.cwd,
                user=step.config.user,
                on_stdout=self.seen.output,
                on_stderr=self.seen.output,
            )
        except (NotFound, InvalidRequest) as error:
            raise BuildError(f"{self.where}: {step.shown}: {error}") from error
        if result.exit_code == 0:
            return
        how = f"exited with {result.exit_code}"
        if result.timed_out:
            how = f"was not done after {timeout_s:.0f} s"
        raise BuildError(f"{self.where}: {step.shown}: {how}\n{self.seen.said()}")

    async def copy(self, step: Step, action: CopyAction, context: Context) -> None:
        """Copy files of the context.

        Raises:
            BuildError: One could not be made.
            InvalidRequest: One cannot be read, or was changed meanwhile.
        """
        packers = [Packer(await self._look(action, part)) for part in action.parts]
        is_whole = action.parts[0].is_whole
        folder, name = await self._place(action, is_whole=is_whole)
        pieces = context_archive(action, context, packers, name)
        await self._write(step, folder, pieces)

    async def copy_from(self, step: Step, action: CopyAction, source: AsyncSandbox) -> None:
        """Copy files of another machine.

        Raises:
            BuildError: There are none, or one could not be made.
        """
        for part in action.parts:
            look = await self._look(action, part)
            paths = await self._matches(source, part.said)
            if len(paths) > 1 and not action.is_folder:
                words = f"{part.said!r} matches several, so that {action.target!r} must end with /"
                raise InvalidRequest(f"{self.where}: COPY: {words}", field="dockerfile")
            for path in paths:
                await self._copy_one(step, action, source, path, look)

    async def _copy_one(
        self, step: Step, action: CopyAction, source: AsyncSandbox, path: str, look: Look
    ) -> None:
        skipped: list[str] = []
        with tempfile.TemporaryFile(prefix="forkd-build-") as file:
            is_whole = await self._fetch(source, path, file)
            folder, name = await self._place(action, is_whole=is_whole)
            called = None if is_whole else name or posixpath.basename(path)
            pieces = archive_of(Packer(look), file, called, skipped)
            await self._write(step, folder, pieces)
        for said in skipped:
            self.seen.progress("copy", f"left out of {path}: {said}")

    async def _fetch(self, source: AsyncSandbox, path: str, file: IO[bytes]) -> bool:
        """Write the archive of what is at a path to a file; return whether it is a folder's."""
        try:
            async with source.files.open_archive(path) as pieces:
                async for piece in pieces:
                    file.write(piece)
                    if file.tell() > limits.BUILD_CONTEXT_BYTES_MAX:
                        most = limits.BUILD_CONTEXT_BYTES_MAX
                        raise BuildError(f"{self.where}: {path} holds more than {most} bytes")
        except NotFound as error:
            raise BuildError(f"{self.where}: COPY: no {path!r} where it copies from") from error
        return is_folder(file)

    async def _matches(self, source: AsyncSandbox, path: str) -> list[str]:
        """Return the paths that a source means: patterns are in its last name alone."""
        folder, name = posixpath.split(path)
        if not set(path) & set("*?["):
            return [path]
        if set(folder) & set("*?["):
            raise InvalidRequest(
                f"{self.where}: {path!r} has a pattern before its last name", field="dockerfile"
            )
        try:
            found = [each.name for each in await source.files.list(folder)]
        except ForkdError as error:
            raise BuildError(f"{self.where}: COPY: {error}") from error
        matching = [each for each in found if fnmatch.fnmatchcase(each, name)]
        if not matching:
            raise BuildError(f"{self.where}: COPY: nothing matches {path!r} where it copies from")
        return [posixpath.join(folder, each) for each in matching]

    async def _write(self, step: Step, folder: str, pieces: Iterator[bytes]) -> None:
        try:
            made: ArchiveWritten = await self.sandbox.files.write_archive(
                folder, async_pieces(pieces), user=ROOT, keep_owner=True
            )
        except ValueError as error:
            raise InvalidRequest(f"{self.where}: {error}", field="dockerfile") from error
        if made.skipped:
            some = ", ".join(f"{each.path}: {each.reason}" for each in made.skipped[:SKIPPED_SHOWN])
            raise BuildError(f"{self.where}: {step.shown}: not all could be made: {some}")

    async def _place(self, action: CopyAction, *, is_whole: bool) -> tuple[str, str | None]:
        """Return the folder into which copies go, and what an only file is called there."""
        if is_whole or action.is_folder or await self._is_folder(action.target):
            return action.target, None
        folder, name = posixpath.split(action.target)
        return folder, name

    async def _is_folder(self, path: str) -> bool:
        files = self.sandbox.files
        try:
            found = await files.stat(path)
            if found.kind == "symlink":
                await files.list(path)
                return True
        except ForkdError:
            return False
        return found.kind == "directory"

    async def _look(self, action: CopyAction, part: Part) -> Look:
        """Return whose copies are, and their permissions."""
        if action.owner is None:
            return Look(None if part.unpacked else Owner(0, 0), action.mode)
        passwd, group = "", ""
        if not action.owner.replace(":", "").isdigit():
            passwd, group = await self._text("/etc/passwd"), await self._text("/etc/group")
        try:
            return Look(owner_of(action.owner, passwd, group), action.mode)
        except ValueError as error:
            raise BuildError(f"{self.where}: --chown={action.owner}: {error}") from error

    async def _text(self, path: str) -> str:
        try:
            return (await self.sandbox.files.read(path)).decode(errors="replace")
        except NotFound:
            return ""
