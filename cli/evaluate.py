"""The command `evaluate`: loss, accuracy and calibration of checkpoints."""

from __future__ import annotations

import json as encoding
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from landscape.cli.chosen_checkpoints import chosen_checkpoints
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
from landscape.cli.loading import load, several_checkpoints

if TYPE_CHECKING:
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
