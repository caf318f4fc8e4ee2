"""The layers that a probe listens to: those found, or those that are named, as every layer probe takes them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from torch import Tensor, nn

from landscape.layers.discovery import Layer, attention_of, discover, staged
from landscape.layers.graph import Flow, record
from landscape.layers.patterns import KINDS, Pattern, expanded, parsed
from landscape.layers.residual_blocks import Kind, Layout, Tap, consumer_is_linear, layout_of, smaller
from landscape.probe import Quantity
from landscape.subject.derived import once_per_weights
from landscape.subject.subject import Subject

__all__ = ["Layer", "chosen", "discover", "labels", "layers_of", "remarks", "spatial_layers"]


def chosen(model: nn.Module, example: Tensor, patterns: Sequence[str]) -> list[Layer]:
    """The layers that patterns name: outputs of modules, in order of execution; those found without a pattern.

    Raises:
        OptionError: a pattern is no regular expression.
        ValueError: a pattern matches no module; lists near names.
    """
    if not patterns:
        return discover(model, example)
    flow = record(model, example[:2])
    try:
        known = {layer.name: layer for layer in discover(model, example)}
    except ValueError:
        known = {}
    names = [name for name, _ in model.named_modules() if name]
    asked: dict[str, Pattern] = {}
    for text in expanded(patterns):
        pattern = parsed(text)
        matching = [name for name in names if re.search(pattern.expression, name)]
        if not matching:
            near = difflib.get_close_matches(pattern.expression, names, 3, 0.3) or names[:3]
            hint = f"; kinds are {', '.join(KINDS)}" if ":" in pattern.expression else ""
            raise ValueError(f"--layers {text} matches no module; near names are {', '.join(near)}{hint}")
        asked.update(dict.fromkeys(matching, pattern))
    layers = []
    for call in flow.calls:
        if call.module in asked and call.number == 0 and call.writes:
            pattern, own = asked[call.module], known.get(call.module)
            shape = flow.shapes[call.writes[0]][1:]
            layout, grid, prefix = layout_of(flow, call.writes[0], consumer_is_linear(flow, call.writes[0]))
            if any(pattern.grid):
                layout, grid, prefix = _said(call.module, shape, pattern)
            kind = cast(Kind, pattern.kind or (own.kind if own else "other"))
            tap = Tap(call.module, "output")
            attention = attention_of(flow, range(call.start, call.stop), grid, prefix)
            layers.append(
                Layer(call.module, kind, 0, 0.0, False, tap, shape, layout, grid, prefix, attention=attention)
            )
    if not layers:
        raise ValueError("the modules that --layers names are not called in a forward pass; choose others")
    layers.sort(key=lambda layer: _finish(flow, layer.name))
    grids = [layer.grid for layer in layers]
    return staged(
        [
            replace(layer, reduces=smaller(layer.grid, before))
            for before, layer in zip([grids[0], *grids], layers, strict=False)
        ]
    )


def layers_of(subject: Subject, patterns: Sequence[str] = ()) -> list[Layer]:
    """The layers of a subject, found once."""
    return _layers_of(subject, tuple(patterns))


@once_per_weights
def _layers_of(subject: Subject, patterns: tuple[str, ...]) -> list[Layer]:
    return chosen(subject.model, subject.batch(0)[0], patterns)


def spatial_layers(subject: Subject, patterns: Sequence[str] = ()) -> list[Layer]:
    """Those of them that have a map of positions.

    Raises:
        ValueError: there is none.
    """
    layers = layers_of(subject, patterns)
    found = [layer for layer in layers if layer.spatial]
    if not found:
        hint = next((f"; {_unexplained(layers)}" for layer in layers if layer.unexplained), "")
        raise ValueError(f"no layer of this model has a map of positions; this probe needs a vision network{hint}")
    return found


def remarks(layers: Sequence[Layer]) -> list[str]:
    """What a reader of per-layer numbers has to know of how the layers were found."""
    said = []
    if any(layer.branch is not None and not layer.branch.skip for layer in layers):
        said.append(
            "this network has no residual blocks; its layers are what its convolutions, linear layers and poolings "
            "give, --layers REGEX[:KIND] names others"
        )
    if any(layer.unexplained for layer in layers):
        said.append(f"{_unexplained(layers)}; until then probes of maps leave them out")
    return said


def _unexplained(layers: Sequence[Layer]) -> str:
    unknown = [layer for layer in layers if layer.unexplained]
    first, more = unknown[0], f" ({len(unknown)} layers)"
    if len(first.shape) == 2:
        return (
            f"no grid of this model explains the {first.shape[0]} tokens of {first.name}{more}; "
            "say it, for example --layers 'REGEX:msa:14x14+1' for 14 x 14 tokens behind one other"
        )
    shape = " x ".join(map(str, first.shape))
    return f"where the {shape} numbers of {first.name} lie in the image cannot be told{more}; name others with --layers"


def labels(layers: Sequence[Layer], axis: str) -> dict[str, tuple[Quantity, np.ndarray]]:
    """What every per-layer result says of its layers: name, kind, stage, depth, reduces."""
    dims = (axis,)
    return {
        "name": (Quantity("module", dims=dims), np.array([layer.name for layer in layers])),
        "kind": (Quantity("what the block computes", dims=dims), np.array([layer.kind for layer in layers])),
        "stage": (Quantity("stage", dims=dims), np.array([layer.stage for layer in layers])),
        "depth": (Quantity("normalised depth", dims=dims), np.array([layer.depth for layer in layers])),
        "reduces": (
            Quantity("1 where the map gets smaller", dims=dims),
            np.array([layer.reduces for layer in layers], dtype=np.uint8),
        ),
    }


def _said(name: str, shape: tuple[int, ...], pattern: Pattern) -> tuple[Layout, tuple[int, int], int]:
    """Layout, grid and prefix as a pattern says, if the tensor has so many tokens.

    Raises:
        ValueError: it has not.
    """
    count = pattern.grid[0] * pattern.grid[1] + pattern.prefix
    if len(shape) != 2 or shape[0] != count:
        raise ValueError(f"--layers {pattern} speaks of {count} tokens, {name} returns {' x '.join(map(str, shape))}")
    return "tokens", pattern.grid, pattern.prefix


def _finish(flow: Flow, module: str) -> int:
    return next((call.stop for call in flow.calls if call.module == module), 0)
