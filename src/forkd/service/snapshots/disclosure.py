"""What a caller is told of snapshots: nothing that belongs to another tenant."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from forkd.service.snapshots.catalog import may_use

if TYPE_CHECKING:
    from forkd.model.caller import Caller
    from forkd.model.ids import Tag
    from forkd.model.snapshot import Snapshot
    from forkd.service.snapshots.catalog import Catalog


def shown(catalog: Catalog, caller: Caller, snapshot: Snapshot) -> Snapshot:
    """Return a snapshot as a caller may see it: a shared one may be another tenant's."""
    if caller.is_admin:
        return snapshot
    users = catalog.users([snapshot.tag])
    parent = snapshot.parent
    return replace(
        snapshot,
        sandboxes=sum(caller.may_touch(each.owner) for each in users),
        parent=parent if parent is None or _may_name(catalog, caller, parent) else None,
        source=snapshot.source if caller.may_touch(snapshot.owner) else None,
    )


def called(catalog: Catalog, caller: Caller, tag: Tag) -> str:
    """Return what a snapshot is called in what a caller is told."""
    return str(tag) if _may_name(catalog, caller, tag) else "another tenant's snapshot"


def _may_name(catalog: Catalog, caller: Caller, tag: Tag) -> bool:
    """Whether a caller may be told a snapshot's tag; one that is missing is nobody's."""
    return catalog.shelf.find(tag) is None or may_use(caller, catalog.get(tag))
