"""Whether the positions of a stream still lie as in the image, or were cut into windows that nobody has undone.

A map cut into windows and left so (as in MaxViT, Hiera, MobileViT, NesT) has tokens, but not in the order of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from landscape.layers.graph import Flow, Node
from landscape.layers.residual_blocks import HEAVY, Grid

CUT = 6  # axes of a map in windows: batch, channels, rows, side, columns, side


@dataclass(frozen=True)
class Arrangement:
    """How positions lie at a point of the stream.

    Args:
        grid: of the last map known to lie as the image does.
        cut: whether what came since is not.
        windows: whether that is by windows, which only joining windows undoes.
    """

    grid: Grid
    cut: bool = False
    windows: bool = False

    def after(self, flow: Flow, start: Node, end: Node) -> Arrangement:
        """How they lie behind the operations between two nodes."""
        grid, cut, windows = self.grid, self.cut, self.windows
        embedded, inside, undoing = start != 0, False, False
        for operation in (flow.operations[i] for i in flow.between(start, end)):
            shape = flow.shapes[operation.writes[0]]
            sides = _sides(shape, grid) if shape[0] == flow.shapes[0][0] else None
            if len(shape) == 4 and operation.name.startswith("conv") and not cut:
                grid = (shape[2], shape[3])
            elif len(shape) >= CUT and embedded:
                if not inside:  # what was cut may be put together here, what was whole is cut
                    undoing = windows
                cut = windows = inside = True
            elif sides is not None and ((undoing and inside) or not windows or (inside and sides != grid)):
                # joined again, or as many windows as tokens in them would be the grid itself: cells merged to channels
                grid, cut, windows = sides, False, False
            inside = inside and len(shape) >= CUT
            embedded = embedded or operation.name in HEAVY
        shape = flow.shapes[end]
        many = len(shape) > 2 and shape[0] != flow.shapes[0][0]  # windows beside images on the first axis
        return Arrangement(grid, cut or many or (len(shape) == 4 and _sides(shape, grid) is None), windows)


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
