"""Read a recipe: one TOML file that says what a machine boots and how it warms up.

    name = "python-numpy"

    [image]
    debian = { packages = ["python3", "python3-numpy"] }

    [machine]
    memory_mib = 512

    [warmup]
    runtime = "python"
    file = "warmup.py"

A recipe may come from anyone, so it can do no more than it says: keys that we do not know
are refused with the nearest one that we do, every path stays inside the recipe's folder,
names of packages and requirements can be nothing else (no options, no URLs), and every
value has a limit with a name.  Values are frozen; `load_recipe` is the only way in.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    model_validator,
)

from forkd.errors import InvalidRequest, NotFound
from forkd.host import files
from forkd.images import oci
from forkd.images.kernel import is_debian
from forkd.limits import (
    DISK_MIB_MAX,
    DISK_MIB_MIN,
    MEMORY_MIB_MAX,
    MEMORY_MIB_MIN,
    MEMORY_MIB_STEP,
    RECIPE_NAME_PATTERN,
    RUN_LINE_CHARS_MAX,
    RUN_LINES_MAX,
    RUNTIME_NAME_PATTERN,
    VCPUS_MAX,
)

RECIPE_FILE_NAME = "recipe.toml"

RECIPE_BYTES_MAX = 1024 * 1024
"""Largest recipe, and largest warm-up file; a warm-up travels to the guest in one frame."""

LINE_DOTS_MAX = 200
"""Most dots in a line of a recipe: the time that a key takes grows with the square of its parts."""

PACKAGES_MAX = 1_000
"""Most packages named by one recipe; what they depend on is not counted."""

REQUIREMENTS_MAX = 1_000
"""Most Python requirements named by one recipe."""

MODULES_MAX = 1_000
"""Most kernel modules named by one recipe; what they need is not counted."""

FILES_MAX = 1_000
"""Most entries of `files`; an entry may be a whole folder."""

ENV_MAX = 256
"""Most environment variables that a recipe sets."""

ENV_VALUE_BYTES_MAX = 32 * 1024
"""Longest value of one environment variable."""

COMMAND_ARGS_MAX = 256
"""Most arguments of a command in a recipe."""

TEXT_BYTES_MAX = 4_096
"""Longest path, argument or description."""

CODE_BYTES_MAX = 512 * 1024
"""Longest warm-up, and longest post-fork code."""

DISK_MIB_DEFAULT = 2_048

WARM_UP_S_MAX = 3_600.0
"""Longest that a warm-up may take."""

CMDLINE_BYTES_MAX = 1_024
"""Longest addition to the kernel's command line: half of what x86 kernels take."""


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not hold a NUL")
    return text


def _guest_path(text: str) -> str:
    path = PurePosixPath(text)
    if not path.is_absolute() or ".." in path.parts:
        raise ValueError("must be an absolute path without '..'")
    return str(path)


def _inner_path(text: str) -> str:
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError("must be a path inside the recipe's folder, without '..'")
    return str(path)


def _modules(value: object) -> str | tuple[str, ...]:
    match value:
        case "default" | "all" | "none":
            return value
        case list() | tuple() if len(value) <= MODULES_MAX:
            if all(isinstance(name, str) and _MODULE.fullmatch(name) for name in value):
                return tuple(value)
    raise ValueError(f"must be 'default', 'all', 'none' or a list of names, at most {MODULES_MAX}")


_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def _pattern(pattern: str) -> StringConstraints:
    return StringConstraints(pattern=pattern, max_length=TEXT_BYTES_MAX)


