"""The commands `study run|check|show|list|new`, and the shipped study `reproduce` by a command of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from landscape.cli import process_setup, training
from landscape.cli.command_options import RUN, Command, Debug, Quiet, Verbose, own_options
from landscape.cli.loading import load
from landscape.options import OptionError, at_least, counted, did_you_mean, format_duration, invalid, parse_shard
from landscape.reporting.progress import say, text_table

if TYPE_CHECKING:
    from landscape.studies.claims import Claim
    from landscape.studies.conduct import Conducted
    from landscape.studies.steps import Each
    from landscape.studies.study_file import StudyFile

Option = typer.Option
app = typer.Typer(no_args_is_help=True, help="Train, measure and compare several networks, as described in one file.")
File = Annotated[str, typer.Argument(help="file of a study, or the name of a bundled one, see: landscape study list")]
Given = Annotated[list[Path] | None, typer.Argument(help="checkpoints of a study that does not name its own")]
Out = Annotated[
    Path | None, Option(help="folder for checkpoints, results.h5, study.md, figures; default: the file's name")
]
DataRoot = Annotated[Path | None, Option(help="folder that holds cifar-100-python/ and the like")]
Device = Annotated[str, Option(help="auto, cpu, cuda or cuda:1")]
WORKERS, SCHEDULER, SHARD = (RUN[name][0].__metadata__[0] for name in ("workers", "scheduler", "shard"))
SEEDS = r"(?:-s\d+)?$"  # what networks of one name differ in; those without seeds are groups of one
NEW = """# A study: landscape study run FILE. What is done is kept and not repeated.
title = "{title}"
{data}
{networks}
[measure.surface]          # any probe, with its options: landscape PROBE --help-all
samples = 256
resolution = 15
[measure.trace]
samples = 256
[measure.calibration]

[numbers]                  # of every network: headline numbers in brackets, stored quantities after a dot
height = "surface['height at 0.5']"
sharpness = "trace.trace"
accuracy = "calibration['accuracy']"

{pairs}
[[claims]]                 # holds if the value has this sign over seeds
name = "flatter"
statement = "{first} is flatter than {second}"
value = "{value}"
sign = "negative"
"""
LOADED = '# [load]                   # of checkpoints that hold weights only\n# model = "mine.py:model"\n'
PAIR = """[[compare]]                # the first minus the second, paired by seed
networks = ['{}', '{}']
"""
TRAINED = """[train]                    # of every network: options and --set fields of landscape train
model = "resnet_demo"
args = { width = 8 }
optimizer = "sgd"
lr = 0.1
epochs = 10
fraction = 1.0             # of the training images
seeds = 4

[networks.sgd]             # in a table of one network: where it differs
[networks.sam]
sam = 0.05
"""


def shipped() -> dict[str, Path]:
    """The studies that the package holds, by name."""
    import landscape.studies

    return {file.stem: file for file in sorted(Path(landscape.studies.__file__).parent.glob("*.toml"))}


@app.command(cls=Command)
def run(
    file: File,
    checkpoint: Given = None,
    out: Out = None,
    data_root: DataRoot = None,
    device: Device = "auto",
    workers: Annotated[int, WORKERS] = 1,
    scheduler: Annotated[str, SCHEDULER] = "",
    shard: Annotated[str, SHARD] = "",
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Train and measure what is left of a study; write its table, figures and report."""
    study = study_named(file, checkpoint, data_root=data_root)
    folder = out or Path(Path(file).stem)
    number, of = parse_shard("shard", shard)
    results = folder / (f"results-{number}-of-{of}.h5" if of > 1 else "results.h5")
    with workers_of(study, workers, scheduler, shard, device=device) as how:
        found = carry_out(study, folder, **how, results=results, device=device, quiet=quiet)
        if of > 1:
            merge = f"landscape merge {folder}/results-*-of-{of}.h5 --out {folder}/results.h5"
            say(f"shard {shard} is in {results}; after all of them: {merge}, then run without --shard", quiet=quiet)
            return
        typer.echo(found.text, nl=False)
        if results.exists():
            _tables(results)
        illustrate(study, found, results, how["each"], workers, quiet=quiet)
    _refuse(found.wrong)


