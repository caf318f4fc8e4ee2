"""Find where the positions of a tensor lie in the image: its layout, its grid, and whether windows have reordered it.

A map that was partitioned into windows and left so (as in MaxViT, Hiera, MobileViT, NesT) has tokens, but not in
row-major order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from landscape.discovery.graph import HEAVY, POOLING, Flow, Node, Operation
from landscape.discovery.layer import Grid, Layout

PREFIX = 16  # at most that many tokens (class, registers, distillation) come before those of the grid
WINDOW_AXES = 6  # axes of a map in windows: batch, channels, rows, side, columns, side


def layout_of(flow: Flow, node: Node, linear: bool) -> tuple[Layout, Grid, int]:
    """Layout, grid and number of prefix tokens of a tensor; `linear`: what reads it acts on its last axis."""
    shape = flow.shapes[node]
    if len(shape) == 4:
        return ("channels last", (shape[1], shape[2]), 0) if linear else ("channels first", (shape[2], shape[3]), 0)
    if len(shape) == 3:
        # The tokens come from the earlier map with the fewest tokens left over, the latest of several.
        candidates = [
            (shape[1] - grid[0] * grid[1], -earlier, grid)
            for earlier in range(node)
            if flow.ancestors[node] >> earlier & 1
            for grid in _grids(flow, earlier, shape[2])
            if grid[0] * grid[1] > 1 and 0 <= shape[1] - grid[0] * grid[1] <= PREFIX
        ]
        if candidates:
            prefix, _, grid = min(candidates)
            return "tokens", grid, prefix
        for earlier in range(node - 1, -1, -1):  # patches that were merged while they still had rows and columns
            sides = flow.shapes[earlier][1:3]
            is_map = flow.ancestors[node] >> earlier & 1 and len(flow.shapes[earlier]) == 4
            if is_map and min(sides) > 1 and sides[0] * sides[1] == shape[1]:
                return "tokens", (sides[0], sides[1]), 0
    return "none", (0, 0), 0


def _grids(flow: Flow, node: Node, features: int) -> Iterator[Grid]:
    """The grid of a tensor that is a map of tokens with so many features; attention's (head, width) is none."""
    shape, maker = flow.shapes[node], flow.maker[node]
    name = flow.operations[maker].name if maker >= 0 else ""
    patches = flow.operations[maker].patches if maker >= 0 else None
    if patches is not None:
        yield patches.grid
    if len(shape) == 4 and (name.startswith("conv") or name in POOLING):
        yield shape[2], shape[3]
    elif len(shape) == 6 or (len(shape) == 4 and shape[3] == features and min(shape[1:3]) > 1):
        yield shape[1], shape[2]  # (batch, row, column, ...): a patch or the features


def starts_linear(inside: Sequence[Operation], shape: tuple[int, ...]) -> bool:
    """Whether the first weight on a branch acts on the last axis of its input."""
    first = next((o for o in inside if o.weight), None)
    return bool(first and first.name == "linear" and first.weight[1] == shape[-1])


def consumer_is_linear(flow: Flow, node: Node) -> bool:
    """Whether the first weight or layer norm that reads a tensor acts on its last axis."""
    first = next((o for o in flow.operations if node in o.reads and (o.weight or o.name == "layer_norm")), None)
    return bool(first and not first.name.startswith("conv"))


def window_of(flow: Flow, node: Node, tokens: int) -> Grid:
    """Sides of the windows that a map was partitioned into, by the reshape (..., rows, side, columns, side, ...)."""
    for earlier in range(node, -1, -1):
        shape = flow.shapes[earlier]
        if flow.ancestors[node] >> earlier & 1 and len(shape) >= WINDOW_AXES:
            for i in range(2, len(shape) - 2):
                if shape[i] * shape[i + 2] == tokens:
                    return shape[i], shape[i + 2]
    return (0, 0)


def smaller(grid: Grid, before: Grid) -> bool:
    """Whether one grid has fewer positions than the grid before it."""
    return 0 < grid[0] * grid[1] < before[0] * before[1]


@dataclass(frozen=True)
class TokenGrid:
    """How the positions are ordered at a point of the residual stream."""

    grid: Grid  # of the last map known to be in the order of the image
    reordered: bool = False  # whether the positions have left that order since
    windowed: bool = False  # whether window partitioning reordered them, which only joining the windows undoes

    def after(self, flow: Flow, start: Node, end: Node) -> TokenGrid:
        """The order behind the operations between two nodes."""
        grid, reordered, windowed = self.grid, self.reordered, self.windowed
        embedded, inside, joining = start != 0, False, False
        for operation in (flow.operations[i] for i in flow.between(start, end)):
            shape = flow.shapes[operation.writes[0]]
            sides = _sides(shape, grid) if shape[0] == flow.shapes[0][0] else None
            spatial = operation.name.startswith("conv") or operation.name in POOLING
            if operation.patches is not None and not reordered:
                grid = operation.patches.grid
            if len(shape) == 4 and spatial and not reordered:
                grid = (shape[2], shape[3])
            elif len(shape) >= WINDOW_AXES and embedded:
                if not inside:  # windows may be joined here, a whole map is partitioned
                    joining = windowed
                reordered = windowed = inside = True
            elif sides is not None and ((joining and inside) or not windowed or (inside and sides != grid)):
                # joined again or, where the sides are not those of the grid, cells merged into channels
                grid, reordered, windowed = sides, False, False
            inside = inside and len(shape) >= WINDOW_AXES
            embedded = embedded or operation.name in HEAVY
        shape = flow.shapes[end]
        many = len(shape) > 2 and shape[0] != flow.shapes[0][0]  # windows share the first axis with images
        return TokenGrid(grid, reordered or many or (len(shape) == 4 and _sides(shape, grid) is None), windowed)


def _sides(shape: tuple[int, ...], grid: Grid) -> Grid | None:
    """Sides of a map of four axes if they are those of a grid, or all of them divided by one number."""
    if len(shape) != 4:
        return None
    for sides in ((shape[2], shape[3]), (shape[1], shape[2])):
        factor = max(1, round(grid[0] / max(1, sides[0])))
        if sides in (grid, _divided(grid, factor, 0), _divided(grid, factor, factor - 1)):
            return sides
    return None


def _divided(grid: Grid, factor: int, more: int) -> Grid:
    return (grid[0] + more) // factor, (grid[1] + more) // factor
