"""Select the layers that a probe measures: those that discovery finds, or those that `--layers` names."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import cast

import numpy as np
from torch import Tensor, nn

from landscape.data.structure import Forward, Nested, call_model, tensors_in
from landscape.discovery import graph, token_grid
from landscape.discovery.attention import attention_of
from landscape.discovery.discover import discover, layer_at, staged
from landscape.discovery.layer import KINDS, Kind, Layer, Tap
from landscape.discovery.residual_blocks import node_at
from landscape.layers.layer_patterns import STREAM, Pattern, expand, parse
from landscape.options import counted, matching, nearest
from landscape.probe import NotApplicable, Quantity
from landscape.subject import mc_dropout, weights_cache
from landscape.subject.subject import Subject

_log = logging.getLogger(__name__)


def select_layers(
    model: nn.Module, example: Nested, patterns: Sequence[str], forward: Forward = call_model
) -> list[Layer]:
    """The layers that patterns name, which are outputs of modules, in order of execution; without patterns, `discover`.

    A discovered layer is the residual stream after the module that gives it its name: where that is not the module's
    output, a message says so, and the kind `stream` measures the stream.

    Raises:
        OptionError: a pattern is not a regular expression.
        ValueError: a pattern matches no module, or as `stream` no discovered layer; lists near names.
    """
    if not patterns:
        try:
            found = discover(model, example, forward)
        except ValueError as error:
            leaves = [name for name, module in model.named_modules() if name and not any(module.children())]
            if "--layers" not in str(error) or not leaves:
                raise
            shown = ", ".join(leaves[:5]) + (", ..." if len(leaves) > 5 else "")
            raise ValueError(f"{error}; its modules are {shown}") from error
        return of_one_network(found)
    flow = graph.record(model, graph.few(example), forward)
    discovered: dict[str, list[Layer | None]] = {}  # by their names, which calls of one module share
    with suppress(ValueError):
        for layer in discover(model, example, forward):
            discovered.setdefault(layer.name, []).append(layer)
    named = _matching_modules([name for name, _ in model.named_modules() if name], patterns)
    if any(name in discovered for name in named):  # of the modules that a stream's pattern matches, those that it has
        named = {name: pattern for name, pattern in named.items() if pattern.kind != STREAM or name in discovered}
    calls = {call.module: call for call in reversed(flow.calls) if call.module in named and call.writes}
    if not calls:
        raise ValueError("a forward pass calls none of the modules that --layers names; name others")
    found = [
        _named_layer(flow, call, named[name], known)
        for name, call in calls.items()
        for known in (discovered.get(name, [None]) if named[name].kind == STREAM else discovered.get(name, [None])[:1])
    ]
    layers = sorted(found, key=lambda layer: (flow.maker[node_at(flow, layer.tap)], calls[layer.name].stop))
    _note_branches(layers, discovered)
    others = (replace(layer, reduces=token_grid.smaller(layer.grid, before.grid)) for before, layer in pairwise(layers))
    return staged([layers[0], *others])


def of_one_network(layers: list[Layer]) -> list[Layer]:
    """The layers, if they have one depth axis. Raises ValueError: they are those of several networks."""
    first = [layer.name.split(".") for layer in layers if layer.depth == 0.0]
    if len(first) > 1:
        differing = next(i for i, parts in enumerate(zip(*first, strict=False)) if len(set(parts)) > 1)
        member = ".".join(first[0][: differing + 1])
        raise ValueError(
            f"the model holds {len(first)} networks side by side ({member}, ...), whose layers share no depth axis; "
            f"name those of one of them: --layers '^{re.escape(member)}\\..*:{STREAM}'"
        )
    return layers


def _matching_modules(names: Sequence[str], patterns: Sequence[str]) -> dict[str, Pattern]:
    """Module names with the last pattern that matches each."""
    named: dict[str, Pattern] = {}
    for text in expand(patterns):
        pattern = parse(text)
        found = matching("layers", pattern.expression, names)
        if not found:
            hint = f"; kinds are {', '.join((*KINDS, STREAM))}" if ":" in pattern.expression else ""
            raise ValueError(f"--layers {text} matches no module; {nearest(pattern.expression, names, 'module')}{hint}")
        named.update(dict.fromkeys(found, pattern))
    return named


def _named_layer(flow: graph.Flow, call: graph.Call, pattern: Pattern, discovered: Layer | None) -> Layer:
    if pattern.kind == STREAM:
        if discovered is None:
            raise ValueError(
                f"--layers {pattern}: {call.module} names no layer of the residual stream; landscape layers lists them"
            )
        layer = discovered
    else:
        node, tap = call.writes[0], Tap(call.module, "output")
        kind = cast(Kind, pattern.kind or (discovered.kind if discovered else "other"))
        layer = layer_at(flow, node, tap, kind, call.module, linear=token_grid.consumer_is_linear(flow, node))
    declared = any(pattern.grid) and (pattern.grid, pattern.prefix) != (layer.grid, layer.prefix)
    if declared:
        count = pattern.grid[0] * pattern.grid[1] + pattern.prefix
        if len(layer.shape) != 2 or layer.shape[0] != count:
            shape = " x ".join(map(str, layer.shape))
            raise ValueError(f"--layers {pattern} means {count} tokens, but {call.module} returns {shape}")
        layer = replace(layer, layout="tokens", grid=pattern.grid, prefix=pattern.prefix, order=())
    elif pattern.kind == STREAM:
        return layer
    attention = attention_of(flow, range(call.start, call.stop), layer.grid, layer.prefix, followed=not declared)
    return replace(layer, attention=attention)


def _note_branches(layers: Sequence[Layer], discovered: Mapping[str, Sequence[Layer | None]]) -> None:
    """Say which names stand for another tensor than they do without `--layers`."""
    streams = {name: {layer.tap for layer in known if layer} for name, known in discovered.items()}
    branches = [layer.name for layer in layers if layer.tap not in streams.get(layer.name, {layer.tap})]
    if branches:
        _log.warning(
            "note: --layers measures the output of %s itself%s, a branch; without --layers that name stands for the "
            "residual stream after it, which 'REGEX:%s' measures",
            branches[0], f" ({len(branches)} layers)" if len(branches) > 1 else "", STREAM,
        )  # fmt: skip


@weights_cache.once_per_weights
def layers_of(subject: Subject, patterns: tuple[str, ...]) -> list[Layer]:
    """The layers of a subject, found once."""
    subject = mc_dropout.as_is(subject)
    return select_layers(subject.model, subject.example()[0], patterns, subject.forward)


def spatial_layers(subject: Subject, patterns: tuple[str, ...]) -> list[Layer]:
    """The layers that have a map of positions.

    Raises:
        NotApplicable: there is none, and the network is of no images.
        ValueError: there is none, because no grid is known.
    """
    layers = layers_of(subject, patterns)
    spatial = [layer for layer in layers if layer.spatial]
    if not spatial:
        unknown = any(layer.grid_unknown for layer in layers)
        hint = f"; {_unknown_grids(layers)}" if unknown else ""
        error = ValueError if unknown else NotApplicable
        raise error(f"no layer of this model has a map of positions; this probe needs a vision network{hint}")
    return spatial


def require_class_token(layers: Sequence[Layer]) -> None:
    """Reject layers without a class token. Raises ValueError: names the first one."""
    without = [layer.name for layer in layers if layer.layout != "tokens" or not layer.prefix]
    if without:
        raise ValueError(f"--pool cls needs a class token, {without[0]} has none; use --pool mean")


def image_size(inputs: Nested) -> tuple[int, int] | None:
    """Height and width of the first image among a model's inputs, None if there is none; any lone tensor is one."""
    images = (tensor for tensor in tensors_in(inputs) if isinstance(inputs, Tensor) or tensor.dim() >= 4)
    image = next(images, None)
    return None if image is None else (image.shape[-2], image.shape[-1])