@app.command(cls=Command)
def check(file: File, checkpoint: Given = None, data_root: DataRoot = None, debug: Debug = False) -> None:
    """Check the whole file of a study, and say what it trains and measures; nothing runs."""
    from landscape.studies.conduct import steps_of

    study = study_named(file, checkpoint, data_root=data_root)
    steps = steps_of(study, study.claims)
    trainings = sum(step.endswith(" training") for step in steps)
    typer.echo(f"{study.title}: {counted(len(study.networks), 'network')}, {counted(trainings, 'training')}, "
               f"{counted(len(steps) - trainings, 'measurement')}, {counted(len(study.claims), 'claim')}")  # fmt: skip


@app.command(cls=Command)
def show(
    file: File, checkpoint: Given = None, out: Out = None, data_root: DataRoot = None, debug: Debug = False
) -> None:
    """Show what a study has done, what is left, and how long that takes."""
    from landscape.studies.conduct import Progress, steps_of

    study = study_named(file, checkpoint, data_root=data_root)
    progress, steps, rows = Progress.of(study, out or Path(Path(file).stem)), steps_of(study, study.claims), list[Any]()
    for step in steps:
        seconds, (network, _, what) = progress.seconds.get(step), step.rpartition(" ")
        took = format_duration(seconds) if seconds else ""
        rows.append({"network": network, "work": what, "": progress.state(step), "took": took})
    typer.echo(f"{text_table(rows)}\n{progress.in_words(steps)}")


@app.command("list", cls=Command)
def list_(debug: Debug = False) -> None:
    """List the bundled studies."""
    from landscape.results.declared_size import toml_of

    for name, file in shipped().items():
        typer.echo(f"{name:{max(map(len, shipped()))}}  {toml_of(file)['title']}")


@app.command(cls=Command)
def new(
    file: Annotated[Path, typer.Argument(help="file to write")],
    compare: Annotated[list[str], Option(help="GROUP=GLOB of trained networks; repeatable")] = [],  # noqa: B006
    data: Annotated[str, Option(help="NAME, FOLDER or file.py:callable")] = "",
    debug: Debug = False,
) -> None:
    """Write a commented file that compares groups of checkpoints, or SGD with SAM, to be changed by hand."""
    from landscape.results.replacing import write_text
    from landscape.studies.network_tables import NAME

    if file.exists():
        raise OptionError(f"{file} exists; give another name")
    pairs = [one.partition("=")[::2] for one in compare]
    for one, (name, pattern) in zip(compare, pairs, strict=True):
        if not (name and pattern):
            raise invalid("compare", one, "GROUP=GLOB such as sgd='runs/sgd-*/final.pt'")
        if not re.fullmatch(NAME, name) or [name for name, _ in pairs].count(name) > 1:
            raise invalid("compare", one, "names of groups that differ, of letters, digits, spaces and . + - _")
    names = [name for name, _ in pairs] or ["sam", "sgd"]
    word = {name: name if name.isidentifier() and name.isascii() else repr(name) for name in names}
    given = [f"[networks.{word[name]}]\nfiles = {_text(Path(of).absolute())}\n" for name, of in pairs]
    tables = [*given, LOADED] if pairs else [TRAINED]
    if len(pairs) == 1:
        raise invalid("compare", compare[0], "given twice or more: two groups are compared")
    text = NEW.format(
        title=" against ".join(names), networks="\n".join(tables), first=names[0], second=names[1],
        value=" - ".join(f"{word[name]}.height" for name in names[:2]),
        data=f"data = {_text(data or 'digits')}\n" if data or not pairs else "",
        pairs="\n".join(PAIR.format(names[0], other) for other in names[1:]),
    )  # fmt: skip
    typer.echo(write_text(file, text))
    try:
        study_named(str(file))
    except ValueError as error:
        typer.echo(f"note: it needs a change before it runs: {error}", err=True)


