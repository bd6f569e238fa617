"""What a COPY or an ADD copies, and to where."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.sdk._dockerfile.settings import joined

if TYPE_CHECKING:
    from forkd.sdk._dockerfile.context import Context, Entry
    from forkd.sdk._dockerfile.reading import Instruction
    from forkd.sdk._dockerfile.words import Expander

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://|git@")
_MODE = re.compile(r"[0-7]{3,4}")
_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?::[A-Za-z0-9_][A-Za-z0-9_.-]*)?")


@dataclass(frozen=True, slots=True)
class Part:
    """One source.

    Attributes:
        said: As it is written.
        entry: What it is in the context; None if it is of another origin.
        content: The text of a heredoc; None for others.
        key: Names what is in it.
        name: What a copy of it is called in a folder.
        unpacked: Whether it is an archive whose members are copied.
    """

    said: str
    entry: Entry | None
    content: str | None
    key: object
    name: str
    unpacked: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether what is in it is copied into the target, a folder, and not it itself."""
        return self.unpacked or (self.entry is not None and self.entry.kind == "folder")


@dataclass(frozen=True, slots=True)
class CopyAction:
    """Files that a step copies.

    Attributes:
        origin: A stage's number, or an image's name; None for the context.
        parts: What is copied.
        target: To where; absolute.
        is_folder: Whether `target` is a folder for certain; else that depends on what is there.
        owner: Whose the copies are: a name or a number, with `:` and a group or without; None
            for root, and for whom an unpacked archive says.
        mode: Their permissions; None for those that they have.
    """

    origin: int | str | None
    parts: tuple[Part, ...]
    target: str
    is_folder: bool
    owner: str | None
    mode: int | None

    def said(self) -> list[object]:
        """Return what the result depends on."""
        keys = [part.key for part in self.parts]
        return [keys, self.target, self.is_folder, self.owner, self.mode]


def copy_action(
    each: Instruction, words: Expander, cwd: str, context: Context, origin: int | str | None
) -> CopyAction:
    """Return what an instruction copies.

    Args:
        each: A COPY or an ADD.
        words: Expands its words.
        cwd: The working directory.
        context: Where files are found.
        origin: What it copies from, if that is not the context.

    Raises:
        ValueError: It is malformed, or there are no such files.
    """
    flags = dict(each.flags)
    owner = words.word(flags["chown"] or "") if "chown" in flags else None
    if owner is not None and _OWNER.fullmatch(owner) is None:
        raise ValueError(f"--chown is USER or USER:GROUP, not {owner[:80]!r}")
    texts = each.words if each.words is not None else tuple(each.rest.split())
    if len(texts) < 2:  # noqa: PLR2004 - a source and a target
        raise ValueError("needs a source and a target")
    *sources, target = (words.word(text) for text in texts)
    if not target:
        raise ValueError(f"the target {texts[-1]!r} is empty")
    parts = _parts(each, sources, words, context, origin)
    is_folder = target.endswith(("/", "/.")) or target in {".", ".."}
    if len(parts) > 1 and not is_folder:
        raise ValueError(f"copies several files, so that {target!r} must end with /, as a folder")
    mode = _mode(words.word(flags.get("chmod") or ""))
    return CopyAction(origin, tuple(parts), joined(cwd, target), is_folder, owner, mode)


def _parts(
    each: Instruction,
    sources: list[str],
    words: Expander,
    context: Context,
    origin: int | str | None,
) -> list[Part]:
    heredocs = iter(each.heredocs)
    parts: list[Part] = []
    for said in sources:
        if each.heredocs and "<<" in said:
            heredoc = next(heredocs)
            text = words.text(heredoc.content) if heredoc.expands else heredoc.content
            key = ["text", heredoc.name, text]
            parts.append(Part(heredoc.name, None, text, key, heredoc.name))
        elif _URL.match(said):
            raise ValueError(
                f"{said[:80]} is a remote file, which is not supported: download it to the "
                "context, or have a RUN download it"
            )
        elif not said:
            raise ValueError("a source is empty")
        elif origin is not None:
            if ".." in said.split("/"):
                raise ValueError(f"{said!r} holds '..'; name files by their absolute paths")
            parts.append(Part(joined("/", said), None, None, ["from", said], ""))
        else:
            parts += [_part(each, said, entry, context) for entry in context.sources(said)]
    return parts


def _part(each: Instruction, said: str, entry: Entry, context: Context) -> Part:
    unpacked = each.keyword == "ADD" and context.is_archive(entry)
    globbed = set(said) & set("*?[")
    name = (entry.path if globbed else said.rstrip("/")).rpartition("/")[2]
    if entry.kind != "folder":
        key: object = ["file", "" if unpacked else name, context.digest(entry), unpacked]
    else:
        head = len(entry.path) + 1 if entry.path else 0
        inside = [(below.path[head:], context.digest(below)) for below in context.below(entry)]
        key = ["folder", inside]
    return Part(said, entry, None, key, name, unpacked)


def _mode(text: str) -> int | None:
    if not text:
        return None
    if _MODE.fullmatch(text) is None:
        raise ValueError(f"--chmod is an octal number such as 755, not {text[:80]!r}")
    return int(text, 8)
