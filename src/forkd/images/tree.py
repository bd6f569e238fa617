"""What the layers of an image make together: one tree, in memory, that leads nowhere else.

Layers are laid over each other as the specification of OCI images says.  A whiteout `.wh.NAME`
removes what lower layers have at NAME, `.wh..wh..opq` all that they have in a folder; what the
same layer adds stays, before or after it.  A folder over a folder changes its attributes; anything
else replaces what was there.  Paths lead through symbolic links as in a guest: within the root,
above which nothing is.  Contents are not here, but for the number of each file.
"""

from __future__ import annotations

import posixpath
import stat
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from forkd.errors import BuildError
from forkd.host.trees import Attributes, Entry
from forkd.images.members import Kind
from forkd.images.rootfs import LINKS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.images.members import Member

NAME_BYTES_MAX = 255
"""Longest name of a file or a folder, as in the kernel."""

WHITEOUT, OPAQUE, RESERVED = ".wh.", ".wh..wh..opq", ".wh..wh."
"""How the names begin that remove others; those of no meaning are left out."""

_NODES = {
    Kind.CHARACTER_DEVICE: stat.S_IFCHR,
    Kind.BLOCK_DEVICE: stat.S_IFBLK,
    Kind.FIFO: stat.S_IFIFO,
}
_IMPLIED_MODE = 0o755


@dataclass(slots=True)
class _Leaf:
    """Anything but a folder; hard links are one leaf under several names."""

    kind: Kind
    attributes: Attributes
    number: int | None
    link: str
    device: tuple[int, int]


@dataclass(slots=True)
class _Folder:
    attributes: Attributes
    children: dict[str, _Named] = field(default_factory=dict)


@dataclass(slots=True)
class _Named:
    """What a name means, and the layer that said so."""

    node: _Leaf | _Folder
    layer: int