def remarks(layers: Sequence[Layer]) -> list[str]:
    """Notes on how the layers were found, for readers of per-layer numbers."""
    notes = []
    if any(layer.branch is not None and not layer.branch.skip for layer in layers):
        notes.append(
            "this network has no residual blocks; its layers are the outputs of its convolutions, linear layers and "
            "poolings; --layers REGEX[:KIND] names others"
        )
    several = [(layer.name, layer.attention.others + 1) for layer in layers if layer.attention is not None]
    several = [(name, calls) for name, calls in several if calls > 1]
    if several:
        notes.append(
            f"{several[0][0]} calls attention {several[0][1]} times ({len(several)} layers), as for heads one after "
            "the other; the maps of the first call are read"
        )
    if any(layer.grid_unknown for layer in layers):
        notes.append(f"{_unknown_grids(layers)}; until then probes of feature maps leave them out")
    return notes


def _unknown_grids(layers: Sequence[Layer]) -> str:
    unknown = [layer for layer in layers if layer.grid_unknown]
    first, count = unknown[0], f" ({len(unknown)} layers)"
    tokens = first.shape[0]
    side = math.isqrt(tokens)
    if len(first.shape) == 2 and side > 1 and (others := tokens - side**2) <= token_grid.PREFIX:
        alike = {layer.name for layer in unknown if layer.shape[0] == tokens}
        names = sorted({re.sub(r"\d+", r"\\d+", re.escape(name)) for name in alike})
        if any(re.search(f"^({'|'.join(names)})$", layer.name) for layer in layers if layer.name not in alike):
            names = sorted(map(re.escape, alike))
        how = f":{STREAM}:{side}x{side}" + f"+{others}" * (others > 0)
        return (
            f"no grid of this model explains the {tokens} tokens of {first.name}{count}; if they are {others} others, "
            f"then {side} x {side} row by row, say so: {_beside('|'.join(names), how)}"
        )
    shape = " x ".join(map(str, first.shape))
    return f"the image positions of the {shape} numbers of {first.name} are unknown{count}; name others with --layers"