Text = Annotated[str, Field(max_length=TEXT_BYTES_MAX), AfterValidator(_no_nul)]
GuestPath = Annotated[Text, AfterValidator(_guest_path)]
InnerPath = Annotated[Text, AfterValidator(_inner_path)]
Name = Annotated[str, StringConstraints(pattern=RECIPE_NAME_PATTERN)]
Package = Annotated[str, _pattern(r"^[a-z0-9][a-z0-9+.-]+(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+)?$")]
Suite = Annotated[str, _pattern(r"^[a-z][a-z0-9-]*$")]
Requirement = Annotated[
    str,
    _pattern(
        r"^[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._, -]+\])?\s*([<>=!~][A-Za-z0-9<>=!~.*+, -]*)?$"
    ),
]
User = Annotated[str, _pattern(r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?$")]
EnvName = Annotated[str, _pattern(r"^[A-Za-z_][A-Za-z0-9_]*$")]
EnvValue = Annotated[str, Field(max_length=ENV_VALUE_BYTES_MAX), AfterValidator(_no_nul)]
Env = Annotated[Mapping[EnvName, EnvValue], Field(max_length=ENV_MAX)]
Command = Annotated[tuple[Text, ...], Field(min_length=1, max_length=COMMAND_ARGS_MAX)]
RunLine = Annotated[
    str, Field(min_length=1, max_length=RUN_LINE_CHARS_MAX), AfterValidator(_no_nul)
]
Runtime = Annotated[str, StringConstraints(pattern=RUNTIME_NAME_PATTERN)]
Base = Annotated[Text, Field(min_length=1)]
Modules = Annotated[str | tuple[str, ...], PlainValidator(_modules)]
Code = Annotated[str, Field(max_length=CODE_BYTES_MAX), AfterValidator(_no_nul)]
CommandLine = Annotated[str, StringConstraints(pattern=r"^[ -~]*$", max_length=CMDLINE_BYTES_MAX)]


class _Frozen(BaseModel):
    """A part of a recipe: nothing unknown in it, and nothing changes it later."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DebianSource(_Frozen):
    """Packages of a Debian suite, with what they depend on."""

    suite: Suite = "bookworm"
    packages: Annotated[tuple[Package, ...], Field(max_length=PACKAGES_MAX)] = ()
    variant: Literal["minbase", "important", "standard"] = "minbase"


class ImageSource(_Frozen):
    """Where the root file system comes from: exactly one of the first four.

    Attributes:
        debian: Packages.
        oci: An OCI layout folder, an OCI or `docker save` archive, or a registry reference.
        rootfs: A finished ext4 file system, used as it is.
        base: Another recipe, by its name or its folder; this one is baked in a fork of it.
        packages: Debian packages beside those of the base.
        modules: Which of the kernel's modules are put into it: those that guests ask for, all,
            none, or these with all that they need.
    """

    debian: DebianSource | None = None
    oci: Text | None = None
    rootfs: Text | None = None
    base: Base | None = None
    packages: Annotated[tuple[Package, ...], Field(max_length=PACKAGES_MAX)] = ()
    modules: Modules = "default"

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        sources = ("debian", "oci", "rootfs", "base")
        if len([name for name in sources if getattr(self, name) is not None]) != 1:
            raise ValueError("name exactly one of debian, oci, rootfs and base")
        if self.packages and self.base is None:
            raise ValueError("packages go with base; for others write debian = { packages = […] }")
        if self.base is not None and "modules" in self.model_fields_set:
            raise ValueError("modules are those of the base: say them there")
        if self.rootfs is not None and "modules" in self.model_fields_set:
            raise ValueError("modules do not go with rootfs: put them into it yourself")
        return self

    @property
    def wanted_modules(self) -> str | tuple[str, ...]:
        """What is put into the image, which is nothing in a finished one."""
        return "none" if self.rootfs is not None else self.modules


class RecipeFile(_Frozen):
    """A file, or a folder with all in it, copied into the root file system.

    Attributes:
        source: Its path inside the recipe's folder.
        target: Its path in the guest.
        mode: Permissions of files; None takes 0755 if the source is executable, else 0644.
    """

    source: InnerPath
    target: GuestPath
    mode: Annotated[int, Field(strict=True, ge=0, le=0o7777)] | None = None


class Pip(_Frozen):
    """Python packages put beside the image's own."""

    requirements: Annotated[tuple[Requirement, ...], Field(max_length=REQUIREMENTS_MAX)] = ()


class MachineShape(_Frozen):
    """The machine that the image is baked in.

    Attributes:
        vcpus: Virtual CPUs.
        cpu: Which features of the processor the guest sees: `host` for all that this host has,
            `portable` for those that many hosts of the same vendor have.
        memory_mib: Memory, in MiB.
        disk_mib: Size of the disk; None is `DISK_MIB_DEFAULT`, or the size of a given rootfs.
        kernel: `debian` for the host's release's, the beginning of a version of Linux, such as
            `6.12`, for Debian's kernel of that version, or the path of a bzImage or vmlinux.
        modules: Folder with the modules of a kernel given by path, as under `/lib/modules`;
            None if the kernel has built in what it needs.
        cmdline: Added to the kernel's command line.
    """

    vcpus: Annotated[int, Field(strict=True, ge=1, le=VCPUS_MAX)] = 1
    cpu: Literal["host", "portable"] = "host"
    memory_mib: Annotated[
        int, Field(strict=True, ge=MEMORY_MIB_MIN, le=MEMORY_MIB_MAX, multiple_of=MEMORY_MIB_STEP)
    ] = 512
    disk_mib: Annotated[int, Field(strict=True, ge=DISK_MIB_MIN, le=DISK_MIB_MAX)] | None = None
    kernel: Text = "debian"
    modules: Text | None = None
    cmdline: CommandLine = ""


class Ready(_Frozen):
    """When a warm-up counts as done: once this command ends with status 0 in the guest."""

    command: Command


class WarmUp(_Frozen):
    """What happens once in the parent, and what happens in each child.

    Attributes:
        run: Shell lines that are run in the guest, one after the other, before all else; one that
            fails ends the bake.
        runtime: The persistent interpreter that is started: one of forkd's, or a program of the
            image's in `/usr/lib/forkd/runtimes`; `none`; `auto` for Python if the image has it.
        code: What it evaluates first; `load_recipe` also puts the contents of `file` here.
        file: The same, as a file inside the recipe's folder.
        post_fork: Code that the interpreter runs in each child.
        post_fork_command: A program that runs in each child.
        ready: What to wait for beside the code; None waits for nothing else.
        timeout_s: Seconds that all of it may take: `timeout_secs` in a recipe, as in the REST API,
            or `timeout_s`, its first name.
    """

    run: Annotated[tuple[RunLine, ...], Field(max_length=RUN_LINES_MAX)] = ()
    runtime: Runtime = "none"
    code: Code = ""
    file: InnerPath | None = None
    post_fork: Code = ""
    post_fork_command: Command | None = None
    ready: Ready | None = None
    timeout_s: Annotated[
        float,
        Field(
            gt=0,
            le=WARM_UP_S_MAX,
            allow_inf_nan=False,
            validation_alias=AliasChoices("timeout_secs", "timeout_s"),
        ),
    ] = 120.0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.code and self.file is not None:
            raise ValueError("give code or file, not both")
        has_code = self.code or self.file is not None or self.post_fork
        if self.runtime in {"none", "auto"} and has_code:
            raise ValueError(
                "code, file and post_fork need runtime = 'python' or another than 'none' and 'auto'"
            )
        return self


class Recipe(_Frozen):
    """All of a recipe; `folder` is where it was read from.

    Attributes:
        env: Environment of what runs in the guest, over that of an OCI image.
        cwd: Where it runs; None is `/`, or what the OCI image says.
        user: As whom; None is `root`, or what the OCI image says.
        init: Who is process 1: our agent, or the image's own init with the agent beside it.
        under: The recipe in a fork of which it is baked; see `forkd.images.bases`.
    """

    folder: Path
    name: Name
    description: Text = ""
    image: ImageSource
    files: Annotated[tuple[RecipeFile, ...], Field(max_length=FILES_MAX)] = ()
    pip: Pip = Pip()
    env: Env = {}
    cwd: GuestPath | None = None
    user: User | None = None
    init: Literal["agent", "image"] = "agent"
    machine: MachineShape = MachineShape()
    warmup: WarmUp = WarmUp()
    under: Recipe | None = None

    @model_validator(mode="after")
    def _nothing_is_added_to_a_finished_rootfs(self) -> Self:
        if self.image.rootfs is not None and (
            self.files or self.pip.requirements or self.machine.disk_mib is not None
        ):
            raise ValueError("files, pip and machine.disk_mib do not go with image.rootfs")
        return self


_INTERNAL = {"folder", "under"}
"""Members of a recipe that its file does not say."""


def load_recipe(path: Path, *, confined: bool = False) -> Recipe:
    """Read the recipe in `path`, a folder or the TOML file itself.

    Args:
        path: Where it is.
        confined: Refuse a recipe that names files outside of its folder, and name its own by their
            paths in there: it comes from a client, who may see no others.

    Raises:
        NotFound: There is no such recipe.
        InvalidRequest: It is no regular file, is not TOML, or says something we do not understand;
            `context["field"]` is the key at fault.
    """
    file = path / RECIPE_FILE_NAME if files.is_folder(path) else path
    try:
        recipe = parse_recipe(_read_table(file), folder=file.parent.absolute())
        if confined:
            _check_confined(recipe)
    except (NotFound, InvalidRequest) as error:
        if not confined:
            raise
        message = str(error).replace(f"{file.parent.absolute()}/", "")
        context = {key: value for key, value in error.context.items() if key != "path"}
        raise type(error)(message, **context) from error
    return recipe


def _read_table(file: Path) -> dict[str, Any]:
    text = _read_text(file, what="recipe")
    if any(line.count(".") > LINE_DOTS_MAX for line in text.split("\n")):
        raise InvalidRequest(
            f"{file} has a line of more than {LINE_DOTS_MAX} dots; data belongs into warmup.file"
        )
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InvalidRequest(f"{file} is nested too deeply") from None
    except ValueError as error:  # a number of too many digits is no TOMLDecodeError
        raise InvalidRequest(f"{file} is not TOML: {error}") from error


def parse_recipe(table: Mapping[str, Any], *, folder: Path) -> Recipe:
    """Return the recipe that `table` says, its warm-up file read.

    Raises:
        InvalidRequest: See `load_recipe`.
        NotFound: Its warm-up file does not exist.
    """
    for name in _INTERNAL & table.keys():
        raise InvalidRequest(f"recipe has the unknown key '{name}'", field=name)
    try:
        recipe = Recipe.model_validate({**table, "folder": folder})
    except ValidationError as error:
        raise _refusal(error) from error
    if recipe.warmup.file is None:
        return recipe
    code = _read_text(inside(recipe.folder, recipe.warmup.file), what="warm-up")
    if len(code) > CODE_BYTES_MAX:
        raise InvalidRequest(
            f"{recipe.warmup.file} is longer than {CODE_BYTES_MAX}", field="warmup.file"
        )
    return recipe.model_copy(update={"warmup": recipe.warmup.model_copy(update={"code": code})})


def _check_confined(recipe: Recipe) -> None:
    """Return if a recipe names no file outside of its folder.

    Raises:
        InvalidRequest: It does; the key is named.
    """
    machine, image = recipe.machine, recipe.image
    named = {
        "image.rootfs": () if image.rootfs is None else (image.rootfs,),
        "image.oci": () if image.oci is None else oci.local_paths(image.oci),
        "machine.kernel": () if is_debian(machine.kernel) else (machine.kernel,),
        "machine.modules": () if machine.modules is None else (machine.modules,),
    }
    for field, names in named.items():
        for name in names:
            inside(recipe.folder, name, field=field)


def inside(folder: Path, name: str, *, field: str = "files") -> Path:
    """Return the path of `name` in `folder`, with links followed.

    Raises:
        InvalidRequest: It, or a symbolic link, leads out of the folder; `field` is at fault.
    """
    path = files.real_path(folder / name)
    if not path.is_relative_to(files.real_path(folder)):
        raise InvalidRequest(f"{name} leads out of the recipe's folder", field=field)
    return path


def _read_text(file: Path, *, what: str) -> str:
    try:
        data = files.read_regular(file, RECIPE_BYTES_MAX + 1)
    except NotFound as error:
        raise NotFound(f"no {what} at {file}", path=str(file)) from error
    if len(data) > RECIPE_BYTES_MAX:
        raise InvalidRequest(f"{file} is larger than {RECIPE_BYTES_MAX} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{file} is not UTF-8: {error.reason}") from error


def _refusal(error: ValidationError) -> InvalidRequest:
    """Say one thing wrong with a recipe, for a person: a misspelt key before what it caused."""
    wrong = error.errors(include_url=False, include_context=False)
    first = next((each for each in wrong if each["type"] == "extra_forbidden"), wrong[0])
    parts = first["loc"]
    field = re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, parts)))
    if first["type"] == "extra_forbidden":
        return InvalidRequest(_unknown_key(field, parts), field=field)
    reason = first["msg"].removeprefix("Value error, ")
    where = f"recipe key '{field}'" if field else "recipe"
    return InvalidRequest(f"{where}: {reason}", field=field)


def _unknown_key(field: str, parts: tuple[int | str, ...]) -> str:
    fields = _model_at(parts[:-1]).model_fields
    known = {_key(name, fields[name].validation_alias) for name in fields} - _INTERNAL
    nearest = difflib.get_close_matches(str(parts[-1]), known, n=1, cutoff=0.0)
    return f"recipe has the unknown key '{field}'; did you mean '{nearest[0]}'?"


def _key(name: str, alias: object) -> str:
    """Return what a field is called in a recipe."""
    return str(alias.choices[0]) if isinstance(alias, AliasChoices) else name


def _model_at(parts: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the part of a recipe that the path `parts` leads to."""
    model: type[BaseModel] = Recipe
    for part in parts:
        if isinstance(part, str):
            model = next(_models_in(model.model_fields[part].annotation))
    return model


def _models_in(annotation: Any) -> typing.Iterator[type[BaseModel]]:  # noqa: ANN401 - a type
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)
