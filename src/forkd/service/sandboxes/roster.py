"""Which sandboxes there are on this host, and whose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.errors import NotFound
from forkd.limits import EXITED_KEPT_MAX
from forkd.model.caller import touch
from forkd.model.ids import only_sandbox
from forkd.model.sandbox import SandboxState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from forkd.model.caller import Caller
    from forkd.model.ids import SandboxId, Tag
    from forkd.model.sandbox import Sandbox
    from forkd.service.sandboxes.owner import SandboxOwner


class Roster:
    """The owners of all sandboxes, the oldest first."""

    def __init__(self) -> None:
        self._owners: dict[SandboxId, SandboxOwner] = {}
        self._exited: dict[SandboxId, None] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[SandboxOwner]:
        return iter(tuple(self._owners.values()))

    def get(self, caller: Caller, sandbox: SandboxId) -> SandboxOwner:
        """Return the owner of a sandbox that a caller may touch.

        Raises:
            NotFound: There is none of that id, for this caller.
        """
        found = self._owners.get(sandbox)
        if found is None or not caller.may_touch(found.sandbox.owner):
            raise NotFound(f"no sandbox {sandbox}", sandbox=sandbox)
        touch(sandbox)
        return found

    def find_by_start(self, caller: Caller, start: str) -> SandboxOwner:
        """Return the owner of the one sandbox whose id begins so, of those a caller may touch.

        Raises:
            NotFound: There is none.
            InvalidRequest: There are several; the message names some.
        """
        mine = (each.id for each in self.visible(caller) if each.id.startswith(start))
        return self._owners[only_sandbox(start, mine)]

    def find(self, sandbox: SandboxId) -> SandboxOwner | None:
        """Return the owner of a sandbox, whosever it is; None if there is none."""
        return self._owners.get(sandbox)

    def visible(self, caller: Caller) -> tuple[Sandbox, ...]:
        """Return the sandboxes that a caller may touch."""
        return tuple(each for each in self.all() if caller.may_touch(each.owner))

    def all(self) -> tuple[Sandbox, ...]:
        """Return every sandbox."""
        return tuple(owner.sandbox for owner in self._owners.values())

    def alive(self) -> tuple[Sandbox, ...]:
        """Return those whose machine has not ended."""
        return tuple(each for each in self.all() if each.state is not SandboxState.EXITED)

    def users_of(self, tag: Tag) -> tuple[Sandbox, ...]:
        """Return the sandboxes alive that go back to a snapshot."""
        return tuple(each for each in self.alive() if each.tag == tag)

    def add(self, owner: SandboxOwner) -> None:
        """Have a sandbox found."""
        self._owners[owner.sandbox.id] = owner
        if owner.sandbox.state is SandboxState.EXITED:
            self._exited[owner.sandbox.id] = None

    def remove(self, owner: SandboxOwner) -> None:
        """Have a sandbox found no more."""
        del self._owners[owner.sandbox.id]
        self._exited.pop(owner.sandbox.id, None)

    def note_exit(self, owner: SandboxOwner) -> SandboxId | None:
        """Note that a sandbox has ended by itself; return the oldest such, if there are too many.

        That one is to be deleted.
        """
        self._exited[owner.sandbox.id] = None
        return next(iter(self._exited)) if len(self._exited) > EXITED_KEPT_MAX else None

    def reindex(self, owners: Iterable[SandboxOwner]) -> None:
        """Have sandboxes found under the ids that they have by now, among them their old ones."""
        for owner in owners:
            self._owners[owner.sandbox.id] = owner
            self._exited.pop(owner.sandbox.id, None)
