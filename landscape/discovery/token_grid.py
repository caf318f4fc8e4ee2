"""Find where the positions of a tensor lie in the image: its layout, its grid, and whether windows have reordered it.

A map that was partitioned into windows and left so (as in MaxViT, Hiera, MobileViT, NesT) has tokens, but not in
row-major order.
"""

import math
from collections.abc import Sequence

import torch

from landscape.discovery import graph, positions
from landscape.discovery.layer import NOWHERE, Grid, Layout, Place

PREFIX = 16  # at most that many tokens (class, registers, distillation) come before those of a grid


def layout_of(flow: graph.Flow, node: graph.Node, linear: bool) -> tuple[Layout, Grid, int]:
    """Layout, grid and number of prefix tokens of a tensor; `linear`: what reads it acts on its last axis."""
    shape = flow.shapes[node]
    if flow.positions[node]:
        return _followed(flow, node, linear)
    if len(shape) == 4 and not flow.indices & 1:
        return ("channels last", (shape[1], shape[2]), 0) if linear else ("channels first", (shape[2], shape[3]), 0)
    return "none", (0, 0), 0


def _followed(flow: graph.Flow, node: graph.Node, linear: bool) -> tuple[Layout, Grid, int]:
    shape, (rows, columns, *_) = flow.shapes[node], flow.positions[node] or ()
    moving = [{axis for axis, step in enumerate(p.stride()) if step and p.shape[axis] > 1} for p in (rows, columns)]
    if len(shape) == 4 and moving[0] | moving[1] <= {2} and not (moving[0] and moving[1]):  # one row: in both orders
        return ("channels last", (shape[1], shape[2]), 0) if linear else ("channels first", (shape[2], shape[3]), 0)
    if len(shape) == 4 and moving[0] <= {1, 2} and moving[1] <= {1, 3}:  # some channels may be shifted by a pixel
        return "channels first", (shape[2], shape[3]), 0
    if len(shape) == 4 and moving[0] <= {1, 3} and moving[1] <= {2, 3}:
        return "channels last", (shape[1], shape[2]), 0
    grid, prefix = grid_of(places_of(flow, node))
    if not any(grid):
        return "none", grid, 0
    return "channels first" if len(shape) - 1 in moving[0] | moving[1] else "tokens", grid, prefix


def places_of(flow: graph.Flow, node: graph.Node) -> tuple[Place, ...]:
    """Where the tokens (N, ..., channel) of an image lie; () if that is not known."""
    found, images = flow.positions[node], flow.shapes[0][0]
    if not found or len(found) > 2 or found[0].shape[0] % images:
        return ()
    if found[0].ndim > 3 and all(p.stride(1) == 0 for p in found) and any(p.stride(-1) for p in found):
        found = tuple(p.movedim(1, -1) for p in found)
    if any(p.stride(-1) for p in found):
        return ()
    places = torch.stack([p[..., 0].reshape(images, -1) for p in found], dim=-1)
    places = positions.rounded(places).nan_to_num(math.inf)
    return tuple((row, column) for row, column in places[0].tolist()) if (places == places[:1]).all() else ()


def grid_of(places: Sequence[Place]) -> tuple[Grid, int]:
    """Rows and columns of positions in any order, (0, 0) if they make no grid, and the number of tokens before them."""
    inside = {place for place in places if place != NOWHERE}
    grid = len({row for row, _ in inside}), len({column for _, column in inside})
    if not inside or grid[0] * grid[1] != len(inside) or len(places) - places.count(NOWHERE) != len(inside):
        return (0, 0), 0
    return grid, next(i for i, place in enumerate(places) if place != NOWHERE)


def order_of(flow: graph.Flow, node: graph.Node, layout: Layout, grid: Grid, prefix: int) -> tuple[int, ...]:
    """Order of tokens in which they are row by row, without those that are no positions; () if they are so."""
    if layout.startswith("channels") and flow.positions[node]:  # a map, whose places are many
        start = 2 if layout == "channels first" else 1
        sides = (
            p[tuple(slice(None) if axis == start + side else 0 for axis in range(p.ndim))]
            for side, p in enumerate(flow.positions[node] or ())
        )
        if len(flow.shapes[node]) == 4 and all((side.diff() > 0).all() for side in sides):
            return ()
    places = places_of(flow, node)
    inside = [i for i, place in enumerate(places) if place != NOWHERE]
    order = sorted(inside, key=lambda i: places[i])
    return () if order == list(range(prefix, len(places))) or not any(grid) else tuple(order)


def starts_linear(inside: Sequence[graph.Operation], shape: tuple[int, ...]) -> bool:
    """Whether the first weight on a branch acts on the last axis of its input."""
    first = next((o for o in inside if o.weight), None)
    return bool(first and first.name == "linear" and first.weight[1] == shape[-1])


def consumer_is_linear(flow: graph.Flow, node: graph.Node) -> bool:
    """Whether the first weight or layer norm that reads a tensor acts on its last axis."""
    first = next((o for o in flow.operations if node in o.reads and (o.weight or o.name == "layer_norm")), None)
    return bool(first and not first.name.startswith("conv"))


def smaller(grid: Grid, before: Grid) -> bool:
    """Whether one grid has fewer positions than the grid before it."""
    return 0 < grid[0] * grid[1] < before[0] * before[1]