def _text(value: object) -> str:
    """A string of TOML, which those of JSON are too."""
    return json.dumps(str(value), ensure_ascii=False)


def reproduce(
    data: Annotated[str, Option(help="NAME, FOLDER or file.py:callable")] = "cifar10",
    data_root: DataRoot = None,
    claim: Annotated[
        list[str],
        Option(help="only this claim, into CLAIMS-NAME.md; repeatable; names: see landscape/studies/reproduce.toml"),
    ] = [],  # noqa: B006
    seeds: Annotated[int, Option(help="networks of each kind, with seeds 0, 1, ...; fewer than 3 decide nothing")] = 3,
    fraction: Annotated[float, Option(help="class-balanced share of the training split")] = 0.2,
    epochs: Annotated[int, Option(help="epochs of the main networks; the others train for fewer or more")] = 8,
    measure: Annotated[bool, Option(help="measure the networks, or only train them")] = True,
    device: Device = "auto",
    out: Annotated[Path, Option(help="folder for checkpoints, results.h5 and CLAIMS.md")] = Path("reproduction"),
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Train small networks of each family and test the papers' claims on them: holds, fails, or cannot tell.

    Takes more than two hours on a CPU with three seeds. Finished steps are kept and not repeated.
    """
    from landscape.studies.network_tables import options_instead

    at_least("seeds", seeds, 1)
    at_least("epochs", epochs, 1)
    train = {"seeds": seeds, "fraction": fraction, "epochs": epochs}
    with options_instead(own := own_options(reproduce)):
        study = study_named("reproduce", data_root=data_root, data=data, train=train)
        claims = _claims_named(claim, study.claims)  # a selection has a table of its own, which does not replace all
        part = f"-{'+'.join(one.name for one in claims)}" if len(claims) < len(study.claims) else ""
        how: dict[str, Any] = {"claims": claims, "measured": measure, "table": out / f"CLAIMS{part}.md"}
        found = carry_out(study, out, device=device, quiet=quiet, options=own, **how)
    typer.echo(found.text, nl=False)
    _refuse(found.wrong)


def of_checkpoints(
    name: str, given: Sequence[Path | None], loading: Mapping[str, Any], changes: Mapping[str, Any],
    options: Mapping[str, str], out: Path, figures: Path, *, quiet: bool,
) -> tuple[list[Any], list[Path]]:  # fmt: skip
    """Carry out a shipped study of checkpoints into a results file, and print its table and figures; what was found."""
    from landscape.plots import drawing
    from landscape.studies.network_tables import options_instead

    for path in given or [None]:
        load(path, dict(loading), quiet=quiet)
    with TemporaryDirectory() as folder, options_instead(options):  # what the results file holds is not measured again
        study = study_named(name, given, load=loading, **changes)
        carry_out(study, Path(folder), results=out, quiet=quiet, options=options)
    found, drawn = _tables(out, name), drawing.draw_studies(out, figures, names=(name,))
    for path in drawn:
        typer.echo(path)
    return found, drawn


@contextmanager
def workers_of(
    study: StudyFile, workers: int, scheduler: str = "", shard: str = "", *, device: str
) -> Iterator[dict[str, Any]]:
    """Options of `conduct` for workers that take a step each, or units of one step where steps are few or on GPUs."""
    from landscape import api
    from landscape.studies.conduct import steps_of
    from landscape.studies.steps import pool
    from landscape.subject.device import device_count

    at_least("workers", workers, 1)
    steps = 0 if scheduler or (device != "cpu" and device_count()) else len(steps_of(study, study.claims))
    of_units, of_steps = (1, workers) if steps >= workers else (workers, 1)
    with process_setup.executor_of(of_units, scheduler) as executor, pool(of_steps) as each:
        yield {"measure": partial(api.measure, executor=executor, shard=shard, quiet=True), "each": each}


def illustrate(study: StudyFile, found: Conducted, results: Path, each: Each, workers: int, *, quiet: bool) -> None:
    """Draw the figures of a study beside its results, and write its report, unless nothing was measured by a probe."""
    from landscape.doctor.rules import examine
    from landscape.plots import FIGURES, drawing, report

    folder, names = results.parent / "figures", study.figures or drawing.NAMES
    group = [SEEDS] if any(len(one.seeds) > 1 for one in study.networks.values() if one.measured) else []
    shares = [study.figures] if each is map else [names[k::workers] for k in range(workers)]  # each reads results once
    drawn = each(partial(_drawn, results, folder, group), shares) if results.exists() else ()
    figures = [path for paths in drawn for path in paths]
    for name in ("correlations", "diagrams"):
        figures += drawing.draw_page(name, getattr(found, name), folder)
    written = [f"{counted(len(figures), 'figure')} in {folder}"] if figures else []
    if results.exists():
        live = {name for name, figure in FIGURES.items() if figure.live}  # which the page draws by itself
        others = [path for path in figures if path.stem not in live]
        page = report.report(results, results.with_name("report.html"), others, examine([results]), group)
        written = [str(results), *written, str(page)]
    say(", ".join(written), quiet=quiet or not written)


def _drawn(results: Path, folder: Path, group: Sequence[str], names: Sequence[str]) -> list[Path]:
    from landscape.plots import drawing

    return drawing.draw(results, folder, figures=names, group=group)


def _tables(results: Path, *names: str) -> list[Any]:
    """Print the tables of studies of a kind that a results file holds; the studies."""
    from landscape.results import reader
    from landscape.studies.kinds import KINDS

    stored = reader.groups(results)
    found = [(study, KINDS[name][1]) for name in names or KINDS for study in KINDS[name][0](stored)]
    for study, rows in found:
        typer.echo(text_table(rows(study))) if rows else None
    return [study for study, _ in found]


def _refuse(wrong: Sequence[str]) -> None:
    """Raise an error about expressions without a value, after everything is written."""
    if wrong:
        raise ValueError("; ".join(wrong))


def study_named(
    file: str, given: Sequence[Path | None] | None = None, data_root: Path | None = None, **changes: Any
) -> StudyFile:
    """A study, with checkpoints for its networks and changes of the file."""
    from landscape.api import names_of_results
    from landscape.plots import FIGURES, STUDIES
    from landscape.studies.network_tables import known_names
    from landscape.studies.study_file import study_of

    known = shipped()
    if file not in known and not Path(file).is_file():
        raise FileNotFoundError(f"there is no study {file}; expected a file, or one of {', '.join(known)}"
                                f"{did_you_mean(file, known)}")  # fmt: skip
    changes |= {"data_root": str(data_root)} if data_root else {}
    path = Path(file) if Path(file).is_file() else known[file]
    made = study_of(path, names_of_results, changes=changes, given=given or ())
    known_names(made.figures, (*FIGURES, *STUDIES), f"{file}: figures")
    return made


def carry_out(study: StudyFile, out: Path, **how: Any) -> Conducted:
    """Train and measure what is left of a study and write its table, as `conduct` does."""
    from landscape import api
    from landscape.studies.conduct import conduct

    return conduct(study, out, **{"train": training.run_training, "measure": partial(api.measure, quiet=True), **how})


def _claims_named(names: Sequence[str], claims: Sequence[Claim]) -> list[Claim]:
    known = {one.name: one for one in claims}
    for name in names:
        if name not in known:
            raise invalid("claim", f"{name}{did_you_mean(name, known)}", f"one of {', '.join(known)}")
    return [one for name, one in known.items() if not names or name in names]
