"""How commands describe themselves: usage, arguments, options and examples.

Plain text without markup, so that what a help text says is what a person reads.  A command's text
is the docstring of its function; lines below `Examples:` are shown as they stand.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from forkd.cli.context import shared
from forkd.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

F = TypeVar("F", bound="Callable[..., object]")

EXAMPLES = "Examples:\n"

KINDS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}
"""What stands for an option's value, unless the option says so itself."""


class Command(TyperCommand):
    """A command with a plain help text."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002 - typer's own types
        """Return what follows the command's name in its usage."""
        arguments = (each for each in self.params if each.param_type_name == "argument")
        return [self.options_metavar or "", *map(argument_name, arguments)]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401, ARG002 - as above
        """Write what the command does, without its examples."""
        formatter.write_paragraph()
        formatter.write_text(described(self)[0])

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - as above
        """Write what it takes, then its examples."""
        write_parameters(self.get_params(ctx), formatter)
        examples = described(self)[1]
        if examples:
            with formatter.section("Examples"):
                for line in examples:
                    formatter.write(f"  {line}\n")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - as above
        """Parse the command's own options; the form of output may stand in front of the command."""
        if shared.output is not None and not ctx.resilient_parsing:
            ctx.default_map = self._form_of_output(ctx, shared.output)
        return super().parse_args(ctx, args)

    def _form_of_output(self, ctx: Any, output: str) -> dict[str, object]:  # noqa: ANN401 - as above
        names = {each.name for each in self.params}
        if "output" in names:
            return {"output": output}
        if output == "json" and "json" in names:
            return {"json": True}
        what, option = ("JSON", "--json") if output == "json" else (repr(output), "--output")
        raise InvalidRequest(
            f"`{ctx.command_path}` cannot print {what}; leave out {option}", field="output"
        )

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - as above
        """Run the command; what was typed is kept for a message about it."""
        shared.typed = {parameter_name(each): ctx.params.get(each.name) for each in self.params}
        return super().invoke(ctx)


class Trailing(Command):
    """A command whose arguments end with the command line of a program.

    Our options end where the program begins.  They may also follow the first argument, as in
    `forkd exec SANDBOX -it bash`, because no program's name begins with a dash.
    """

    first: tuple[str, ...] = ()
    """Options in place of the first argument: with one of them the program comes first."""

    allow_interspersed_args = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - as above
        """Parse what is ours, and leave the program's as it is."""
        end = self._options(args)
        rest = args[end:]
        without_first = any(each.partition("=")[0] in self.first for each in args[:end])
        if len(rest) > 1 and rest[0] != "--" and _is_option(rest[1]) and not without_first:
            more = 1 + self._options(rest[1:])
            program = rest[more + 1 :] if rest[more : more + 1] == ["--"] else rest[more:]
            args = [*args[:end], *rest[1:more], "--", rest[0], *program]
        return super().parse_args(ctx, args)

    def _options(self, args: list[str]) -> int:
        """Return how many of the first arguments are options and their values."""
        place = 0
        while place < len(args) and _is_option(args[place]):
            place += 2 if self._takes_next(args[place]) else 1
        return place

    def _takes_next(self, word: str) -> bool:
        """Whether the argument that follows an option is its value."""
        if word.startswith("--"):
            option = self._option(word)
            return option is not None and not option.is_flag
        for place, letter in enumerate(word[1:], start=2):
            option = self._option(f"-{letter}")
            if option is not None and not option.is_flag:
                return place == len(word)
        return False

    def _option(self, flag: str) -> Any:  # noqa: ANN401 - as above
        return next((each for each in self.params if flag in each.opts), None)


def _is_option(word: str) -> bool:
    return word.startswith("-") and word not in {"-", "--"}


