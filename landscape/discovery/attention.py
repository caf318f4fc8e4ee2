"""Find the self-attention of a branch in a recorded pass, and the call that returns the outputs of its heads."""

import math
from collections.abc import Sequence
from string import ascii_letters

from landscape.discovery.graph import ATTENTION, PRODUCTS, Flow, Operation
from landscape.discovery.layer import AttentionCall, Grid, HeadOutputs
from landscape.discovery.token_grid import window_of

# What may stand between an explicit softmax and its product with the values without changing what a map is.
TRANSPARENT = {"dropout", "to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone"}


def attention_of(flow: Flow, inside: Sequence[int], grid: Grid, prefix: int) -> AttentionCall | None:
    """The first self-attention among some operations: as many queries as keys, or unfolded keys around each query."""
    unfolded = [flow.operations[i].patches for i in inside]
    around = next((p for p in unfolded if p is not None and p.grid == grid and p.stride == (1, 1)), None)
    for i in inside:
        operation = flow.operations[i]
        if operation.name not in ATTENTION:
            continue
        axis = 0 if operation.name == "multi_head_attention_forward" else -2  # of tokens
        shapes = [flow.shapes[node] for node in operation.reads[:2]]
        if axis == 0:  # (token, image, channel), unlike a mask, which comes second where queries are keys and values
            shapes = [shape for shape in shapes if shape[1:2] == shapes[0][1:2]]
        if operation.name == "softmax":
            if around is not None and shapes[0][-2:] == (math.prod(grid), math.prod(around.kernel)):
                key = (operation.name, operation.number)
                return AttentionCall(key, operation.heads, grid, 0, around, _outputs(flow, i))
            if len(shapes[0]) < 3 or shapes[0][-1] != shapes[0][-2]:
                continue
        elif shapes[0][axis] != shapes[-1][axis]:
            continue
        tokens = shapes[0][axis]
        key = (operation.name, operation.number)
        outputs = _outputs(flow, i)
        if tokens == grid[0] * grid[1] + prefix:
            return AttentionCall(key, operation.heads, grid, prefix, outputs=outputs)
        return AttentionCall(key, operation.heads, window_of(flow, operation.reads[0], tokens), 0, outputs=outputs)
    return None


def _outputs(flow: Flow, position: int) -> HeadOutputs | None:
    """Where the heads of an attention call return what they read from the values."""
    operation = flow.operations[position]
    if operation.name in ("scaled_dot_product_attention", "multi_head_attention_forward"):
        return HeadOutputs((operation.name, operation.number))
    maps = operation.writes[0]
    for later in flow.operations[position + 1 :]:
        if later.reads[:1] != (maps,):
            continue
        result = flow.shapes[later.writes[0]]
        if later.name in TRANSPARENT and result == flow.shapes[maps]:
            maps = later.writes[0]
        elif later.name in PRODUCTS and len(later.reads) == 2:
            axes = _axes_of_product(later, flow.shapes[maps], flow.shapes[later.reads[1]], result)
            return HeadOutputs((later.name, later.number), axes) if axes is not None else None
    return None


def _axes_of_product(
    product: Operation, maps: tuple[int, ...], values: tuple[int, ...], result: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Axes of the result as (..., query, channel), of maps (..., query, key) times values; None if it is none such."""
    if product.name != "einsum":
        return () if result[:-1] == maps[:-1] else None
    terms, _, after = product.equation.replace(" ", "").partition("->")
    first, _, second = terms.partition(",")
    unused = "".join(letter for letter in ascii_letters if letter not in product.equation)
    leading = unused[: len(maps) - len(first.replace("...", ""))] if "..." in first else ""
    first, second, after = (term.replace("...", leading) for term in (first, second, after))
    new = set(after) - set(first)
    if len(first) != len(maps) or len(second) != len(values) or len(after) != len(result) or len(new) != 1:
        return None
    wanted = first[:-1] + new.pop()
    return tuple(after.index(letter) for letter in wanted) if sorted(wanted) == sorted(after) else None
