"""Put a recipe over its base: another recipe, in a fork of which it is baked.

A fork has the machine that its snapshot has.  So a recipe over a base says of the machine nothing
else than its base, and has a warm runtime that goes on with what the base has loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from forkd.errors import InvalidRequest, NotFound
from forkd.limits import CHAIN_DEPTH_MAX, RECIPE_BASES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.images.recipe import Recipe, WarmUp


def over_base(recipe: Recipe, find: Callable[[Recipe, str], Recipe]) -> Recipe:
    """Return a recipe with its base under it, and with the base's machine; others as they are.

    Args:
        recipe: As its file says.
        find: Returns the base of a recipe, by what that says; raises as `load_recipe`.

    Raises:
        NotFound: There is no such base.
        InvalidRequest: Bases go in a circle, or a base has a base; or the recipe asks for a
            machine, an environment, an init or a runtime that a fork of the base cannot have.
    """
    if recipe.image.base is None:
        return recipe
    line = [recipe]
    while (name := line[-1].image.base) is not None and len(line) <= CHAIN_DEPTH_MAX:
        base = _found(line[-1], name, find)
        circle = any((base.folder, base.name) == (each.folder, each.name) for each in line)
        line.append(base)
        if circle:
            _refuse("image.base", f"bases go in a circle: {_names(line)}")
    if len(line) > 1 + RECIPE_BASES_MAX:
        _refuse(
            "image.base",
            f"the base of a recipe has no base itself, but here it has: {_names(line)}; name "
            f"{line[-1].name} as the base of {recipe.name}",
        )
    return _over(recipe, line[1])


def _found(recipe: Recipe, name: str, find: Callable[[Recipe, str], Recipe]) -> Recipe:
    try:
        return find(recipe, name)
    except NotFound as error:
        raise NotFound(f"the base of {recipe.name}: {error}", **error.context) from error


def _names(line: list[Recipe]) -> str:
    return " → ".join(each.name for each in line)


def _over(recipe: Recipe, base: Recipe) -> Recipe:
    _check_image(recipe, base)
    _check_machine(recipe, base)
    _check_warm_up(recipe, base)
    config = {
        "env": {**base.env, **recipe.env},
        "cwd": recipe.cwd or base.cwd,
        "user": recipe.user or base.user,
    }
    return recipe.model_copy(
        update={
            **config,
            "image": recipe.image.model_copy(update={"modules": base.image.wanted_modules}),
            "init": base.init,
            "machine": base.machine,
            "warmup": _warm_up(recipe.warmup, base.warmup),
            "under": base,
        }
    )


def _check_image(recipe: Recipe, base: Recipe) -> None:
    source, packages = base.image, recipe.image.packages
    if packages and source.debian is None:
        _refuse(
            "image.packages",
            f"{recipe.name} adds packages to {base.name}, which is not made of Debian packages",
        )
    if recipe.pip.requirements and source.rootfs is not None:
        _refuse(
            "pip",
            f"{recipe.name} adds requirements to {base.name}, which is a finished file system",
        )
    if "init" in recipe.model_fields_set and recipe.init != base.init:
        _refuse("init", _differs(recipe, base, "init", recipe.init, base.init))


def _check_machine(recipe: Recipe, base: Recipe) -> None:
    for name in sorted(recipe.machine.model_fields_set):
        said, has = getattr(recipe.machine, name), getattr(base.machine, name)
        if said != has:
            _refuse(f"machine.{name}", _differs(recipe, base, f"machine.{name}", said, has))


def _check_warm_up(recipe: Recipe, base: Recipe) -> None:
    runtime, under = recipe.warmup.runtime, base.warmup.runtime
    if under == "auto":
        _refuse("image.base", f"{base.name} cannot be a base: say its runtime in place of 'auto'")
    if under == "none":
        return
    if runtime not in {"none", under}:
        _refuse("warmup.runtime", _differs(recipe, base, "warmup.runtime", runtime, under))
    changed = sorted(key for key, value in recipe.env.items() if base.env.get(key) != value)
    if runtime != "none" and changed:
        _refuse(
            "env",
            f"{recipe.name} sets {', '.join(changed)}, but the warm runtime of its base "
            f"{base.name} has started without; set it there",
        )


def _differs(recipe: Recipe, base: Recipe, key: str, said: object, has: object) -> str:
    return (
        f"{recipe.name} says {key} = {said!r}, but its base {base.name} has {has!r}, and a fork "
        "has what its snapshot has; leave it out, or change the base"
    )


def _warm_up(said: WarmUp, under: WarmUp) -> WarmUp:
    """Return a warm-up that keeps what forks of the base do."""
    hooks = "\n".join(filter(None, (under.post_fork, said.post_fork)))
    return said.model_copy(
        update={
            "runtime": under.runtime if said.runtime == "none" else said.runtime,
            "post_fork": hooks,
            "post_fork_command": said.post_fork_command or under.post_fork_command,
        }
    )


def _refuse(field: str, message: str) -> NoReturn:
    raise InvalidRequest(message, field=field)
