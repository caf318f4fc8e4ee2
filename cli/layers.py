"""The command `layers`: the layers that probes measure in a network."""

from __future__ import annotations

import json as encoding
from pathlib import Path
from typing import Any

import typer

from landscape.cli.command_options import DATA, OUTPUT, RUN, loading_options, loading_values, option, with_options
from landscape.cli.loading import CHECKPOINT
from landscape.cli.text_table import text_table


def layers(checkpoint: Path | None, layers: list[str], json: bool, **options: Any) -> None:
    """List the layers that probes measure: name, kind, stage, depth, shape, grid. Needs no data."""
    from landscape.layers.selection import remarks, select_layers
    from landscape.subject import loading
    from landscape.subject.spec import Spec

    model, size = loading.model_without_data(Spec(checkpoint=checkpoint, **loading_values(options)))
    example = loading.example(model, size)
    try:
        found = select_layers(model, example, tuple(layers))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"the model does not accept inputs of shape {tuple(example.shape[1:])} ({reason}); "
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
    typer.echo(encoding.dumps(rows) if json else text_table(rows))
    for remark in remarks(found):
        typer.echo(f"note: {remark}", err=True)


_OF_DATA = (
    *("data", "data_root", "split", "samples", "batch_size", "augment", "weight_decay", "loss"),
    *("mean", "std", "interpolation", "crop", "block_size", "device"),
)
with_options(
    layers,
    {
        "checkpoint": CHECKPOINT,
        **loading_options({}, without=_OF_DATA),
        "layers": option(
            list[str], "REGEX[:KIND[:ROWSxCOLUMNS[+PREFIX]]] or file.toml: modules to take as layers", [], DATA
        ),
        "json": option(bool, "print JSON", False, OUTPUT, "--json"),
        "debug": RUN["debug"],
    },
)
