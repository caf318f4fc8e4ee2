"""Capture the attention maps of a running model: from an explicit softmax, or recomputed from q and k.

The model's own computation is unchanged; maps exist for a few images at a time. The outputs of the heads, which are the
maps times the values, are what the model computes, before they are projected.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from landscape.discovery.graph import ATTENTION, CountedCalls, Key, Patches, Receiver
from landscape.discovery.layer import AttentionCall, Layer, Windows
from landscape.subject.subject import Subject

Rows = tuple[range, ...]


@dataclass(frozen=True)
class AttentionMaps:
    """The maps of one call of an attention function; a row is an image, or one of its consecutive windows."""

    rows: int
    row_size: int  # numbers in the map of one row
    size: int  # numbers in the queries of all rows, or in the maps if only those exist: memory budget of a chunk
    device: torch.device
    chunk: Callable[[slice], Tensor]  # the maps of some rows, (row, head, query, key), adding up to one over the keys


# An attention call, and what takes its maps, and the outputs of its heads (row, head, query, channel).
Take = tuple[AttentionCall, Callable[[AttentionMaps], None] | None, Callable[[Tensor], None] | None]


def over_the_grid(maps: AttentionMaps, patches: Patches) -> AttentionMaps:
    """Maps over the patch around each query, (row, head, query, place in the patch), as maps over all positions.

    Places outside of the grid, which padding adds, are left out, and what remains adds up to one.
    """
    (rows, columns), queries = patches.grid, patches.grid[0] * patches.grid[1]
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))[:, None]  # (query, 1, 2)
    steps = torch.cartesian_prod(*(torch.arange(side) for side in patches.kernel)) * torch.tensor(patches.dilation)
    keys = places + steps - torch.tensor(patches.padding)  # (query, place, 2)
    inside = ((keys >= 0) & (keys < torch.tensor(patches.grid))).all(dim=-1).to(maps.device)
    index = (keys[..., 0] * columns + keys[..., 1]).to(maps.device) * inside

    def chunk(rows: slice) -> Tensor:
        local = maps.chunk(rows) * inside
        whole = local.new_zeros(*local.shape[:-1], queries).scatter_add_(-1, index.expand_as(local), local)
        return whole / whole.sum(dim=-1, keepdim=True)

    return replace(maps, row_size=maps.row_size // inside.shape[1] * queries, chunk=chunk)


def in_windows(tensor: Tensor, windows: Windows, images: int) -> Tensor:
    """Maps of whole images, or outputs of their heads, (row, head, query, any) as (window, head, query, any)."""
    several = tensor.reshape(images, len(windows.order), *tensor.shape[2:])
    if windows.order != tuple(range(len(windows.order))):
        several = several[:, windows.order]
    return several.reshape(images * len(windows.kinds), -1, *tensor.shape[2:])


def maps_in_windows(maps: AttentionMaps, windows: Windows, images: int) -> AttentionMaps:
    """The maps of which a row is a window; chunks are those of whole images."""
    before, after = maps.rows // images, len(windows.kinds)

    def chunk(rows: slice) -> Tensor:
        first, last = rows.start // after, min(rows.stop // after, images)
        return in_windows(maps.chunk(slice(first * before, last * before)), windows, last - first)

    return replace(maps, rows=images * after, row_size=maps.row_size * before // after, chunk=chunk)


def attention_hooks(takes: Iterable[Take], images: int) -> AbstractContextManager[Any]:
    """Hand the maps of attention calls, and the outputs of their heads, to functions while a model runs in this thread.

    Nothing is kept.
    """
    taken: dict[Key, list[Receiver]] = {}
    for attention, take_maps, take_outputs in takes:
        if take_maps is not None and attention.heads:
            taken.setdefault(attention.key, []).append(partial(_give_maps, take_maps, attention, images))
        if take_outputs is not None and attention.outputs is not None:
            taken.setdefault(attention.outputs.key, []).append(partial(_give_outputs, take_outputs, attention, images))
    return CountedCalls(taken) if taken else nullcontext()


def _give_maps(take: Callable[[AttentionMaps], None], attention: AttentionCall, images: int, *call: Any) -> None:
    maps = _maps(attention.key[0], images, *call)
    if attention.patches is not None:
        maps = over_the_grid(maps, attention.patches)
    take(maps if attention.windows is None else maps_in_windows(maps, attention.windows, images))


def _give_outputs(take: Callable[[Tensor], None], attention: AttentionCall, images: int, *call: Any) -> None:
    func, args, kwargs, result = call
    assert attention.outputs is not None
    key, order = attention.outputs.key, attention.outputs.order
    found = _module_outputs(func, args, kwargs) if key[0] == "multi_head_attention_forward" else result
    found = _by_row(found.permute(order) if order else found, images)
    take(found if attention.windows is None else in_windows(found, attention.windows, images))


def _maps(
    name: str, images: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> AttentionMaps:
    if name == "scaled_dot_product_attention":
        given = inspect.signature(maps_from_qk).bind(*args, **kwargs).arguments
        if given["query"].ndim == 3:  # a mask of two axes is shared
            of_heads = [name for name in ("query", "key", "attn_mask") if getattr(given.get(name), "ndim", 0) == 3]
            given |= {name: given[name].reshape(images, -1, *given[name].shape[1:]) for name in of_heads}
        return maps_from_qk(**given)
    if name == "multi_head_attention_forward":
        return _maps_of_module(func, args, kwargs)
    maps = _by_row(result, images)
    if name not in ATTENTION:  # of which some keys were left out
        maps = maps / maps.sum(dim=-1, keepdim=True)
    return AttentionMaps(len(maps), maps[0].numel(), maps.numel(), maps.device, lambda rows: maps[rows])


def _by_row(tensor: Tensor, images: int) -> Tensor:
    """(batch * head, ...) or (..., head, query, any) as (row, head, query, any)."""
    return tensor.reshape(images, -1, *tensor.shape[-2:]) if tensor.ndim == 3 else tensor.flatten(0, -4)


def maps_from_qk(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionMaps:
    """softmax(q k' scale + mask), the maps of `scaled_dot_product_attention`, from its arguments."""
    leading, (queries, width), keys = query.shape[:-3], query.shape[-2:], key.shape[-2]
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    mask = attn_mask
    if is_causal:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.ndim > 3:  # one per image, or one for all
        mask = mask.expand(*leading, *mask.shape[-3:]).flatten(0, -4)
    query, key = query.flatten(0, -4), key.flatten(0, -4)
    factor = width**-0.5 if scale is None else scale

    def chunk(rows: slice) -> Tensor:
        logits = (query[rows] * factor) @ key[rows].transpose(-2, -1)
        if mask is not None:
            some = mask[rows] if mask.ndim > 3 else mask
            logits = logits.masked_fill(~some, -torch.inf) if some.dtype == torch.bool else logits + some
        return logits.softmax(dim=-1)

    return AttentionMaps(len(query), query.shape[1] * queries * keys, query.numel(), query.device, chunk)


def _maps_of_module(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionMaps:
    """Maps of `nn.MultiheadAttention`: calls its function again for the weights, some images at a time."""
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
    (queries, images, _), keys, heads = given["query"].shape, given["key"].shape[0], given["num_heads"]
    masks: dict[str, Tensor | None] = {name: given.get(name) for name in ("key_padding_mask", "attn_mask")}

    def chunk(rows: slice) -> Tensor:
        tensors = {name: given[name][:, rows] for name in ("query", "key", "value")}
        padding, mask = masks["key_padding_mask"], masks["attn_mask"]
        if mask is not None and mask.ndim == 3:
            mask = mask.reshape(images, heads, queries, keys)[rows].flatten(0, 1)
        padding = padding[rows] if padding is not None else None
        options = {"need_weights": True, "average_attn_weights": False, "key_padding_mask": padding, "attn_mask": mask}
        weights: Tensor = func(**{**given, **tensors, **options})[1]
        return weights

    return AttentionMaps(images, heads * queries * keys, given["query"].numel(), given["query"].device, chunk)


def _module_outputs(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Outputs of the heads of `nn.MultiheadAttention`: calls its function again with the identity as projection."""
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
    identity = torch.eye(given["embed_dim_to_check"], dtype=given["query"].dtype, device=given["query"].device)
    joined: Tensor = func(**{**given, "out_proj_weight": identity, "out_proj_bias": None, "need_weights": False})[0]
    queries, images, width = joined.shape
    return joined.reshape(queries, images, given["num_heads"], width // given["num_heads"]).permute(1, 2, 0, 3)


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
