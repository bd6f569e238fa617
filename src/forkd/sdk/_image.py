"""Images described in Python: each is a recipe, which the daemon keeps by its content."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from forkd.errors import InvalidRequest
from forkd.sdk._notebook import Shown
from forkd.sdk._recipes import Archive

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from os import PathLike

NAME = "image"
"""What the recipes are called; images are found by what is in them."""

REGISTRY = "docker://"

CODE_FILE = "warmup.py"

DOTS_MAX = 100
"""Dots that a text is written with; a line of a recipe may have only so many."""

DEBIAN_PACKAGES = ("ca-certificates", "python3")
"""What each image of Debian has, so that code can be evaluated in it."""


@dataclass(frozen=True, slots=True)
class _Local:
    """A file or folder of this host that goes along."""

    source: Path
    target: str
    mode: int | None


@dataclass(frozen=True, slots=True, repr=False)
class Image(Shown):
    """An image, described step by step; every method returns another one.

        image = Image.debian().apt_install("git").pip_install("numpy").env(MODE="test")
        with Sandbox(image=image) as sandbox:
            ...

    It is built, and its machine baked, the first time that it is used.  Images of the same steps
    are built once.
    """

    _suite: str | None = None
    _reference: str | None = None
    _packages: tuple[str, ...] = ()
    _requirements: tuple[str, ...] = ()
    _lines: tuple[str, ...] = ()
    _variables: Mapping[str, str] = field(default_factory=dict)
    _folder: str | None = None
    _user: str | None = None
    _files: tuple[_Local, ...] = ()
    _code: str = ""

    @classmethod
    def debian(cls, suite: str = "bookworm") -> Self:
        """Return an image of Debian with Python.

        Args:
            suite: The release of Debian.
        """
        return cls(_suite=suite, _packages=DEBIAN_PACKAGES)

    @classmethod
    def from_registry(cls, reference: str) -> Self:
        """Return an image of a registry.

        Args:
            reference: Such as `python:3.12-slim`, or `registry.example.com/team/tool@sha256:…`.
        """
        return cls(_reference=reference.removeprefix(REGISTRY))

    def apt_install(self, *packages: str | Sequence[str]) -> Self:
        """Add packages of Debian, with what they depend on.

        Args:
            packages: Their names; `name=version` pins one.

        Raises:
            InvalidRequest: It is an image of a registry.
        """
        if self._reference is not None:
            raise InvalidRequest(
                f"apt_install is for Image.debian(): packages of {self._reference} are installed "
                "where that image is made",
                field="image",
            )
        return replace(self, _packages=(*self._packages, *_flat("apt_install", packages)))

    def pip_install(self, *requirements: str | Sequence[str]) -> Self:
        """Add Python packages, which must exist as wheels.

        Args:
            requirements: Their names, with version specifiers: `"pandas>=2"`.
        """
        added = _flat("pip_install", requirements)
        return replace(self, _requirements=(*self._requirements, *added))

    def run_commands(self, *lines: str | Sequence[str]) -> Self:
        """Add lines that a shell runs in the machine, in order, before it is frozen.

        The machine has no network then: install packages with `apt_install` and `pip_install`.

        Args:
            lines: What `/bin/sh -c` reads.
        """
        return replace(self, _lines=(*self._lines, *_flat("run_commands", lines)))

    def env(self, variables: Mapping[str, str] | None = None, /, **more: str) -> Self:
        """Set variables of what runs in the guest.

        Args:
            variables: Values by name.
            more: Likewise.
        """
        return replace(self, _variables={**self._variables, **(variables or {}), **more})

    def workdir(self, path: str) -> Self:
        """Have programs and code start in a folder.

        Args:
            path: In the guest.
        """
        return replace(self, _folder=path)

    def user(self, name: str) -> Self:
        """Have programs and code run as another user than root.

        Args:
            name: A name of the image's, or `uid[:gid]`.
        """
        return replace(self, _user=name)

    def add_local_file(
        self, source: str | PathLike[str], target: str, *, mode: int | None = None
    ) -> Self:
        """Add a file of this host.

        Args:
            source: Its path here.
            target: Its path in the guest.
            mode: Its permissions; those of a program if it is one here, else of a text.
        """
        added = _Local(Path(source).absolute(), target, mode)
        return replace(self, _files=(*self._files, added))

    def add_local_dir(self, source: str | PathLike[str], target: str) -> Self:
        """Add a folder of this host with all that is in it.

        Args:
            source: Its path here.
            target: Its path in the guest.
        """
        return self.add_local_file(source, target)

    def warm_up(self, code: str) -> Self:
        """Evaluate Python once before the machine is frozen: its names are there in each fork.

        Args:
            code: Such as `import numpy`; after that of an earlier `warm_up`.
        """
        return replace(self, _code=f"{self._code}{code}\n")

    def recipe(self) -> dict[str, Any]:
        """Return the recipe that it stands for, as its TOML file has it."""
        return tomllib.loads(self._text())

    def archive(self) -> Archive:
        """Return the archive of its recipe.

        Raises:
            InvalidRequest: A file of this host cannot be read, or there is too much.
        """
        texts = {CODE_FILE: self._code.encode()} if self._code else {}
        files = {_inside(number): each.source for number, each in enumerate(self._files)}
        return Archive.of_parts(self._text().encode(), texts, files)

    def __str__(self) -> str:
        return self._text()

    def __repr__(self) -> str:
        base = self._reference or f"debian {self._suite}"
        return f"<Image {base}>"

    def _text(self) -> str:
        parts = [f"name = {_toml(NAME)}"]
        if self._folder is not None:
            parts.append(f"cwd = {_toml(self._folder)}")
        if self._user is not None:
            parts.append(f"user = {_toml(self._user)}")
        if self._reference is not None:
            parts.append(f"\n[image]\noci = {_toml(REGISTRY + self._reference)}")
        else:
            packages = _list(sorted(set(self._packages)))
            parts.append(
                f"\n[image.debian]\nsuite = {_toml(self._suite or '')}\npackages = {packages}"
            )
        if self._requirements:
            parts.append(f"\n[pip]\nrequirements = {_list(self._requirements)}")
        if self._variables:
            pairs = (f"{_toml(name)} = {_toml(text)}" for name, text in self._variables.items())
            parts.append("\n".join(("\n[env]", *pairs)))
        parts.append(f'\n[warmup]\nruntime = "{"python" if self._code else "auto"}"')
        if self._code:
            parts.append(f"file = {_toml(CODE_FILE)}")
        if self._lines:
            parts.append(f"run = {_list(self._lines)}")
        for number, each in enumerate(self._files):
            parts.append(f"\n[[files]]\nsource = {_toml(_inside(number))}")
            parts.append(f"target = {_toml(each.target)}")
            if each.mode is not None:
                parts.append(f"mode = {each.mode:#o}")
        return "\n".join((*parts, ""))


def _inside(number: int) -> str:
    """Return what a file or folder is called beside the recipe."""
    return f"files/{number}"


def _flat(called: str, given: tuple[str | Sequence[str], ...]) -> tuple[str, ...]:
    """Return texts that were given one by one, or as lists."""
    texts: list[str] = []
    for each in given:
        inner: list[object] = [each] if not isinstance(each, list | tuple) else [*each]
        for text in inner:
            if not isinstance(text, str):
                raise InvalidRequest(f"{called} takes texts, and {text!r} is none", field="image")
            texts.append(text)
    return tuple(texts)


def _list(texts: Iterable[str]) -> str:
    """Return texts as TOML, each on a line of its own."""
    lines = "".join(f"    {_toml(each)},\n" for each in texts)
    return f"[\n{lines}]"


def _toml(value: str) -> str:
    """Return a text as TOML, on one line and with few dots."""
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return text.replace(".", "\\u002e") if text.count(".") > DOTS_MAX else text
