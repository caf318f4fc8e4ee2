"""The commands `plot`, `report` and `animate`: figures of a results file or a training run."""

import gc
from pathlib import Path
from typing import Annotated

import typer

from landscape.cli import command_options, damaged_files, doctor, process_setup
from landscape.options import counted
from landscape.reporting.progress import say

Option = typer.Option
Group = Annotated[
    list[str],
    Option(
        help="draw means over seeds: rules as in landscape compare --group, or none to draw every network; default: "
        "above 8 networks, those whose labels differ only in a seed at the end (vit-s1, vit-s2) form a group"
    ),
]
Caption = Annotated[
    str,
    Option(
        help="where protocol and notes go: text (below the figure), none, or tex (into NAME.tex beside the figure, a "
        "caption with a label, for LaTeX)"
    ),
]


def plot(
    file: Annotated[Path, typer.Argument(help="results file, or the folder of a training run")] = Path("results.h5"),
    out: Annotated[Path, Option(help="folder for the figures")] = Path("figures"),
    format: Annotated[str, Option(help="any of png, pdf, svg, separated by commas")] = "png",
    layout: Annotated[
        str, Option(help="park2022: several networks in the multi-panel figures of that paper, instead of all figures")
    ] = "",
    figure: Annotated[str, Option(help="only these figures, separated by commas; default: all", metavar="NAME")] = "",
    only: Annotated[
        list[str], Option(help="only the checkpoint of this label (* stands for anything); repeatable, in this order")
    ] = [],  # noqa: B006
    group: Group = [],  # noqa: B006
    label: Annotated[list[str], Option(help="write NEW instead of a stored label; repeatable", metavar="OLD=NEW")] = [],  # noqa: B006
    color: Annotated[
        list[str], Option(help="colour of a checkpoint, a name or #RRGGBB; repeatable", metavar="LABEL=COLOR")
    ] = [],  # noqa: B006
    title: Annotated[str, Option(help="title above every figure")] = "",
    style: Annotated[str, Option(help="screen, paper (300 dots per inch) or dark")] = "screen",
    columns: Annotated[
        int, Option(help="width: 1 or 2 columns of a paper (3.25 or 6.75 in; above 7 in high, in parts); 0: as needed")
    ] = 0,
    caption: Caption = "text",
    eigenvalues: Annotated[
        str, Option(help="axis range of the Hessian spectra; default: from the data", metavar="LOW:HIGH")
    ] = "",
    quiet: command_options.Quiet = False,
    debug: command_options.Debug = False,
) -> None:
    """Draw every figure that the results allow; for the folder of a training run, its loss and accuracy."""
    from landscape.options import one_of, parse_choices
    from landscape.plots import drawing
    from landscape.plots.selection import Selection, colours, pairs
    from landscape.plots.theme import Theme

    formats = parse_choices("format", format, drawing.FORMATS)
    one_of("layout", layout or "park2022", ("park2022",))
    theme = Theme(style, columns, title, caption)
    if file.is_dir():
        paths = drawing.draw_run(file, out, formats, theme=theme)
    else:
        damaged_files.check_not_damaged(file)
        chosen = Selection(tuple(only), pairs("label", label), colours(color))
        paths = drawing.draw_layout(file, out, formats, selection=chosen, theme=theme) if layout else drawing.draw(
            file, out, formats, eigenvalues=parse_eigenvalues(eigenvalues), theme=theme,
            figures=tuple(name.strip() for name in figure.split(",") if name.strip()),
            selection=chosen, group=group,
        )  # fmt: skip
        _say(file, out, paths, quiet=quiet)
    for path in paths:
        typer.echo(path)
    if not file.is_dir() and (line := doctor.suggestion(file)):
        say(line, quiet=quiet)


