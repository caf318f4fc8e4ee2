"""Find the self-attention of a branch in a recorded pass, and the call that returns the outputs of its heads."""

import math
from collections.abc import Sequence
from functools import partial

import torch

from landscape.discovery.graph import ATTENTION, Flow, Operation
from landscape.discovery.layer import NOWHERE, AttentionCall, Grid, HeadOutputs, Place, Windows
from landscape.discovery.positions import PRODUCTS, Positions, rounded, spelt
from landscape.discovery.token_grid import grid_of

# What may stand between an explicit softmax and its product with the values without changing what a map is.
TRANSPARENT = {"dropout", "to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone"}
CHANNELS = "its maps are between channels"
UNKNOWN = "the positions of its queries and keys cannot be followed through the network"
SINGLE = "it has one query and one key"
LINEAR = "it sums over positions without a softmax, so it has no pairs of queries and keys"
UNPAIRED = "its softmax over positions is of no pairs of queries and keys"


def attends(flow: Flow, position: int, inside: Sequence[int]) -> bool:
    """Whether an operation is attention: a softmax is a gate, unless it is over positions or its block has a product.

    The block is the operations `inside`; the product, of two tensors, comes before the softmax or after it. An
    unfolded map counts as one. A softmax over a matrix chooses the experts of a token.
    """
    operation = flow.operations[position]
    if operation.name not in ATTENTION or "softmax" not in operation.name:
        return operation.name in ATTENTION
    maps, beside = operation.writes[0], [flow.operations[i] for i in inside]
    after = (o.patches is not None or (_is_product(o) and flow.ancestors[o.writes[0]] >> maps & 1) for o in beside)
    return len(flow.shapes[maps]) > 2 and (
        _is_over_positions(operation) or _products_before(flow, position, inside) or any(after)
    )


def _is_product(operation: Operation) -> bool:
    return operation.name in PRODUCTS and len(operation.reads) > 1


def sums_over_positions(flow: Flow, operation: Operation) -> bool:
    """Whether an operation multiplies keys with values over all positions, as linear attention does."""
    factors = (flow.positions[node] for node in operation.reads)
    return _is_product(operation) and flow.positions[operation.writes[0]] == () and all(factors)


def _is_over_positions(operation: Operation) -> bool:
    """Whether a softmax adds up to one over positions, each with a number that no product of pairs has made."""
    return bool(operation.maps) and len(operation.maps or ()) == 2 and any(p.stride(-1) for p in operation.maps or ())


def _products_before(flow: Flow, position: int, inside: Sequence[int]) -> bool:
    past = flow.ancestors[flow.operations[position].writes[0]]
    return any(_is_product(flow.operations[i]) and past >> flow.operations[i].writes[0] & 1 for i in inside)


def attention_of(
    flow: Flow, inside: Sequence[int], grid: Grid, prefix: int, *, followed: bool = True
) -> AttentionCall | None:
    """The first self-attention among some operations; its positions are `followed`, or else those of a given grid.

    Where they cannot be followed, it has as many queries as keys, or unfolded keys around each query. Without pairs of
    queries and keys there are no maps of heads, and the reason says so.
    """
    unfolded = [flow.operations[i].patches for i in inside]
    around = next((p for p in unfolded if p is not None and p.grid == grid and p.stride == (1, 1)), None)
    unpaired, several = None, [i for i in inside if attends(flow, i, inside)]
    products = (flow.operations[i] for i in inside if sums_over_positions(flow, flow.operations[i]))
    if not several and (product := next(products, None)) is not None:
        return AttentionCall((product.name, product.number), 0, (0, 0), 0, reason=LINEAR)
    for i in several:
        operation, at = flow.operations[i], _cut(flow, i)
        outputs, read = _outputs(flow, at), flow.operations[at]
        called = partial(AttentionCall, (read.name, read.number), others=len(several) - 1)
        queries, keys = _sides(flow, read)
        if around is not None and (queries, keys) == (math.prod(grid), math.prod(around.kernel)):
            return called(operation.heads, grid, 0, around, outputs)
        if (maps := _pairs(flow, operation, read, outputs)) and followed:
            windows, reason = windows_of(maps, flow.shapes[0][0])
            if windows is not None:
                attending, ahead = grid_of(max(windows.queries, key=lambda places: -places.count(NOWHERE)))
                return called(len(windows.order) // len(windows.kinds), attending, ahead, None, outputs, windows)
            if reason:
                return called(operation.heads, (0, 0), 0, outputs=outputs, reason=reason)
            if any(grid) and _is_over_positions(operation) and not _products_before(flow, i, inside):
                unpaired = unpaired or called(0, (0, 0), 0, reason=UNPAIRED)
        elif queries == keys > 0:
            whole = queries == grid[0] * grid[1] + prefix and maps != ()
            unknown = UNKNOWN if flow.positions[0] else "the inputs of this network are no images"
            unknown = CHANNELS if maps == () else unknown
            reason = "" if whole else SINGLE if queries == 1 else unknown
            where = (grid, prefix) if whole else ((0, 0), 0)
            return called(operation.heads, *where, outputs=outputs, reason=reason)
    return unpaired


def _cut(flow: Flow, position: int) -> int:
    """The operation that leaves out keys of a softmax, such as learnt sinks; the softmax itself if there is none."""
    maps = flow.operations[position].writes[0]
    for i, later in enumerate(flow.operations[position + 1 :], position + 1):
        after, before = flow.shapes[later.writes[0]], flow.shapes[maps]
        if later.reads == (maps,) and later.name in TRANSPARENT and after == before:
            maps = later.writes[0]
        elif later.reads == (maps,) and later.name == "__getitem__" and after[:-1] == before[:-1]:
            return i
    return position


def _pairs(flow: Flow, operation: Operation, read: Operation, outputs: HeadOutputs | None) -> Positions | None:
    """Positions of the queries and keys of the maps; those of the values for both, if only they are known."""
    maps, shape = operation.maps if read is operation else flow.positions[read.writes[0]], flow.shapes[read.writes[0]]
    if (maps and len(maps) > 2) or "softmax" not in operation.name or outputs is None or outputs.order:
        return maps
    product = next(o for o in flow.operations if (o.name, o.number) == outputs.key)
    values = [p.select(-1, 0) for p in (flow.positions[product.reads[1]] or ())[:2]]
    if shape[-2] != shape[-1] or not any(p.stride(-1) for p in values) or values[0].shape != shape[:-1]:
        return maps
    return *(p[..., None].expand(shape) for p in values), *(p[..., None, :].expand(shape) for p in values)


def _sides(flow: Flow, operation: Operation) -> tuple[int, int]:
    """Numbers of queries and keys of an attention function; (0, 0) of a softmax over fewer than three axes."""
    shapes = [flow.shapes[node] for node in operation.reads[:2]]
    if operation.name == "scaled_dot_product_attention":
        return shapes[0][-2], shapes[-1][-2]
    if operation.name == "multi_head_attention_forward":  # (token, image, channel), unlike a mask, which comes second
        shapes = [shape for shape in shapes if shape[1:2] == shapes[0][1:2]]  # where queries are keys and values
        return shapes[0][0], shapes[-1][0]
    maps = flow.shapes[operation.writes[0]]
    return (0, 0) if len(maps) < 3 else (maps[-2], maps[-1])


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
    both = rounded(both).nan_to_num(math.inf)
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
