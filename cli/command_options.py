"""Define the options of the commands: those of probes and of loading come from dataclass fields, the others are here.

An option is an annotation and a default, as Typer reads them; a table maps names to options. `Command` shows them.
"""

import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand, TyperOption

from landscape.options import parse_arguments, parse_numbers
from landscape.subject.spec import Spec

Option: TypeAlias = tuple[Any, Any]
TYPED = "COMMANDLINE"  # Typer's name for where the value of an option comes from
GENERAL, OWN, DATA, OUTPUT = "Options", "This probe", "Model and data", "Output"  # panels of the help
QUIET, DEBUG = "print errors only", "show the traceback of an error"
VERBOSE = "also print how the numbers are computed: engine, memory, threads"
Quiet = Annotated[bool, typer.Option(help=QUIET)]
Verbose = Annotated[bool, typer.Option(help=VERBOSE)]
Debug = Annotated[bool, typer.Option(help=DEBUG)]
GENERAL_FIELDS = ("device", "seed")
# Loading options with a fixed default. That of the others is None: it depends on probe, preset and checkpoint.
FIXED = (*GENERAL_FIELDS, "trust_pickle", "allow_missing")
COMMON = ("data", "samples", "batch_size", "out", "device", "seed", "help_all")  # what every --help shows
CONTEXT: Option = (typer.Context, inspect.Parameter.empty)  # in a table: Typer passes the context of the call


def option(kind: Any, help: str, default: Any, panel: str, *flags: str) -> Option:
    """One option, with its default in its help; what Rich would take for markup there, such as [@LOSS], is shown."""
    shown = re.sub(r"\[(?=[a-z#/@])", r"\\[", _with_default(help, default))
    return Annotated[kind, typer.Option(*flags, help=shown, rich_help_panel=panel, show_default=False)], default


def _with_default(help: str, default: Any) -> str:
    if default is False or default in (None, "", (), []) or "default" in help:
        return help
    return f"{help}; default {'on' if default is True else f'{default:g}' if isinstance(default, float) else default}"


class Command(TyperCommand):
    """A command whose `--help` names every option whole, in 80 columns too."""

    def format_help(self, context: Any, formatter: Any, *, everything: bool = False) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.table import Table

        console = Console(highlight=False, emoji=False)
        about = re.sub(r"(?<!\n)\n(?!\n)", " ", str(self.help))
        console.print(Padding(f"[bold]{escape(self.get_usage(context))}[/]\n\n{about}\n", (0, 1)))
        for title, params in self.panels(everything).items():
            table = Table.grid(padding=(0, 1))
            table.add_column(style="bold cyan", no_wrap=True)
            table.add_column(style="bold yellow")
            table.add_column(overflow="fold")
            for param in params:
                table.add_row(*_row(param, context))
            console.print(Panel(table, title=title, title_align="left", border_style="dim"))

    def panels(self, everything: bool) -> Mapping[str, Sequence[Any]]:
        """The parameters that the help shows, by the title of their panel; here these are all."""
        panels: dict[str, list[Any]] = {}
        for param in self.params:
            title = GENERAL if isinstance(param, TyperOption) else "Arguments"
            panels.setdefault(getattr(param, "rich_help_panel", None) or title, []).append(param)
        return panels


class ProbeCommand(Command):
    """A command whose `--help` fits one screen, its own options and the common ones; `--help-all` shows them all."""

    def panels(self, everything: bool) -> Mapping[str, Sequence[Any]]:
        panels = super().panels(everything)
        if everything:
            return panels
        common = [param for name in COMMON for param in self.params if param.name == name]
        return {**{name: panels[name] for name in ("Arguments", OWN) if name in panels}, "Every probe": common}


def _row(param: Any, context: Any) -> tuple[str, str, str]:
    """Name, type and help of a parameter: a flag that is on by default has both names, choices stand in the help."""
    help = _with_default(str(param.help), param.default if param.show_default else None)
    help += "; required" if param.required else ""
    if not isinstance(param, TyperOption):
        return param.metavar or param.name, "", help
    if param.is_flag:
        return "\n".join(param.opts if param.default is False else (*param.opts, *param.secondary_opts)), "", help
    if param.metavar:
        return param.opts[0], param.metavar, help
    types = param.display_type(context).partition(">")[0].removeprefix("<").split("|")
    if len(types) == 1:
        return param.opts[0], "str" if param.multiple else types[0].removesuffix(" range"), help
    named = all(word in help for word in types)
    return param.opts[0], "str", help if named else f"{', '.join(filter(None, types))}: {help}"


def _help_all(context: typer.Context, given: bool) -> None:
    if given:
        command: Any = context.command
        command.format_help(context, context.make_formatter(), everything=True)
        raise typer.Exit


