"""What every step of a build shares: telling how far it is, being cancelled, failing clearly.

A `Build` is handed from step to step.  Programs run under it end with it, and when one
fails, the error says which, and ends with the last it wrote.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forkd.errors import BuildError, HostError
from forkd.host import process
from forkd.images.registries import Registries
from forkd.model.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


TURN_S = 0.25
"""How often a builder that waits for another looks whether it is its turn."""


def _silent(_: Progress) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Build:
    """One build under way.

    Attributes:
        progress: Told of each step, in the thread that builds.
        cancel: Ends the build when set, from any thread; None for a build nobody ends.
        registries: What the operator says of registries.
        tenant: Whose request it is; noted with the image.
    """

    progress: Callable[[Progress], None] = field(default=_silent)
    cancel: process.Cancel | None = None
    registries: Registries = field(default_factory=Registries)
    tenant: str = "default"

    def tell(self, stage: str, message: str, fraction: float | None = None) -> None:
        """Report a step, and stop here if the build was cancelled.

        Raises:
            BuildError: It was.
        """
        if self.cancel is not None and self.cancel.is_set():
            raise BuildError("the build was cancelled", stage=stage)
        self.progress(Progress(stage, fraction, message))

    def waiting(self, stage: str, message: str) -> Callable[[], None]:
        """Return what to call while another builder has what we want: see `files.lock`.

        Each call takes `TURN_S`, and ends the build if it was cancelled.
        """
        cancel = self.cancel

        def wait() -> None:
            self.tell(stage, message)
            if cancel is None:
                time.sleep(TURN_S)
            else:
                cancel.wait(TURN_S)

        return wait

    def run(
        self,
        args: Sequence[str | Path],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> process.Finished:
        """Run one program of this build.

        Raises:
            BuildError: It is not installed, failed, took too long or was cancelled.
        """
        check_installed(str(args[0]))
        watch = process.Watch(on_line=on_line, cancel=self.cancel)
        try:
            return process.run(args, timeout_s=timeout_s, env=env, cwd=cwd, watch=watch)
        except HostError as error:
            raise BuildError(str(error), **error.context) from error


def check_installed(program: str) -> None:
    """Return if a program can be started.

    Raises:
        BuildError: It is not installed; says how to find out what has it.
    """
    if not process.installed(program):
        raise BuildError(
            f"{program} is not installed: `forkd doctor` says what to install", program=program
        )
