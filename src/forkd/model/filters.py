"""Which sandboxes a list has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forkd.model.ids import SandboxName, Tag
    from forkd.model.labels import LabelFilter
    from forkd.model.sandbox import Sandbox, SandboxState


@dataclass(frozen=True, slots=True)
class SandboxFilter:
    """Which sandboxes to list: those that are all of this; None asks for nothing.

    Attributes:
        tag: Forked from this snapshot.
        name: Of this name.
        state: In this state.
        labels: With all of these labels.
    """

    tag: Tag | None = None
    name: SandboxName | None = None
    state: SandboxState | None = None
    labels: tuple[LabelFilter, ...] = ()

    def of(self, sandboxes: Iterable[Sandbox]) -> tuple[Sandbox, ...]:
        """Return those of the sandboxes that are all of this."""
        return tuple(filter(self._matches, sandboxes))

    def _matches(self, sandbox: Sandbox) -> bool:
        return (
            self.tag in {None, sandbox.tag}
            and self.name in {None, sandbox.name}
            and self.state in {None, sandbox.state}
            and all(each.matches(sandbox.labels) for each in self.labels)
        )


EVERY_SANDBOX = SandboxFilter()