RUN: Mapping[str, Option] = {
    "preset": option(str, "settings of a paper: park2022", "", GENERAL),
    "workers": option(int, "number of processes that measure in parallel, with CUDA one per device", 1, GENERAL),
    "scheduler": option(str, "measure on the workers of a dask scheduler: tcp://HOST:8786 or its file", "", GENERAL),
    "shard": option(
        str, "measure the I-th of N parts of the units, for landscape merge; I/N, such as 1/8", "", GENERAL
    ),
    "memory": option(
        str,
        "memory planned for samples, graphs and stored vectors, such as 8GiB, no bound of the process; "
        "default: what is free",
        "",
        GENERAL,
    ),
    "label": option(list[str], "name in the results file, one per checkpoint; repeatable", [], OUTPUT),
    "out": option(Path, "results file", Path("results.h5"), OUTPUT),
    "overwrite": option(bool, "measure again what the file already holds", False, OUTPUT),
    "fsync": option(bool, "flush each finished unit to the disk: even a power cut loses nothing", False, OUTPUT),
    "quiet": option(bool, QUIET, False, OUTPUT),
    "verbose": option(bool, VERBOSE, False, OUTPUT),
    "log": option(Path | None, "append events to this file, as JSON lines", None, OUTPUT),
    "debug": option(bool, DEBUG, False, OUTPUT),
}
HELP_ALL: Option = (
    Annotated[bool, typer.Option(
        "--help-all", help="all options, such as --model, --split, --loss, --workers",
        rich_help_panel=GENERAL, is_eager=True, expose_value=False, callback=_help_all,
    )],
    False,
)  # fmt: skip


def probe_options(kind: type[Any]) -> dict[str, Option]:
    """The options of a probe: the fields of its dataclass, except the seed, which is a loading option too."""
    table = {}
    for name, annotation, help, default in _documented(kind):
        if name != "seed":
            if typing.get_origin(annotation) is tuple:  # repeatable
                annotation, default = list[str], []
            flag = name.replace("_", "-")
            flags = f"--{flag}/--no-{flag}" if default is True else f"--{flag}"  # what is on can be turned off
            table[name] = option(annotation, help, default, OWN, flags)
    return table


def loading_options(defaults: Mapping[str, Any], *, without: tuple[str, ...] = ()) -> dict[str, Option]:
    """The loading options: the documented fields of `Spec`, without those that the command does not use.

    `defaults`, which apply to options that are not given, only appear in the help texts.
    """
    table = {}
    for name, annotation, help, default in _documented(Spec):
        if name in without:
            continue
        if name == "model_arg":
            annotation, default = list[str], []
        elif name not in FIXED:
            text = annotation == int | str or typing.get_origin(annotation) is tuple
            annotation, default = (str if text else annotation) | None, None
        help += f"; default {defaults[name]}" if name in defaults else ""
        table[name] = option(annotation, help, default, GENERAL if name in GENERAL_FIELDS else DATA)
    return table


def loading_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """The loading options among those of a command as fields of `Spec`, without those that were not given.

    Raises:
        OptionError: a text cannot be parsed.
    """
    given = {name: options[name] for name, *_ in _documented(Spec) if options.get(name) is not None}
    given |= {name: parse_numbers(name, given[name]) for name in ("mean", "std") if name in given}
    return given | {"model_arg": parse_arguments("model_arg", given.get("model_arg", []))}


def reading_values(loading: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `read_checkpoint` among those of loading."""
    return {name: loading[name] for name in ("weights", "trust_pickle") if name in loading}


def typed_options(context: typer.Context, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the user typed, also those with their default values; a preset chooses the others."""
    sources = {name: context.get_parameter_source(name) for name in options}
    return {name: options[name] for name, source in sources.items() if source is not None and source.name == TYPED}


def with_options(function: Callable[..., None], table: Mapping[str, Option]) -> Callable[..., None]:
    """A function as a command whose options Typer reads from a table."""
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in table.items()
    ]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {name: annotation for name, (annotation, _) in table.items()}
    return function


def own_options(function: Callable[..., None], **renamed: str) -> dict[str, str]:
    """The options of a command by the keys of a study's file that they change; `renamed`: those with other names."""
    return {name: name for name in inspect.signature(function).parameters} | renamed


def _documented(kind: type[Any]) -> Iterator[tuple[str, Any, str, Any]]:
    """Name, type, help text and default of every field that has a help text."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if typing.get_origin(hints[field.name]) is Annotated:
            annotation, help = typing.get_args(hints[field.name])[:2]
            yield field.name, annotation, help, field.default
