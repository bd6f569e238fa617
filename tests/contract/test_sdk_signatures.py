"""What the SDK's public methods take and return has public names and is documented."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
from functools import cache
from importlib import import_module
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import pytest

import forkd
from forkd import types

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel

OURS = ("forkd.sdk._async", "forkd.sdk._sync")

CONSTRUCTED = (forkd.AsyncClient, forkd.AsyncSandbox, forkd.Client, forkd.Sandbox)
"""What users make by calling a class; the others come from these."""

SPECIAL = {"__init__", "__enter__", "__aenter__", "__iter__", "__next__", "__getitem__"}

FORKS = ["fork", "try_fork"]
ONE = ["sandbox", "create", "Sandbox"]


def public_classes() -> list[type]:
    found = [getattr(forkd, name) for name in forkd.__all__]
    found += [getattr(types, name) for name in types.__all__]
    kinds = {each for each in found if isinstance(each, type) and each.__module__.startswith(OURS)}
    return sorted(kinds, key=lambda kind: kind.__name__)


def public_functions(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions behind the public methods and properties of a class."""
    for name in sorted({*dir(kind)}):
        if name.startswith("_") and name not in SPECIAL:
            continue
        if name == "__init__" and not issubclass(kind, CONSTRUCTED):
            continue
        member = inspect.getattr_static(kind, name)
        if isinstance(member, property):
            member = member.fget
        function = inspect.unwrap(getattr(member, "__func__", member))
        if isinstance(function, FunctionType) and function.__module__.startswith("forkd."):
            yield name, function


METHODS = [
    pytest.param(kind, name, function, id=f"{kind.__name__}.{name}")
    for kind in public_classes()
    for name, function in public_functions(kind)
]


@cache
def imported(module: str) -> dict[str, object]:
    """Return what a module imports by `from`, for type checkers too."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    found: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            home = import_module(node.module)
            for each in node.names:
                there = hasattr(home, each.name)
                made = (
                    getattr(home, each.name)
                    if there
                    else import_module(f"{node.module}.{each.name}")
                )
                found[each.asname or each.name] = made
    return found


def names_in(annotation: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(annotation)) if isinstance(node, ast.Name)}


PUBLIC = [getattr(types, name) for name in types.__all__]
PUBLIC += [getattr(forkd, name) for name in forkd.__all__ if name != "__version__"]


def is_public(found: object) -> bool:
    if isinstance(found, ModuleType):
        return found is builtins
    if any(found is each for each in PUBLIC) or isinstance(found, TypeVar):
        return True
    home = getattr(found, "__module__", "").partition(".")[0]
    return home in sys.stdlib_module_names


@pytest.mark.parametrize(("kind", "name", "function"), METHODS)
def test_no_public_signature_names_a_private_type(
    kind: type, name: str, function: FunctionType
) -> None:
    del kind, name
    known: dict[str, Any] = {
        "builtins": builtins,
        **vars(builtins),
        **function.__globals__,
        **imported(function.__module__),
    }
    private = {
        each
        for annotation in function.__annotations__.values()
        for each in names_in(str(annotation))
        if not is_public(known[each])
    }
    assert private == set()


@pytest.mark.parametrize(("kind", "name", "function"), METHODS)
def test_every_option_is_a_keyword_of_its_own_and_documented(
    kind: type, name: str, function: FunctionType
) -> None:
    parameters = inspect.signature(function).parameters.values()
    options = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    text = inspect.getdoc(kind if name == "__init__" else function) or ""

    assert text or name in SPECIAL, "has no docstring"
    assert [each.name for each in parameters if each.kind is each.VAR_KEYWORD] == []
    assert [each for each in options if each not in documented(text)] == []


def kinds_in(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for each in get_args(annotation):
        yield from kinds_in(each)


CLASSES = [each for each in PUBLIC if isinstance(each, type)]


@pytest.mark.parametrize("kind", [each for each in CLASSES if hasattr(each, "model_fields")])
def test_members_of_public_types_are_of_public_types(kind: type[BaseModel]) -> None:
    members = [each.annotation for each in kind.model_fields.values()]
    found = {each for member in members for each in kinds_in(member)}
    private = {each for each in found if each.__module__.startswith("forkd")} - set(CLASSES)

    assert private == set()


def documented(text: str) -> dict[str, str]:
    """Return the arguments of a docstring, with their words."""
    section = text.partition("Args:\n")[2].partition("\n\n")[0]
    parts = re.split(r"^    (?=\w+: )", section, flags=re.MULTILINE)
    pairs = (each.partition(": ") for each in parts if ": " in each)
    return {name: " ".join(words.split()) for name, _, words in pairs}


def forks(flavour: str, names: list[str]) -> list[tuple[Any, str]]:
    """Return what forks, with its documentation."""
    client, sandbox = getattr(forkd, f"{flavour}Client"), getattr(forkd, f"{flavour}Sandbox")
    found = []
    for name in names:
        made = getattr(client, name, None) or getattr(sandbox, name, sandbox)
        found.append((made, inspect.getdoc(made) or ""))
    return found


@pytest.mark.parametrize("flavour", ["", "Async"])
def test_options_of_a_fork_are_the_same_wherever_one_can_fork(flavour: str) -> None:
    options = {
        name: (str(each.annotation), each.default)
        for name, each in inspect.signature(forks(flavour, ["fork"])[0][0]).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    assert len(options) > 12
    for made, _ in forks(flavour, FORKS + ONE):
        parameters = inspect.signature(made).parameters
        for name, (annotation, default) in options.items():
            assert str(parameters[name].annotation) == annotation
            assert parameters[name].default == default or name == "ttl_s"
    for group in (FORKS, ONE):
        words = [documented(text) for _, text in forks(flavour, group)]
        for name in options:
            assert len({each[name] for each in words}) == 1


def test_a_private_type_would_be_found() -> None:
    from forkd.sdk._sync.http import Http  # noqa: PLC0415 - only here
    from forkd.wire import v2  # noqa: PLC0415 - only here

    assert not is_public(v2)
    assert not is_public(Http)
    assert names_in("dict[str, v2.SandboxInfo | None]") == {"dict", "str", "v2"}