class Tree:
    """What layers make together.

    Args:
        entries_max: How many names may be in them, with folders that only paths imply.
    """

    def __init__(self, entries_max: int) -> None:
        self._root = _Folder(Attributes(_IMPLIED_MODE))
        self._layer = 0
        self._most = self._left = entries_max

    def next_layer(self) -> None:
        """Begin with the layer above."""
        self._layer += 1

    def add(self, member: Member, number: int | None) -> None:
        """Add what the layer has next.

        Args:
            member: What it is.
            number: Of a file, where its contents are.

        Raises:
            BuildError: It cannot be there, or there are too many.
        """
        self._count()
        parts = _clean(member.name)
        if not parts:
            if member.kind is not Kind.FOLDER:
                raise BuildError("the root of the image is no folder")
            self._root.attributes = member.attributes
            return
        *above, name = parts
        if name.startswith(WHITEOUT):
            self._remove(above, name)
            return
        folder = self._folder(above, member)
        there = folder.children.get(name)
        if member.kind is Kind.FOLDER:
            if there is not None and isinstance(there.node, _Folder):
                there.node.attributes, there.layer = member.attributes, self._layer
                return
            made: _Leaf | _Folder = _Folder(member.attributes)
        elif member.kind is Kind.HARDLINK:
            folder.children.pop(name, None)  # it cannot lead to what it replaces
            made = self._linked(member)
        else:
            made = _Leaf(member.kind, member.attributes, number, member.link, member.device)
        folder.children[name] = _Named(made, self._layer)

    def entries(self) -> Iterator[Entry]:
        """Yield all that is in the tree, the root first, each folder before what is in it."""
        yield Entry("", self._root.attributes)
        first: dict[int, str] = {}
        todo = [("", iter(self._root.children.items()))]
        while todo:
            above, names = todo[-1]
            for name, named in names:
                path, node = f"{above}{name}", named.node
                if isinstance(node, _Folder):
                    yield Entry(path, node.attributes)
                    todo.append((f"{path}/", iter(node.children.items())))
                    break
                same_as = first.setdefault(id(node), path)
                yield _entry(path, node) if same_as == path else Entry(path, None, same_as=same_as)
            else:
                todo.pop()

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise BuildError(f"the image's layers hold more than {self._most} names")

    def _linked(self, member: Member) -> _Leaf:
        parts = _clean(member.link)
        found = None
        if parts and (folder := self._walk(parts[:-1], None)) is not None:
            found = folder.children.get(parts[-1])
        if found is None:
            raise BuildError(
                f"{member.name[:80]!r} is a hard link to {member.link[:80]!r}, which is not there"
            )
        if isinstance(found.node, _Folder):
            raise BuildError(
                f"{member.name[:80]!r} is a hard link to {member.link[:80]!r}, which is a folder"
            )
        return found.node

    def _folder(self, parts: list[str], member: Member) -> _Folder:
        """Return a folder; those that are missing are made, and are as old as what is in them."""
        implied = Attributes(_IMPLIED_MODE, mtime_ns=member.attributes.mtime_ns)
        folder = self._walk(parts, implied)
        assert folder is not None  # noqa: S101 - made if it was missing
        return folder

    def _walk(self, parts: list[str], implied: Attributes | None) -> _Folder | None:
        """Return the folder at a path, with links followed; None if there is none.

        Args:
            parts: The path.
            implied: What folders have that are missing and so are made; None to make none.

        Raises:
            BuildError: It leads through a file, or too many links.
        """
        todo = parts[::-1]
        way: list[tuple[str, _Folder | None]] = [("", self._root)]
        links = 0
        while todo:
            part = todo.pop()
            if part in {"", "."}:
                continue
            if part == "..":
                del way[max(len(way) - 1, 1) :]
                continue
            here = way[-1][1]
            named = None if here is None else here.children.get(part)
            if named is None:
                way.append((part, None))
            elif isinstance(named.node, _Folder):
                way.append((part, named.node))
            elif named.node.kind is not Kind.SYMLINK:
                if implied is None:
                    return None
                path = posixpath.join(*(name for name, _ in way), part)
                raise BuildError(f"{path[:80]!r} is no folder, but the image has names in it")
            else:
                links += 1
                if links > LINKS_MAX:
                    path = "/".join(parts)
                    raise BuildError(f"too many symbolic links on the way to {path[:80]!r}")
                if named.node.link.startswith("/"):
                    del way[1:]
                todo.extend(reversed(named.node.link.split("/")))
        return self._made(way, implied)

    def _made(
        self, way: list[tuple[str, _Folder | None]], implied: Attributes | None
    ) -> _Folder | None:
        folder = self._root
        for name, found in way[1:]:
            if found is None:
                if implied is None:
                    return None
                _check_name(name)
                self._count()
                found = _Folder(replace(implied))  # noqa: PLW2901 - what was missing
                folder.children[name] = _Named(found, self._layer)
            folder = found
        return folder

    def _remove(self, above: list[str], name: str) -> None:
        """Do what the name of a whiteout says."""
        if name != OPAQUE and name.startswith(RESERVED):
            return
        gone = name.removeprefix(WHITEOUT)
        if gone in {"", ".", ".."}:
            raise BuildError(f"{'/'.join((*above, name))[:80]!r} removes nothing that has a name")
        folder = self._walk(above, None)
        if folder is None:
            return
        if name == OPAQUE:
            self._prune(folder)
        elif (named := folder.children.get(gone)) is not None:
            if isinstance(named.node, _Folder):
                self._prune(named.node)
                if named.node.children:
                    return
            if named.layer < self._layer:
                del folder.children[gone]

    def _prune(self, folder: _Folder) -> None:
        """Remove from a folder what lower layers have in it."""
        found, seen = [folder], 0
        while seen < len(found):
            nodes = (named.node for named in found[seen].children.values())
            found.extend(node for node in nodes if isinstance(node, _Folder))
            seen += 1
        for each in reversed(found):  # what is in a folder before the folder
            kept = {
                name: named
                for name, named in each.children.items()
                if named.layer == self._layer
                or (isinstance(named.node, _Folder) and named.node.children)
            }
            each.children = kept


def _entry(path: str, leaf: _Leaf) -> Entry:
    if leaf.kind is Kind.SYMLINK:
        return Entry(path, leaf.attributes, target=leaf.link)
    if leaf.kind is Kind.FILE:
        return Entry(path, leaf.attributes, number=leaf.number)
    return Entry(path, leaf.attributes, node=(_NODES[leaf.kind], *leaf.device))


def _clean(path: str) -> list[str]:
    """Return the parts of a path, with `..` taken as it is written and never above the root."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in {"", "."}:
            parts.append(part)
    if parts:
        _check_name(parts[-1])
    return parts


def _check_name(name: str) -> None:
    if len(name.encode("utf-8", "surrogateescape")) > NAME_BYTES_MAX:
        raise BuildError(f"a name is longer than {NAME_BYTES_MAX} bytes: {name[:80]!r}")
