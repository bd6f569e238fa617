"""Has one task of a service crash, once, as a bug would have it crash.

    install(TaskKind.FORK, "middle", folder)    # before the service begins
    (folder / ARM).touch()                      # the next chance is taken

`start` is before the task has done anything, `middle` where it goes on after it has waited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forkd.service.supervision import Supervisor, Task, TaskKind

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator
    from pathlib import Path

ARM = "arm"
"""The file that says that the next chance is taken."""

WORDS = "crashed as a test asked"


def install(kind: TaskKind, where: str, folder: Path) -> None:
    """Have every task of a kind look whether it is to crash."""
    run = Supervisor.run

    def crashing(
        self: Supervisor,
        what: TaskKind,
        work: Coroutine[object, object, object],
        subject: str,
        *,
        vital: bool = False,
    ) -> Task[object]:
        looking = _look(work, where, folder / ARM) if what is kind else work
        return run(self, what, looking, subject, vital=vital)

    Supervisor.run = crashing  # type: ignore[method-assign,assignment]  # of this process only


async def _look(work: Coroutine[object, object, object], where: str, arm: Path) -> object:
    return await _Steps(work, where, arm)


class _Steps:
    """A coroutine, of which each step may be a crash instead."""

    def __init__(self, work: Coroutine[object, object, object], where: str, arm: Path) -> None:
        self._work = work
        self._where = where
        self._arm = arm

    def __await__(self) -> Generator[Any, None, object]:
        step = 0
        thrown: BaseException | None = None
        while True:
            if (step > 0) == (self._where == "middle") and self._arm.exists():
                self._arm.unlink()
                thrown = RuntimeError(WORDS)
            try:
                waited = self._work.send(None) if thrown is None else self._work.throw(thrown)
            except StopIteration as stop:
                return stop.value
            step += 1
            thrown = None
            try:
                yield waited
            except BaseException as error:  # noqa: BLE001 - it is the work's
                thrown = error
