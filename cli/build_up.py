"""The command `build-up`: accuracy of an AlterNet by its number of self-attentions (Park & Kim 2022, Fig. 12)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from landscape.cli.command_options import Debug, Quiet
from landscape.cli.training import run_training
from landscape.options import OptionError, at_least, parse_arguments

Option = typer.Option
COLUMNS = ("model", "data", "msa", "seed", "accuracy", "loss", "checkpoint")


def build_up(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="trained AlterNets, files or run folders; default: train them")
    ] = None,
    model: Annotated[str, Option(help="AlterNet that is built up, see: landscape models")] = "alternet_demo",
    data: Annotated[str, Option(help="NAME, FOLDER or file.py:callable to train on")] = "",
    data_root: Annotated[Path | None, Option(help="folder that holds cifar-100-python/ and the like")] = None,
    model_arg: Annotated[list[str], Option(help="KEY=VALUE argument of the model; repeatable")] = [],  # noqa: B006
    recipe: Annotated[str | None, Option(help="recipe of the training, see: landscape train --help")] = None,
    epochs: Annotated[int | None, Option(help="epochs of each network")] = None,
    seeds: Annotated[int, Option(help="networks of each kind, with seeds 0, 1, ...")] = 3,
    fraction: Annotated[float, Option(help="class-balanced share of the training split")] = 1.0,
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:1")] = "auto",
    out: Annotated[Path, Option(help="folder for checkpoints, build_up.csv and the figure")] = Path("build-up"),
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train AlterNets with 0, 1, 2, ... self-attentions, or take trained ones, and draw their accuracy.

    Self-attentions replace convolutions from the end of the last stage backward. Finished networks are kept.
    """
    from landscape import models
    from landscape.plots import drawing
    from landscape.plots.build_up import column
    from landscape.results.rounding import interval
    from landscape.results.seed_groups import mean_interval

    at_least("seeds", seeds, 1)
    if runs and data:
        raise OptionError(f"got {len(runs)} trained networks and --data {data}; give the networks, or --data to train")
    if not runs and not data:
        raise OptionError("give trained AlterNets, or --data NAME to train them on, for example --data digits")
    arguments = parse_arguments("model_arg", model_arg)
    if "msa" in arguments:
        raise OptionError(f"--model-arg msa={arguments['msa']}: build-up sets the self-attentions itself; drop it")
    trained = list(runs or [])
    for seed in range(seeds if data else 0):
        for count, placement in enumerate(models.build_up(model)):
            final = run_training(
                model, data, {} if epochs is None else {"epochs": epochs}, recipe=recipe,
                out=out / "checkpoints" / f"{model}-msa{count}-s{seed}", data_root=data_root,
                model_args={**arguments, "msa": placement}, fraction=fraction, seed=seed, device=device, quiet=quiet,
            )  # fmt: skip
            trained.append(final)
    rows = list(_rows(trained))
    file = _write(out, rows)
    for count in sorted({row["msa"] for row in rows}):
        accuracies = column(rows, "accuracy", count)
        of = f" over {len(accuracies)} seeds" if len(accuracies) > 1 else ""
        typer.echo(f"{count} MSA  accuracy {interval(*mean_interval(accuracies, 'share'))}{of}")
    typer.echo(file)
    for path in drawing.draw_build_up(rows, out):
        typer.echo(path)


def _rows(checkpoints: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """One row per network, from what its checkpoint says.

    Raises:
        ValueError: one is no AlterNet, was trained on other data than the first, or holds no accuracy.
    """
    from landscape import models
    from landscape.checkpoints import folders
    from landscape.checkpoints.checkpoint import read_checkpoint

    first: tuple[str, str] | None = None
    for given in checkpoints:
        path = folders.checkpoint_of(given)
        stored = read_checkpoint(path)
        if stored.model not in models.NAMES or "msa" not in models.accepts(stored.model):
            raise ValueError(f"{path} is a {stored.model or 'checkpoint of another library'}, expected an AlterNet")
        if "accuracy" not in stored.metrics:
            raise ValueError(f"{path} holds no accuracy on the test split; train it with landscape train")
        about = (stored.model, str(stored.data.get("name", "")))
        first = first or about
        if about != first:
            raise ValueError(
                f"{path} is {about[0]} on {about[1]}, the first network {first[0]} on {first[1]}; give networks of one "
                "kind and of one data set"
            )
        msa = stored.model_args.get("msa", models.MODELS[stored.model].keywords["msa"])
        yield {
            "model": about[0], "data": about[1], "msa": sum(msa), "seed": stored.seed, "checkpoint": str(path),
            **{name: float(stored.metrics[name]) for name in ("accuracy", "loss")},
        }  # fmt: skip


def _write(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Replace `build_up.csv`, atomically."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".build_up.csv.partial"
    temporary.write_text(text.getvalue())
    return temporary.replace(folder / "build_up.csv")