def report(
    file: Annotated[Path, typer.Argument(help="results file")] = Path("results.h5"),
    out: Annotated[Path, Option(help="page to write")] = Path("report.html"),
    group: Group = [],  # noqa: B006
    pictures: Annotated[
        bool,
        Option(
            "--pictures",
            help="include a picture of every figure, for readers without scripts; default: with at most 8 networks, of "
            "the figures that the page does not draw itself",
        ),
    ] = False,
    quiet: command_options.Quiet = False,
    debug: command_options.Debug = False,
) -> None:
    """Write one HTML page with every figure, its protocol, and a table of all checkpoints."""
    from tempfile import TemporaryDirectory

    with process_setup.importing():
        from landscape.doctor.rules import examine
        from landscape.plots import drawing
        from landscape.plots.report import PLACE
        from landscape.plots.report import report as write_report
        from landscape.results import reader
        from landscape.results.replacing import check_place

    def written() -> Path:
        with reader.streaming(file, on_demand=True):  # once, for all that follows
            if drawn := pictures or not drawing.has_many(file, group):
                gc.enable()  # in the child too: a figure and its axes hold each other
            figures = drawing.draw(file, folder, group=group, live=pictures) if drawn else []
            if not figures and not drawing.is_drawable(file):
                _say(file, out, [], quiet=True)
            return write_report(file, out, figures, examine([file]), group)

    check_place(out, *PLACE)
    with TemporaryDirectory() as folder:
        typer.echo(damaged_files.in_child(written, [file]))


def parse_eigenvalues(text: str) -> tuple[float, float] | None:
    """Parse `LOW:HIGH` with zero in between; None if empty. Raises OptionError: it is something else."""
    from landscape.options import parse_range, require

    if not text:
        return None
    expected = "LOW:HIGH around zero, for example -120:900"
    low, high = parse_range("eigenvalues", text, expected)
    require(":" in text and low < 0 < high, "eigenvalues", text, expected)
    return low, high


def _say(file: Path, out: Path, paths: list[Path], *, quiet: bool) -> None:
    if not paths:
        raise ValueError(
            f"{file} holds nothing finished to draw, nothing finite, or nothing that an installed figure shows; "
            "run a probe first: landscape surface"
        )
    say(f"{counted(len(paths), 'figure')} in {out}", quiet=quiet)


RESULTS = "results.h5"


def animate(
    file: Annotated[
        Path, typer.Argument(help="results of several snapshots of a run, or a run folder with its results.h5")
    ] = Path(RESULTS),
    out: Annotated[Path, Option(help="animation to write, .gif, or .mp4 where ffmpeg is installed")] = Path(
        "animation.gif"
    ),
    figure: Annotated[str, Option(help="surface, surface_3d, hessian, or turntable: reliefs turning")] = "surface",
    only: Annotated[
        list[str], Option(help="only the checkpoint of this label (* stands for anything); repeatable")
    ] = [],  # noqa: B006
    rate: Annotated[float, Option(help="epochs, or pictures of a turn, per second; default: 2, or 12")] = 0.0,
    style: Annotated[str, Option(help="screen, paper or dark")] = "screen",
    columns: Annotated[int, Option(help="width: 1 or 2 columns of a paper (3.25 or 6.75 in); 0: 4.5 in")] = 0,
    title: Annotated[str, Option(help="title above the figure")] = "",
    quiet: command_options.Quiet = False,
    debug: command_options.Debug = False,
) -> None:
    """Animate surface or spectrum of one run over its epochs, or turn the surfaces of several networks together.

    All pictures have common axes and colours. A turntable shows loss on a logarithmic scale, cut so that the bowl of
    every network is visible, with the path of training where the plane holds it.
    """
    from landscape.options import require
    from landscape.plots.animation import TURNTABLE
    from landscape.plots.animation import animate as write
    from landscape.plots.selection import Selection
    from landscape.plots.theme import Theme

    theme = Theme(style, columns, title)
    require(0 <= rate <= 50, "rate", rate, "above 0 and at most 50, or 0 for the default")
    results = file / RESULTS if file.is_dir() else file
    if file.is_dir() and not results.exists():
        raise FileNotFoundError(
            f"no {RESULTS} in {file}; measure its snapshots first, for example: landscape surface {file}/epoch_*.pt "
            f"--out {results}"
        )
    damaged_files.check_not_damaged(results)
    epochs = write(results, out, figure, selection=Selection(tuple(only)), theme=theme, rate=rate)
    said = f"{counted(len(epochs), 'epoch')}, {epochs[0]:g} to {epochs[-1]:g}"
    say(f"{counted(len(epochs), 'surface')} in one turn" if figure == TURNTABLE else said, quiet=quiet)
    typer.echo(out)
