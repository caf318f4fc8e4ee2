"""The `landscape` command: its subcommands, exit codes and one-line errors."""

import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from landscape.cli import (
    compare,
    doctor,
    figures,
    networks,
    process_setup,
    results_files,
    show,
    studies,
    study,
    training,
)
from landscape.cli.command_options import Command, ProbeCommand
from landscape.cli.measuring import command_of
from landscape.options import OptionError, alternatives, printable
from landscape.probes import FEATURES_HELP, PLUGINS, PROBES, REPRESENTATIONS, probe_class
from landscape.reporting.progress import is_main_process, print_log

MEASURING = {**{name: entry.help for name, entry in PROBES.items()}, "features": FEATURES_HELP}
PANELS = {**{name: entry.group for name, entry in PROBES.items()}, "features": REPRESENTATIONS}
STUDIES, TRAIN, INSPECT = "Studies of several networks", "Train", "Inspect and exchange"


class Commands(TyperGroup):
    """List probes from their table; only the one that is called is imported, for its options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        models = [value for option, value in pairwise(args) if option == "--model"]
        models += [word.removeprefix("--model=") for word in args if word.startswith("--model=")]
        for model in models:
            if model.startswith("hf:"):
                from landscape.checkpoints.file_names import huggingface_folder

                huggingface_folder(model.removeprefix("hf:"))  # fails for a missing folder before torch is imported
        if args and args[0] in MEASURING and not _completes_a_file():
            single = typer.Typer(add_completion=False)
            about = f"{probe_class(args[0]).__doc__} " if PANELS[args[0]] == PLUGINS else ""
            _add_probe(single, args[0], command_of(args[0]), about)
            self.commands[args[0]] = typer.main.get_command(single)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands, name="landscape", no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)  # fmt: skip


def _completes_a_file() -> bool:
    """Whether a shell wants the end of a word that is no option: it needs neither those of a probe nor torch."""
    words = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    return "_LANDSCAPE_COMPLETE" in os.environ and not words.rpartition(" ")[2].startswith("-")


def _add_probe(to: typer.Typer, name: str, function: Any, about: str = "") -> None:
    panel = f"Measure: {PANELS[name]}"
    to.command(name, cls=ProbeCommand, help=f"{about}{MEASURING[name]}", rich_help_panel=panel)(function)


def _placeholder() -> None:
    """Stands in for a probe in the list of commands until the probe is called."""


for _name in MEASURING:
    _add_probe(app, _name, _placeholder)
OTHERS: Mapping[str, Mapping[str, Any]] = {  # commands that are no probes, by the panel that lists them
    STUDIES: {"smoothing": studies.smoothing, "heads": studies.heads, "sweep": studies.sweep},
    TRAIN: {
        "build-up": studies.build_up, "train": training.train, "models": training.models, "demo": studies.demo,
        "reproduce": study.reproduce,
    },
    INSPECT: {
        "plot": figures.plot, "animate": figures.animate, "report": figures.report, "compare": compare.compare,
        "doctor": doctor.doctor, "show": show.show, "layers": networks.layers, "evaluate": networks.evaluate,
        "merge": results_files.merge, "repair": results_files.repair, "import": results_files.import_,
        "export": results_files.export, "cite": results_files.cite,
    },
}  # fmt: skip
for _panel, _commands in OTHERS.items():
    for _name, _function in _commands.items():
        app.command(_name, cls=Command, rich_help_panel=_panel)(_function)
app.add_typer(study.app, name="study", rich_help_panel=STUDIES)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(metadata.version("landscape-probes"))
        raise typer.Exit


@app.callback()
def landscape(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """See why a trained neural network generalises, or does not: loss surfaces, Hessian spectra, feature maps."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    process_setup.set_up_process()
    process_setup.end_by_signals()
    code = exit_code(sys.argv[1:] if arguments is None else arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        # In a process group everything is written by now, and threads of a closed connection may abort a normal exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@cache
def _tree() -> Any:
    """The commands with their options, which Typer would read from the signatures again at every call of `app`."""
    return typer.main.get_command(app)


def exit_code(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code.

    0 done, 1 error, 2 usage error, 3 findings of `doctor`, 130 interrupted, 143 terminated.
    """
    usage_error: Any = typer.BadParameter.__base__
    process_setup.RECEIVED.clear()
    try:
        _refuse_process_group(arguments)
        quiet, verbose = ("--quiet" in arguments, "--verbose" in arguments)
        if quiet and verbose:
            raise OptionError("--quiet prints errors only and --verbose prints more; give one of them")
        with print_log(quiet=quiet, verbose=verbose):
            code = _tree()(list(arguments), standalone_mode=False)
        if code == process_setup.INTERRUPTED:  # Typer silently turns Ctrl-C into this code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except usage_error as error:
        if not arguments:
            return 2  # the help has been shown
        name, at = "", error.ctx
        while at is not None and at.parent is not None:
            name, at = f"{at.info_name} {name}".strip(), at.parent
        see = f"landscape {name} --help-all" if name in MEASURING else f"landscape {name} --help".replace("  ", " ")
        return _fail(f"{error.format_message().strip()} (see: {see})", 2)
    except OptionError as error:
        return _fail(_one_line(error), 2)
    except process_setup.Terminated:
        return _ended(process_setup.TERMINATED)
    except (KeyboardInterrupt, typer.Abort):
        return _ended(process_setup.INTERRUPTED)
    except (BrokenPipeError, SystemExit) as error:
        if "_LANDSCAPE_COMPLETE" in os.environ:
            return 0  # a shell has its words
        if isinstance(error.__context__ or error, BrokenPipeError):  # which Typer turns into an exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of the pipe is gone
            return 0
        # Of a model's or a loss's own code, in the middle of a measurement.
        code = getattr(error, "code", 1)
        return _fail(f"a user's code called sys.exit({code!r}); everything finished is kept, remove that call", 1)
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        if process_setup.RECEIVED:
            return _ended(
                process_setup.INTERRUPTED if process_setup.RECEIVED[0] == signal.SIGINT else process_setup.TERMINATED
            )
        if isinstance(error, OSError) and error.strerror and error.filename:  # raised by the system, not by us
            return _fail(f"cannot use {error.filename} ({error.strerror}); correct it or give another path", 1)
        known = isinstance(error, ValueError | OSError | RuntimeError | FloatingPointError | ImportError)
        text = _one_line(error)
        if type(error).__name__ in ("MemoryError", "_ArrayMemoryError", "OutOfMemoryError"):  # Python, NumPy, PyTorch
            return _fail(f"out of memory ({text or 'none left'}); everything finished is kept, {_less(arguments)}", 1)
        return _fail(text if known else f"{type(error).__name__}: {text}; --debug shows where", 1)


def _less(arguments: Sequence[str]) -> str:
    """What needs less memory, of the options that a command has."""
    name, what = next(iter(arguments), ""), ["a smaller --batch-size", "fewer --samples", "another --device"]
    if name not in MEASURING:  # which have all of them
        known = {option for one in getattr(_tree().commands.get(name), "params", ()) for option in one.opts}
        what = [words for words in what if {*words.split()} & known]
    return f"give {alternatives(what)}" if what else "give fewer files or smaller ones"


def _ended(code: int) -> int:
    how = "terminated" if code == process_setup.TERMINATED else "interrupted"
    with process_setup.last_line():
        return _fail(f"{how}; everything finished is kept, run the same command to resume", code)


def _refuse_process_group(arguments: Sequence[str]) -> None:
    """Reject commands that every process which `torchrun` started would run again."""
    command = next((word for word in arguments if not word.startswith("-")), "")
    process_setup.print_errors(not process_setup.under_torchrun() or command == "train" or is_main_process())
    if not process_setup.under_torchrun() or command in ("", "train", "models"):
        return
    if command not in MEASURING:
        raise OptionError(f"{command} is for one process, got {os.environ['WORLD_SIZE']}; start it without torchrun")
    if command == "features" or not probe_class(command).by_process_group:
        raise OptionError(
            f"{command} has no product that processes can share, as hessian --scope dataset, density and trace have; "
            "start it without torchrun, with --workers N for N processes"
        )


def _one_line(error: BaseException) -> str:
    text = printable(" ".join(str(error).split()))
    return text if len(text) <= 600 else f"{text[:600]} ..."


def _fail(message: str, code: int) -> int:
    if process_setup.prints_errors():
        print(f"landscape: {message or 'failed'}", file=sys.stderr)
    return code
