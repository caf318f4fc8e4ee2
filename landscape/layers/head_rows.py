"""Find the rows of query, key and value weights that belong to each attention head, proven by what the heads return."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from landscape.discovery.layer import Layer
from landscape.layers.attention_maps import attention_hooks
from landscape.subject.subject import Subject

Rows = tuple[range, ...]


def rows_of_heads(
    subject: Subject, layers: Sequence[Layer], weights: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, list[Rows]]]:
    """By layer and name of a weight, the rows of every head; `weights`: by layer, names with the axis of the rows.

    A weight belongs to the heads if, with the rows of one head negated, the output of this head changes and that of no
    other head. Layouts that are tried: heads one after the other, in each of up to three parts (query, key, value).
    A layer none of whose weights does so is left out.
    """
    found: dict[str, dict[str, list[Rows]]] = {}
    for layer in layers:
        attention = layer.attention
        if attention is None or attention.outputs is None:
            continue
        intact = _head_outputs(subject, layer)
        for name, axis in weights.get(layer.name, {}).items():
            for rows in _layouts(subject.parameters[name].shape[axis], attention.heads):
                if all(_only(subject, layer, name, axis, rows, head, intact) for head in {0, attention.heads - 1}):
                    found.setdefault(layer.name, {})[name] = rows
                    break
    return found


def _layouts(count: int, heads: int) -> Iterator[list[Rows]]:
    """Rows of every head, in each possible layout of a weight with `count` rows."""
    for parts in (3, 2, 1):  # those of a fused weight first: a head's rows in one part alone would pass too
        if count % (parts * heads) == 0:
            size = count // (parts * heads)
            starts = [[size * (part * heads + head) for part in range(parts)] for head in range(heads)]
            yield [tuple(range(start, start + size) for start in own) for own in starts]


def _only(
    subject: Subject, layer: Layer, name: str, axis: int, rows: Sequence[Rows], head: int, intact: Tensor
) -> bool:
    """Whether the rows of a head change its output, and that of no other head."""
    weight = subject.parameters[name].data
    kept = weight.clone()
    index = torch.cat([torch.arange(r.start, r.stop) for r in rows[head]]).to(weight.device)
    try:
        weight.index_copy_(axis, index, -kept.index_select(axis, index))
        differs = (_head_outputs(subject, layer) != intact).any(dim=-1).any(dim=-1).any(dim=0)  # (head,)
    finally:
        weight.copy_(kept)
    return bool(differs[head]) and int(differs.sum()) == 1


def _head_outputs(subject: Subject, layer: Layer) -> Tensor:
    """What the heads of a layer read from the values, for a few samples, (row, head, query, channel)."""
    assert layer.attention is not None
    kept: list[Tensor] = []
    inputs, targets = subject.example()
    images = len(targets) if isinstance(targets, Tensor) else 1
    with torch.no_grad(), attention_hooks([(layer.attention, None, lambda one: kept.append(one.clone()))], images):
        subject.outputs(inputs)
    return kept[0]
