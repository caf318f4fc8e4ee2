"""Commands that look at a network: its layers, and how well it classifies."""

from __future__ import annotations

import json as encoding
from pathlib import Path
from typing import Annotated, Any

import typer

from landscape.cli.files import table
from landscape.cli.probing import (
    DATA,
    LOADING,
    OPTIONS,
    OUTPUT,
    file_of,
    introduce,
    option,
    with_options,
)
from landscape.options import parse_arguments, parse_numbers

CHECKPOINT = (
    Annotated[Path | None, typer.Argument(help="checkpoint, or run folder; default: the newest under ./checkpoints")],
    None,
)
JSON = option(bool, "Print JSON.", False, OUTPUT, "--json")


def _layers(checkpoint: Path | None, layers: list[str], json: bool, **options: Any) -> None:
    """List the layers that probes listen to: name, kind, stage, depth, shape, grid. Needs no data."""
    from landscape.layers.selection import remarks, select_layers
    from landscape.subject import loading
    from landscape.subject.spec import Spec

    spec = Spec(
        checkpoint=file_of(checkpoint),
        model=options["model"] or "",
        model_arg=parse_arguments("model_arg", options["model_arg"]),
        image_size=options["image_size"],
        weights=options["weights"] or "raw",
        trust_pickle=options["trust_pickle"],
        allow_missing=options["allow_missing"],
        seed=options["seed"],
    )
    net, size = loading.bare(spec)
    example = loading.example(net, size)
    try:
        found = select_layers(net, example, tuple(layers))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"the model refuses inputs of shape {tuple(example.shape[1:])} ({reason}); "
            "check --image-size and --model-arg"
        ) from error
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
    typer.echo(encoding.dumps(rows) if json else table(rows))
    for remark in remarks(found):
        typer.echo(f"note: {remark}", err=True)


def _evaluate(checkpoint: Path | None, passes: int, json: bool, **options: Any) -> None:
    """Loss, accuracy, top-5 and calibration error, of a language model the perplexity, each with its error."""
    from landscape.subject import loading
    from landscape.subject.evaluation import metrics_of
    from landscape.subject.identity import protocol

    given = {key: options[key] for key in (*LOADING, "data_root") if options.get(key) is not None}
    given |= {key: parse_numbers(key, given[key]) for key in ("mean", "std") if key in given}
    given |= {"model_arg": parse_arguments("model_arg", options["model_arg"])}
    given |= {name: options[name] for name in ("trust_pickle", "allow_missing")}
    loaded = loading.load(file_of(checkpoint), device=options["device"], seed=options["seed"], **given)
    introduce(loaded, quiet=options["quiet"])
    found = metrics_of(loaded, passes=passes)
    if json:
        typer.echo(encoding.dumps(found))
        return
    averaged = f", probabilities of {passes} passes averaged" if passes > 1 else ""
    typer.echo(f"{loaded.label}, {protocol(loaded)}{averaged}")
    for name, value in found.items():
        if name != "samples" and not name.endswith("_se"):
            typer.echo(f"{name:10} {value:.4f} +- {found[f'{name}_se']:.4f}")
    if "accuracy" not in found:
        typer.echo(f"accuracy   {loaded.meaning.accuracy or 'none: the targets are no classes'}")


def _command(function: Any, own: dict[str, tuple[Any, Any]], shared: tuple[str, ...]) -> Any:
    """A command with options of its own and those of every probe, which are defined in one place."""
    named = with_options(function, {"checkpoint": CHECKPOINT, **{name: OPTIONS[name] for name in shared}, **own})
    named.__name__ = function.__name__.lstrip("_")
    return named


layers = _command(
    _layers,
    {
        "image_size": option(int | None, "Side of the example image.", None, DATA),
        "layers": option(
            list[str],
            "REGEX[:KIND[:ROWSxCOLUMNS[+PREFIX]]] or file.toml: modules instead of the layers found.",
            [],
            DATA,
        ),
        "json": JSON,
    },
    ("model", "model_arg", "weights", "allow_missing", "trust_pickle", "seed", "debug"),
)
evaluate = _command(
    _evaluate,
    {
        "samples": option(str | None, "A number, a share such as 10%, or all. Default all.", None, DATA),
        "passes": option(int, "Passes whose probabilities are averaged: for MC dropout.", 1, DATA),
        "json": JSON,
    },
    (
        *("data", "data_root", "split", "batch_size", "augment", "loss", "image_size", "block_size"),
        *("mean", "std", "interpolation", "crop"),
        *("model", "model_arg", "weights", "allow_missing", "trust_pickle", "device", "seed", "quiet", "debug"),
    ),
)
