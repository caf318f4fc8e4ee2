"""Which unit every element of a tensor belongs to, followed through elementwise operations, sums and rearrangements.

A tensor's labels are arrays that broadcast against it. Where an array has an axis of length one, the unit does not
depend on the position along it. Several arrays are several units of one element, such as row and column of a weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.symmetry.permutations import NONE, Units


@dataclass(frozen=True)
class Labels:
    """The units of a tensor's elements."""

    shape: tuple[int, ...]
    arrays: tuple[np.ndarray, ...] = ()  # of units, as many axes as the tensor, each of its length or of length one
    # axes along which values differ in an order of their own: of pixels, tokens, constants
    ordered: tuple[bool, ...] = ()

    @classmethod
    def in_order(cls, shape: Sequence[int]) -> "Labels":
        """Of a tensor that knows nothing of units: every axis has an order of its own."""
        return cls(tuple(shape), (), tuple(n > 1 for n in shape))

    def covers(self, axis: int) -> bool:
        """Whether an array has the axis."""
        return any(array.shape[axis] > 1 for array in self.arrays)


def axes_of(array: np.ndarray) -> frozenset[int]:
    """The axes along which the unit changes."""
    return frozenset(axis for axis, n in enumerate(array.shape) if n > 1)


class Calculus:
    """The rules by which labels follow values; what it learns of the units it tells `units`."""

    def __init__(self, units: Units) -> None:
        self.units = units

    def combine(self, *operands: Labels) -> Labels:
        """Of an elementwise function of tensors that broadcast."""
        dims = max(len(one.shape) for one in operands)
        operands = tuple(_padded(one, dims) for one in operands)
        shape = tuple(np.broadcast_shapes(*(one.shape for one in operands)))
        self.units.mark(array for one in operands for array in one.arrays)
        ordered = tuple(any(one.ordered[axis] for one in operands) for axis in range(dims))
        kept = []
        for k, one in enumerate(operands):
            others = operands[:k] + operands[k + 1 :]
            for array in one.arrays:
                fixed = {axis for axis in axes_of(array) if any(o.ordered[axis] and not o.covers(axis) for o in others)}
                if fixed:
                    self.units.mark_places(array, fixed)
                if fixed != axes_of(array):
                    kept.append(array)
        return Labels(shape, self._merged(kept), ordered)

    def reduce(self, labels: Labels, axes: Sequence[int], *, keepdim: bool = True) -> Labels:
        """Of a symmetric function over some axes, such as a sum."""
        dims = len(labels.shape)
        over = {axis % dims for axis in axes} if dims else set()
        self.units.mark(labels.arrays)
        kept = []
        for array in labels.arrays:
            outside = axes_of(array) - over
            if outside == axes_of(array):
                kept.append(array)
            elif outside:
                kept.append(self._blocks(array, outside))
        shape = tuple(1 if axis in over else n for axis, n in enumerate(labels.shape))
        ordered = tuple(axis not in over and ordered for axis, ordered in enumerate(labels.ordered))
        reduced = Labels(shape, self._merged(kept), ordered)
        left = [n for axis, n in enumerate(shape) if axis not in over]
        return reduced if keepdim else self.move(reduced, lambda t: t.reshape(left))

    def contract(self, first: Labels, second: Labels) -> Labels:
        """Of a (batched) matrix product, (..., M, K) times (..., K, N)."""
        rows = self.move(first, lambda t: t.unsqueeze(-1))
        columns = self.move(second, lambda t: t.unsqueeze(-3))
        product: Labels = self.move(self.reduce(self.combine(rows, columns), [-2]), lambda t: t.squeeze(-2))
        return product

    def normalise(self, labels: Labels, axes: Sequence[int]) -> Labels:
        """Of a function of each element and of a statistic over some axes, such as softmax."""
        return self.combine(labels, self.reduce(labels, axes))

    def move(self, labels: Labels, function: Callable[[Tensor], Any]) -> Any:
        """Of a rearrangement of the elements, which the function makes of any tensor; as many as it returns."""
        moved = [function(_full(array, labels.shape)) for array in labels.arrays]
        new = function(_full(_places(labels), labels.shape))
        axes = [axes_of(array) for array in labels.arrays]
        apart = [(i, j) for i, j in combinations(range(len(axes)), 2) if not axes[i] & axes[j]]
        if isinstance(new, Tensor):
            return self._rearranged(new, moved, apart)
        return [self._rearranged(part, [array[k] for array in moved], apart) for k, part in enumerate(new)]

    def join(self, parts: Sequence[Labels], axis: int) -> Labels:
        """Of tensors one after the other along an axis."""
        parts = [part for part in parts if 0 not in part.shape]
        dims = len(parts[0].shape)
        axis %= dims
        sets = [sorted(part.arrays, key=lambda a: sorted(axes_of(a))) for part in parts]
        if len({len(arrays) for arrays in sets if arrays}) > 1 or any(
            len(arrays) > 1 and axis in axes_of(a) for arrays in sets for a in arrays
        ):
            self.pin(*parts)
            sets = [[] for _ in parts]
        self.units.mark(array for arrays in sets for array in arrays)
        count = max(len(arrays) for arrays in sets)
        joined = []
        for k in range(count):
            given = [arrays[k] if arrays else np.full((1,) * dims, NONE) for arrays in sets]
            if any(axis in axes_of(array) for array in given):
                others = frozenset[int]().union(*map(axes_of, given)) - {axis}
                for i, part in enumerate(parts):
                    if not sets[i]:
                        given[i] = self._of_unlabelled(part, others | {axis})
                full = []
                for array, part in zip(given, parts, strict=True):
                    wanted = [n if i == axis or i in others else 1 for i, n in enumerate(part.shape)]
                    full.append(np.broadcast_to(array, wanted))
                joined.append(np.concatenate(full, axis=axis))
            else:
                for array in given[1:]:
                    if axes_of(array) != axes_of(given[0]):
                        self.units.pin(array)
                        self.units.pin(given[0])
                    else:
                        self.units.unite(given[0], array)
                joined.append(max(given, key=lambda a: len(axes_of(a))))
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        ordered = [any(part.ordered[i] for part in parts) or i == axis for i in range(dims)]
        return Labels(tuple(shape), self._merged(joined), tuple(ordered))

    def pin(self, *labels: Labels) -> None:
        """Let all units of some tensors stay."""
        for one in labels:
            for array in one.arrays:
                self.units.pin(array)

    def pin_along(self, labels: Labels, axes: Sequence[int]) -> Labels:
        """Let the units stay that depend on the position along some axes, whose order matters from now on."""
        axes = [axis % len(labels.shape) for axis in axes]
        kept = []
        for array in labels.arrays:
            if axes_of(array) & set(axes):
                self.units.pin(array)
            else:
                kept.append(array)
        ordered = tuple(
            flag or (axis in axes and n > 1)
            for axis, (flag, n) in enumerate(zip(labels.ordered, labels.shape, strict=True))
        )
        return Labels(labels.shape, tuple(kept), ordered)

    def _rearranged(self, places: Tensor, tensors: Sequence[Tensor], apart: Sequence[tuple[int, int]]) -> Labels:
        """Of a rearranged tensor; units stay that came to share an axis with others, from axes of their own."""
        arrays, ordered = [_compressed(tensor) for tensor in tensors], [n > 1 for n in _compressed(places).shape]
        mixed = {k for pair in apart if axes_of(arrays[pair[0]]) & axes_of(arrays[pair[1]]) for k in pair}
        for k in mixed:
            self.units.pin(arrays[k])
            ordered = [flag or axis in axes_of(arrays[k]) for axis, flag in enumerate(ordered)]
        kept = tuple(array for k, array in enumerate(arrays) if k not in mixed and axes_of(array))
        return Labels(tuple(places.shape), kept, tuple(ordered))

    def _of_unlabelled(self, labels: Labels, axes: frozenset[int]) -> np.ndarray:
        """New units for values without any, which stay along axes with an order of their own."""
        shape = [n if axis in axes else 1 for axis, n in enumerate(labels.shape)]
        made = self.units.fresh(int(np.prod(shape))).reshape(shape)
        self.units.mark_places(made, [axis for axis in axes if labels.ordered[axis]])
        return made

    def _merged(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """One array per set of axes: equal ones unite, one within another holds its blocks."""
        by_axes: dict[frozenset[int], np.ndarray] = {}
        for array in arrays:
            axes = axes_of(array)
            if not axes:
                continue
            if axes in by_axes:
                self.units.unite(by_axes[axes], array)
            else:
                by_axes[axes] = array
        for small, large in [pair for pair in combinations(sorted(by_axes, key=len), 2) if pair[0] < pair[1]]:
            self.units.put_under(by_axes[large], by_axes[small])
        kept = [axes for axes in by_axes if not any(axes < other for other in by_axes)]
        for a, b in combinations(kept, 2):
            if common := a & b:
                self.units.unite(self._blocks(by_axes[a], common), self._blocks(by_axes[b], common))
        return tuple(by_axes[axes] for axes in kept)

    def _blocks(self, array: np.ndarray, outside: frozenset[int]) -> np.ndarray:
        """The blocks that units form at every position along the axes `outside`, made if there are none yet."""
        order = [*sorted(outside), *(axis for axis in range(array.ndim) if axis not in outside)]
        sizes = [array.shape[axis] for axis in sorted(outside)]
        rows = self.units.find(array.transpose(order).reshape(int(np.prod(sizes)), -1))
        keys, which = np.unique(np.sort(rows, axis=1), axis=0, return_inverse=True)
        own = self._held(keys)
        if own is None:
            own = self.units.fresh(len(keys), blocks=True)
            self.units.put_under(keys, own[:, None])
        shape = [n if axis in outside else 1 for axis, n in enumerate(array.shape)]
        return own[which.ravel()].reshape(shape)

    def _held(self, rows: np.ndarray) -> np.ndarray | None:
        """The blocks of rows of units, (rows,), from what is known of them; None if they lie in no blocks yet.

        Rows that consist of several blocks each become blocks of blocks. Units stay where blocks and rows overlap.
        """
        known = self.units.block_of(rows)
        if (known == NONE).all():
            return None
        pairs = np.unique(np.stack([known.ravel(), np.repeat(np.arange(len(rows)), rows.shape[1])], axis=1), axis=0)
        within = [pairs[pairs[:, 1] == row, 0] for row in range(len(rows))]
        nested = len(np.unique(pairs[:, 0])) == len(pairs) and len({len(blocks) for blocks in within}) == 1
        if (known == NONE).any() or not nested:
            made = self.units.fresh(len(rows))
            self.units.pin(rows)
            self.units.pin(made)
            return made
        if len(within[0]) == 1:
            return np.concatenate(within)
        return self._blocks(np.stack(within), frozenset({0})).ravel()


def labels_of_constant(tensor: Tensor) -> Labels:
    """Of values that depend on no input: an axis has an order of its own if they change along it."""
    if tensor.numel() == 0:
        return Labels.in_order(tensor.shape)
    return Labels(tuple(tensor.shape), (), tuple(n > 1 for n in _compressed(tensor.detach().cpu()).shape))


def _padded(labels: Labels, dims: int) -> Labels:
    more = dims - len(labels.shape)
    if not more:
        return labels
    arrays = tuple(array.reshape((1,) * more + array.shape) for array in labels.arrays)
    return Labels((1,) * more + labels.shape, arrays, (False,) * more + labels.ordered)


def _places(labels: Labels) -> np.ndarray:
    """A number for every position along the axes with an order of their own."""
    shape = [n if ordered else 1 for n, ordered in zip(labels.shape, labels.ordered, strict=True)]
    return np.arange(int(np.prod(shape))).reshape(shape)


def _full(array: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).expand(shape)


def _compressed(tensor: Tensor) -> np.ndarray:
    for axis, n in enumerate(tensor.shape):
        if n > 1:
            first = tensor.narrow(axis, 0, 1)
            if tensor.stride(axis) == 0 or bool((tensor == first).all()):
                tensor = first
    return tensor.contiguous().numpy()
