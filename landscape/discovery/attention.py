"""Find the self-attention of a branch in a recorded pass, and the call that returns the outputs of its heads."""

import math
from collections.abc import Sequence
from functools import partial

import torch

from landscape.discovery.graph import ATTENTION, Flow, Operation
from landscape.discovery.layer import AttentionCall, Grid, HeadOutputs, Place, Windows
from landscape.discovery.positions import FINEST, PRODUCTS, Positions, spelt
from landscape.discovery.token_grid import grid_of

# What may stand between an explicit softmax and its product with the values without changing what a map is.
TRANSPARENT = {"dropout", "to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone"}
CHANNELS = "its maps are between channels"
UNKNOWN = "the positions of its queries and keys cannot be followed through the network"


def attention_of(
    flow: Flow, inside: Sequence[int], grid: Grid, prefix: int, *, followed: bool = True
) -> AttentionCall | None:
    """The first self-attention among some operations; its positions are `followed`, or else those of a given grid.

    Where they cannot be followed, it has as many queries as keys, or unfolded keys around each query.
    """
    unfolded = [flow.operations[i].patches for i in inside]
    around = next((p for p in unfolded if p is not None and p.grid == grid and p.stride == (1, 1)), None)
    for i in inside:
        operation = flow.operations[i]
        if operation.name not in ATTENTION:
            continue
        heads, called = operation.heads, partial(AttentionCall, (operation.name, operation.number))
        queries, keys = _sides(flow, operation)
        if around is not None and (queries, keys) == (math.prod(grid), math.prod(around.kernel)):
            return called(heads, grid, 0, around, _outputs(flow, i))
        if operation.maps and followed:
            windows, reason = windows_of(operation.maps, flow.shapes[0][0])
            if windows is not None:
                attending, ahead = grid_of(windows.queries[0])
                return called(
                    len(windows.order) // len(windows.kinds), attending, ahead, None, _outputs(flow, i), windows
                )
            if reason:
                return called(heads, (0, 0), 0, outputs=_outputs(flow, i), reason=reason)
        elif queries == keys > 0 and (operation.name != "softmax" or _is_of_product(flow, i)):
            whole = queries == grid[0] * grid[1] + prefix and operation.maps != ()
            unknown = UNKNOWN if flow.positions[0] else "the inputs of this network are no images"
            reason = "" if whole else CHANNELS if operation.maps == () else unknown
            where = (grid, prefix) if whole else ((0, 0), 0)
            return called(heads, *where, outputs=_outputs(flow, i), reason=reason)
    return None


def _sides(flow: Flow, operation: Operation) -> tuple[int, int]:
    """Numbers of queries and keys of an attention function; (0, 0) of a softmax over fewer than three axes."""
    shapes = [flow.shapes[node] for node in operation.reads[:2]]
    if operation.name == "scaled_dot_product_attention":
        return shapes[0][-2], shapes[-1][-2]
    if operation.name == "multi_head_attention_forward":  # (token, image, channel), unlike a mask, which comes second
        shapes = [shape for shape in shapes if shape[1:2] == shapes[0][1:2]]  # where queries are keys and values
        return shapes[0][0], shapes[-1][0]
    return (0, 0) if len(shapes[0]) < 3 else (shapes[0][-2], shapes[0][-1])


def _is_of_product(flow: Flow, position: int) -> bool:
    """Whether a softmax is of a product of two tensors of the pass, unlike a gate."""
    past = flow.ancestors[flow.operations[position].reads[0]]
    products = (o for o in flow.operations[:position] if o.name in PRODUCTS and len(o.reads) > 1)
    return any(past >> product.writes[0] & 1 for product in products)


def windows_of(maps: Positions, images: int) -> tuple[Windows | None, str]:
    """Where the queries and keys of maps (..., query, key) lie, or why that is unknown.

    Maps of an image with the same positions are heads of one window. As many queries as keys have their positions: the
    results of the queries go there, wherever they come from. No reason where the queries, or keys, are no positions.
    """
    if len(maps) < 4:
        return None, ""
    (*_, queries, keys), count = maps[0].shape, maps[0][..., 0, 0].numel()
    columns = torch.stack([p.select(-2, 0) for p in maps[2:]], dim=-1)
    rows = columns if queries == keys else torch.stack([p.select(-1, 0) for p in maps[:2]], dim=-1)
    if not rows.isfinite().any() or not columns.isfinite().any():
        return None, ""
    if count % images:
        return None, UNKNOWN
    both = torch.cat([rows.reshape(images, -1, queries, 2), columns.reshape(images, -1, keys, 2)], dim=2)
    both = ((both * FINEST).round() / FINEST).nan_to_num(math.inf)
    if not torch.equal(both, both[:1].expand_as(both)):
        return None, "the maps of an image do not lie together"
    windows: dict[bytes, list[int]] = {}  # numbers of the maps of an image, by their positions
    for number, places in enumerate(both[0].numpy()):
        windows.setdefault(places.tobytes(), []).append(number)
    if len({len(heads) for heads in windows.values()}) > 1:
        return None, "its heads attend to different positions"
    kinds: dict[tuple[tuple[Place, ...], ...], int] = {}
    of_windows = []
    for number, *_ in windows.values():
        places = both[0, number]
        inside = places[queries:][places[queries:].isfinite().all(dim=-1)]
        relative = (places - (inside[0] if len(inside) else 0.0)).tolist()
        kind = tuple((row, column) for row, column in relative)
        of_windows.append(kinds.setdefault((kind[:queries], kind[queries:]), len(kinds)))
    order = tuple(number for heads in windows.values() for number in heads)
    found = Windows(tuple(kind for kind, _ in kinds), tuple(kind for _, kind in kinds), tuple(of_windows), order)
    return found, ""


def _outputs(flow: Flow, position: int) -> HeadOutputs | None:
    """Where the heads of an attention call return what they read from the values."""
    operation = flow.operations[position]
    if operation.name in ("scaled_dot_product_attention", "multi_head_attention_forward"):
        return HeadOutputs((operation.name, operation.number))
    maps, turned = operation.writes[0], False
    for later in flow.operations[position + 1 :]:
        result = flow.shapes[later.writes[0]]
        if turned and later.name in PRODUCTS and later.reads[1:] == (maps,):  # values' times maps'
            *others, channels, queries = range(len(result))
            return HeadOutputs((later.name, later.number), (*others, queries, channels))
        if later.reads[:1] != (maps,):
            continue
        if later.name in TRANSPARENT and result == flow.shapes[maps]:
            maps = later.writes[0]
        elif later.name == "transpose" and result == (*flow.shapes[maps][:-2], *flow.shapes[maps][:-3:-1]):
            maps, turned = later.writes[0], not turned
        elif not turned and later.name in PRODUCTS and len(later.reads) == 2:
            axes = _axes_of_product(later, flow.shapes[maps], flow.shapes[later.reads[1]], result)
            return HeadOutputs((later.name, later.number), axes) if axes is not None else None
    return None


def _axes_of_product(
    product: Operation, maps: tuple[int, ...], values: tuple[int, ...], result: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Axes of the result as (..., query, channel), of maps (..., query, key) times values; None if it is none such."""
    if product.name != "einsum":
        return () if result[:-1] == maps[:-1] else None
    first, second, after = spelt(product.equation, len(maps), len(values))
    new = set(after) - set(first)
    if len(first) != len(maps) or len(second) != len(values) or len(after) != len(result) or len(new) != 1:
        return None
    wanted = first[:-1] + new.pop()
    return tuple(after.index(letter) for letter in wanted) if sorted(wanted) == sorted(after) else None