class CommandGroup(TyperGroup):
    """Commands that begin with the same word."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - as above
        """Parse what is in front of a command; without a command show the help."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401, ARG002 - as above
        """Write what the commands are for."""
        formatter.write_paragraph()
        formatter.write_text(described(self)[0])

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - as above
        """Write the commands, then the options in front of them."""
        self.format_commands(ctx, formatter)
        write_parameters(self.get_params(ctx), formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401, ARG002 - as above
        """Write each command with the first sentence of its help."""
        rows = [(each.name, summary(each)) for each in self.commands.values() if not each.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class Commands(typer.Typer):
    """Where the commands of a file are registered."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - typer's own types
        super().__init__(cls=CommandGroup, rich_markup_mode=None, add_completion=False, **settings)

    def command(
        self,
        name: str | None = None,
        **settings: Any,  # noqa: ANN401 - as above
    ) -> Callable[[F], F]:
        """Register a function as a command."""
        settings.setdefault("cls", Command)
        registering: Callable[[F], F] = super().command(name, **settings)
        return registering


def described(command: Any) -> tuple[str, list[str]]:  # noqa: ANN401 - typer's own types
    """Return what a command does, and the lines of its examples."""
    text, _, examples = inspect.cleandoc(command.help or "").partition(EXAMPLES)
    return text.strip(), inspect.cleandoc(examples).splitlines()


def summary(command: Any) -> str:  # noqa: ANN401 - as above
    """Return the first paragraph of what a command does, as one line."""
    return " ".join(described(command)[0].partition("\n\n")[0].split())


def parameter_name(parameter: Any) -> str:  # noqa: ANN401 - as above
    """Return what a person calls an option or an argument."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return str(next((each for each in parameter.opts if each.startswith("--")), parameter.opts[0]))


def argument_name(argument: Any) -> str:  # noqa: ANN401 - as above
    """Return an argument as a usage line has it."""
    many = "..." if argument.nargs == -1 else ""
    word = (argument.metavar or argument.name.upper()) + many
    return word if argument.required else f"[{word}]"


def flags(option: Any) -> list[str]:  # noqa: ANN401 - as above
    """Return every way to write an option, the short ones first."""
    return [*sorted(option.opts, key=len), *option.secondary_opts]


def value_name(option: Any) -> str:  # noqa: ANN401 - as above
    """Return what stands for an option's value; empty if it takes none."""
    if option.is_flag:
        return ""
    if option.metavar is not None:
        return str(option.metavar)
    annotation = option.type_descriptor.annotation
    inner = get_args(annotation)[0] if get_origin(annotation) is list else annotation
    if get_origin(inner) is Literal:
        return "|".join(get_args(inner))
    return KINDS.get(inner, "TEXT")


def default_shown(parameter: Any) -> str:  # noqa: ANN401 - as above
    """Return a parameter's default as text; empty if there is none worth showing."""
    value = parameter.default
    if value is None or isinstance(value, bool) or callable(value) or value in ([], ()):
        return ""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def write_parameters(parameters: Iterable[Any], formatter: Any) -> None:  # noqa: ANN401 - as above
    """Write arguments and options, in sections."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for each in parameters:
        if each.hidden:
            continue
        if each.param_type_name == "argument":
            sections.setdefault("Arguments", []).append((argument_name(each), each.help or ""))
        else:
            panel = each.rich_help_panel or "Options"
            sections.setdefault(panel, []).append(_option_row(each))
    for section in sorted(sections, key=_rank):
        with formatter.section(section):
            formatter.write_dl(sections[section])


def _rank(section: str) -> int:
    """Return where a section belongs: arguments, options, then what has a name of its own."""
    return {"Arguments": 0, "Options": 1}.get(section, 2)


def _option_row(option: Any) -> tuple[str, str]:  # noqa: ANN401 - as above
    left = " ".join(filter(None, [", ".join(flags(option)), value_name(option)]))
    return left, " ".join(_words(option))


def _words(option: Any) -> Iterator[str]:  # noqa: ANN401 - as above
    if option.help:
        yield option.help
    if option.multiple:
        yield "May be repeated."
    if option.required:
        yield "[required]"
    elif shown := default_shown(option):
        yield f"[default: {shown}]"