def _beside(names: str, how: str = "") -> str:
    """The options that measure modules beside the discovered layers, or some of these otherwise."""
    return f"--layers '.:{STREAM}' --layers '^({names})${how}'"


def unmeasured(model: nn.Module, example: Nested, layers: Sequence[Layer], forward: Forward = call_model) -> list[str]:
    """Notes on the parts with weights that no layer depends on, unless it is a last one, and how to measure them."""
    flow = graph.record(model, graph.few(example), forward)
    past = reduce(or_, (flow.ancestors[node_at(flow, layer.tap)] for layer in layers))
    weights = {i: operation for i, operation in enumerate(flow.operations) if operation.weight}
    beyond = {i for i, operation in weights.items() if not past >> operation.writes[0] & 1}
    read = reduce(or_, (flow.ancestors[node] for i in beyond for node in weights[i].reads), 0)
    parts: dict[str, int] = {}  # the largest modules that hold only such weights, and how many
    for i in sorted(beyond):
        around = [flow.calls[c] for c in flow.enclosing(weights[i].call)]
        whole = [(c, weights.keys() & set(range(c.start, c.stop))) for c in around if c.module and c.writes]
        whole = [(call, held) for call, held in whole if held <= beyond]
        if whole and (len(whole[-1][1]) > 1 or read >> weights[i].writes[0] & 1):
            parts[whole[-1][0].module] = len(whole[-1][1])
    return [
        f"no layer depends on {name} ({counted(n, 'weight')}); measure it too: {_beside(re.escape(name))}"
        for name, n in parts.items()
    ]


def layer_labels(layers: Sequence[Layer], axis: str) -> dict[str, tuple[Quantity, np.ndarray]]:
    """Labels of every per-layer result: name, kind, stage, depth, reduces."""
    long_names = {"name": "module", "kind": "what the block computes", "stage": "stage", "depth": "normalised depth"}
    labels = {
        name: (Quantity(long_name, dims=(axis,)), np.array([getattr(layer, name) for layer in layers]))
        for name, long_name in long_names.items()
    }
    reduces = np.array([layer.reduces for layer in layers], dtype=np.uint8)
    return {**labels, "reduces": (Quantity("1 where the map gets smaller", dims=(axis,)), reduces)}
