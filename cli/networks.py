"""The commands `evaluate` and `layers`: how well a network predicts, and the layers that probes measure in it."""

from __future__ import annotations

import json as encoding
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from landscape.cli.command_options import (
    DATA,
    OUTPUT,
    RUN,
    loading_options,
    loading_values,
    option,
    reading_values,
    with_options,
)
from landscape.cli.loading import CHECKPOINT, chosen_checkpoints, load, several_checkpoints
from landscape.options import first_line
from landscape.reporting.progress import text_table

if TYPE_CHECKING:
    from torch import Tensor, nn

    from landscape.subject.subject import Subject


def evaluate(checkpoint: list[Path] | None, passes: int, json: bool, quiet: bool, **options: Any) -> None:
    """Print loss, accuracy, top-5 and calibration error, or a language model's perplexity, with standard errors.

    With --json one line per checkpoint.
    """
    values = loading_values(options)
    chosen = chosen_checkpoints("evaluate", "each", checkpoint or [None], {}, reading_values(values), (), quiet=quiet)
    for path, label in zip(chosen.paths, chosen.labels, strict=True):
        _print_metrics(load(path, values, label=label, quiet=quiet), passes, json=json)


def _print_metrics(subject: Subject, passes: int, *, json: bool) -> None:
    from landscape.predictions.evaluation import metrics_of
    from landscape.subject.loading.identity import protocol

    found = metrics_of(subject, passes=passes)
    if json:
        typer.echo(encoding.dumps({"label": subject.label, **found}))
        return
    averaged = f", probabilities of {passes} passes averaged" if passes > 1 else ""
    typer.echo(f"{subject.label}, {protocol(subject)}{averaged}")
    for name, value in found.items():
        if name != "samples" and not name.endswith("_se"):
            error = found[f"{name}_se"]
            typer.echo(f"{name:10} {value:.4f}{f' +- {error:.4f}' if math.isfinite(error) else ''}")
    if "accuracy" not in found:
        typer.echo(f"accuracy   {subject.meaning.accuracy or 'none: the targets are not one class per sample'}")


with_options(
    evaluate,
    {
        "checkpoint": several_checkpoints(),
        **loading_options({"split": "test", "samples": "all", "batch_size": 128}, without=("weight_decay",)),
        "passes": option(int, "forward passes whose probabilities are averaged, for MC dropout", 1, DATA),
        "json": option(bool, "print JSON", False, OUTPUT, "--json"),
        "quiet": RUN["quiet"],
        "verbose": RUN["verbose"],
        "debug": RUN["debug"],
    },
)


FEW = 2  # inputs that pass through the network


def layers(checkpoint: Path | None, layers: list[str], json: bool, **options: Any) -> None:
    """List the layers that probes measure: name, kind, stage, depth, shape, grid.

    Needs no data: without --data, images of the size that the checkpoint or the model names pass through the network.
    """
    from landscape.layers.selection import remarks, select_layers, unmeasured

    model, example = _model_and_example(checkpoint, loading_values(options))
    found = select_layers(model, example, tuple(layers))
    rows = [
        {
            "layer": i,
            "name": layer.name,
            "kind": layer.kind,
            "reduces": "subsample" if layer.reduces else "",
            "stage": layer.stage,
            "depth": f"{layer.depth:.3f}",
            "shape": " x ".join(map(str, layer.shape)),
            "grid": " x ".join(map(str, layer.grid)) if layer.spatial else "?" if layer.grid_unknown else "",
        }
        for i, layer in enumerate(found)
    ]
    typer.echo(encoding.dumps(rows) if json else text_table(rows))
    for remark in [*remarks(found), *([] if layers else unmeasured(model, example, found))]:
        typer.echo(f"note: {remark}", err=True)


def _model_and_example(checkpoint: Path | None, values: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    """The model, and a few inputs that it accepts: the first of the data if they are named."""
    import torch

    from landscape.subject.loading import load as loading
    from landscape.subject.spec import Spec

    if values.get("data"):
        few = values.get("batch_size", FEW)  # a program may accept one size only
        subject = loading.load(checkpoint, **{**values, "samples": few, "batch_size": few, "logits": False})
        return subject.model, subject.batch(0)[0]
    model, size = loading.model_without_data(Spec(checkpoint=checkpoint, **values))
    example = loading.example(model, size)
    try:
        with torch.inference_mode():
            model(example)
    except Exception as error:  # whatever a foreign model raises
        raise ValueError(
            f"the model does not accept inputs of shape {tuple(example.shape[1:])} ({first_line(error)}); give --data, "
            "whose first inputs are then used, or check --image-size and --model-arg"
        ) from error
    return model, example


with_options(
    layers,
    {
        "checkpoint": CHECKPOINT,
        **loading_options({}, without=("weight_decay", "mc_dropout")),
        "layers": option(
            list[str], "REGEX[:KIND[:ROWSxCOLUMNS[+PREFIX]]] or file.toml: modules to take as layers", [], DATA
        ),
        "json": option(bool, "print JSON", False, OUTPUT, "--json"),
        "debug": RUN["debug"],
    },
)
