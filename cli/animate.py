"""The command `animate`: surface or spectrum of a run over its epochs, or the surfaces of several networks turning."""

from pathlib import Path
from typing import Annotated

import typer

from landscape.cli import command_options, damaged_files
from landscape.options import counted
from landscape.reporting.progress import say

Option = typer.Option
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
    from landscape.options import one_of, require
    from landscape.plots.animation import TURNTABLE
    from landscape.plots.animation import animate as write
    from landscape.plots.selection import Selection
    from landscape.plots.theme import STYLES, Theme

    one_of("style", style, STYLES)
    one_of("columns", str(columns), ("0", "1", "2"))
    require(0 <= rate <= 50, "rate", rate, "above 0 and at most 50, or 0 for the default")
    results = file / RESULTS if file.is_dir() else file
    if file.is_dir() and not results.exists():
        raise FileNotFoundError(
            f"no {RESULTS} in {file}; measure its snapshots first, for example: landscape surface {file}/epoch_*.pt "
            f"--out {results}"
        )
    damaged_files.check_not_damaged(results)
    selection = Selection(tuple(only))
    epochs = write(results, out, figure, selection=selection, theme=Theme(style, columns, title), rate=rate)
    said = f"{counted(len(epochs), 'epoch')}, {epochs[0]:g} to {epochs[-1]:g}"
    say(f"{counted(len(epochs), 'surface')} in one turn" if figure == TURNTABLE else said, quiet=quiet)
    typer.echo(out)
