"""Which sandboxes there are on this host, and whose."""

from __future__ import annotations

import contextlib
from operator import attrgetter
from typing import TYPE_CHECKING

from forkd.errors import Conflict, NotFound
from forkd.limits import EXITED_KEPT_MAX
from forkd.model.caller import touch
from forkd.model.ids import only_sandbox
from forkd.model.sandbox import SandboxState

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from forkd.model.caller import Caller, Tenant
    from forkd.model.ids import SandboxId, SandboxName, Tag
    from forkd.model.sandbox import Sandbox
    from forkd.service.sandboxes.owner import SandboxOwner


class Roster:
    """The owners of all sandboxes, the oldest first."""

    def __init__(self) -> None:
        self._owners: dict[SandboxId, SandboxOwner] = {}
        self._exited: dict[SandboxId, None] = {}
        self._named: dict[tuple[Tenant, SandboxName], SandboxId] = {}
        self._naming: set[tuple[Tenant, SandboxName]] = set()

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

    def find_by_name(self, tenant: Tenant, name: SandboxName) -> SandboxOwner | None:
        """Return the owner of the sandbox that a tenant has so named; None if there is none.

        One that has ended is found as long as no other has its name.
        """
        found = self._named.get((tenant, name))
        return None if found is None else self._owners[found]

    @contextlib.contextmanager
    def naming(self, tenant: Tenant, name: SandboxName | None) -> Generator[None, None, None]:
        """Have a name kept from others within the block, in which a sandbox gets it.

        Raises:
            Conflict: Another sandbox of the tenant that has not ended has it, or is getting it.
        """
        if name is None:
            yield
            return
        wanted = (tenant, name)
        if wanted in self._naming:
            raise Conflict(f"the name {name} is being given to another sandbox", field="name")
        if (other := self._holder(wanted)) is not None:
            raise Conflict(
                f"the name {name} is taken by sandbox {other}; choose another, or rename or "
                "delete that sandbox",
                field="name",
                sandbox=other,
            )
        self._naming.add(wanted)
        try:
            yield
        finally:
            self._naming.discard(wanted)

    def rename(self, owner: SandboxOwner, before: SandboxName | None) -> None:
        """Have a sandbox found by the name that it has by now, and not by the one before."""
        self._forget_name(owner.sandbox, before)
        self._note_name(owner.sandbox)

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
        """Return the sandboxes that a caller may touch, in the order of their creation."""
        mine = (each for each in self.all() if caller.may_touch(each.owner))
        return tuple(sorted(mine, key=attrgetter("created_at", "id")))

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
        self._note_name(owner.sandbox)
        if owner.sandbox.state is SandboxState.EXITED:
            self._exited[owner.sandbox.id] = None

    def remove(self, owner: SandboxOwner) -> None:
        """Have a sandbox found no more."""
        self._forget_name(owner.sandbox, owner.sandbox.name)
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
        changed = tuple(owners)
        for owner in changed:
            self._owners[owner.sandbox.id] = owner
            self._exited.pop(owner.sandbox.id, None)
        ids = {owner.sandbox.id for owner in changed}
        for named in [each for each, id_ in self._named.items() if id_ in ids]:
            del self._named[named]
        for owner in changed:
            self._note_name(owner.sandbox)

    def _holder(self, wanted: tuple[Tenant, SandboxName]) -> SandboxId | None:
        """Return the sandbox that has a name and has not ended."""
        found = self._named.get(wanted)
        if found is None or self._owners[found].sandbox.state is SandboxState.EXITED:
            return None
        return found

    def _note_name(self, sandbox: Sandbox) -> None:
        if sandbox.name is not None and self._holder((sandbox.owner.tenant, sandbox.name)) is None:
            self._named[sandbox.owner.tenant, sandbox.name] = sandbox.id

    def _forget_name(self, sandbox: Sandbox, name: SandboxName | None) -> None:
        named = None if name is None else (sandbox.owner.tenant, name)
        if named is not None and self._named.get(named) == sandbox.id:
            del self._named[named]
