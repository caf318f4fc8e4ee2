"""Random directions in weight space, normalised by filter (Li et al. 2018, section 4), and coordinates along them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from landscape.options import matching
from landscape.probe import derived_seed
from landscape.random_vectors import normal

Span = tuple[float, float]


def ticks(low: float, high: float, count: int) -> np.ndarray:
    """Evenly spaced coordinates with exact 0 and 1, so that the checkpoints there are reproduced exactly."""
    values = np.linspace(low, high, count)
    for exact in (0.0, 1.0):
        values = np.where(np.abs(values - exact) < 1e-12 * (high - low), exact, values)
    return values


def beside_ends(values: np.ndarray) -> np.ndarray:
    """Coordinates with more between 0 and 1, a quarter and a sixteenth of a step from each: there low barriers hide.

    Of an excess a t - b t^2 that a step is too long to see, these see at least 0.64 of the top, down to a root at a
    sixteenth of the step.
    """
    between = values[(values >= 0.0) & (values <= 1.0)]
    if not {0.0, 1.0} <= set(between):
        return values
    shares = np.array([0.25, 0.0625])
    return np.union1d(values, np.append(shares * between[1], 1.0 - shares * (1.0 - between[-2])))


def through_checkpoints(count: int) -> Span:
    """A range with 0 and 1 among its ticks, and about a sixth of the ticks (at least one) on either side."""
    between = max(min(round((count - 1) / 1.5), count - 3), 1)
    before = (count - 1 - between) // 2
    return -before / between, (count - 1 - before) / between


def through_centre(span: Span, count: int) -> Span:
    """The range shifted by at most half a step, so that 0 is among its ticks."""
    low, high = span
    step = (high - low) / (count - 1)
    before = min(max(round(-low / step), 0), count - 1)
    return -before * step, (count - 1 - before) * step


Normalize = Literal["filter", "layer", "none", "park2022"]
NORMALIZE_HELP = "norms of random directions: by filter (per output unit), layer, none, or park2022 (as published)"
IGNORE_HELP = "do not move parameters whose names match this REGEX; default: position tables, by name or use"

FILTERS = 64  # normalised at once
# Position embeddings are looked up, not multiplied: their rows have no scale invariance.
POSITIONS = r"pos(ition)?(al)?_?(emb|enc)|relative_position|rel_pos"


@dataclass(frozen=True)
class Filters:
    """How the entries of a weight group into filters: a filter is all weights that feed one output unit.

    The weight is viewed as `shape`, which splits an axis where only a part of it is summed over (the groups of a
    transposed convolution). An output unit sums over the axes `summed`; each index of the others is one filter.
    """

    shape: tuple[int, ...]
    summed: tuple[int, ...]

    @classmethod
    def along_rows(cls, shape: tuple[int, ...]) -> "Filters":
        """One filter per index of dim 0: linear layers, convolutions, tables of embeddings."""
        return cls(tuple(shape), tuple(range(1, len(shape))))

    @classmethod
    def of_transposed_convolution(cls, shape: tuple[int, ...], groups: int = 1) -> "Filters":
        """One filter per output channel of a weight (in, out / groups, kernel ...)."""
        kernel = range(2, len(shape))
        if groups == 1:
            return cls(tuple(shape), (0, *kernel))
        return cls((groups, shape[0] // groups, *shape[1:]), (1, *(axis + 1 for axis in kernel)))

    @property
    def order(self) -> tuple[int, ...]:
        """The axes, those that number the filters first."""
        return (*(axis for axis in range(len(self.shape)) if axis not in self.summed), *self.summed)

    def rows(self, weight: Tensor) -> Tensor:
        """The weight as (filters, entries): the same for every layout of the same layer."""
        count = math.prod(size for axis, size in enumerate(self.shape) if axis not in self.summed)
        return weight.reshape(self.shape).permute(self.order).reshape(count, -1)

    def weight(self, rows: Tensor, like: Tensor) -> Tensor:
        """The inverse of `rows`, in the shape of a weight."""
        back = tuple(self.order.index(axis) for axis in range(len(self.shape)))
        return rows.reshape([self.shape[axis] for axis in self.order]).permute(back).reshape(like.shape)


def random_direction(
    weights: Mapping[str, Tensor],
    *,
    seed: int,
    axis: int,
    normalize: Normalize = "filter",
    ignore: str = POSITIONS,
    filters: Mapping[str, Filters] | None = None,
) -> dict[str, Tensor]:
    """A random direction for all parameters that move, name -> tensor like the weight.

    Every tensor is drawn on the CPU from its own generator, seeded by (seed, axis, name): the same on any device, in
    any order and in any split of the work. Parameters with fewer than two dimensions (biases, norm scales) and those
    whose names match the regular expression `ignore` do not move and are left out. `filters` names the weights whose
    filters are not the slices along dim 0; with `normalize="filter"` these are drawn and normalised as rows of
    filters, so that every layout of one layer gets the same direction.

    Raises:
        ValueError: no parameter moves.
    """
    filters = filters if filters and normalize == "filter" else {}
    direction = {}
    fixed = set(matching("ignore", ignore, weights)) if ignore else set()
    for name, weight in weights.items():
        if weight.dim() < 2 or name in fixed:
            continue
        rows = filters[name].rows(weight) if name in filters else weight
        drawn = normalised(standard_normal(rows, seed, axis, name), rows, normalize)
        direction[name] = filters[name].weight(drawn, weight) if name in filters else drawn
    if not direction:
        raise ValueError("no parameter with at least two dimensions is left to move; relax --ignore")
    return direction


def length_units(normalize: Normalize) -> str:
    """Units of a coordinate along a random direction."""
    return {"none": "weight", "park2022": "norm of the weights along dim 0"}.get(normalize, f"{normalize} norm")


def standard_normal(weight: Tensor, seed: int, axis: int, name: str) -> Tensor:
    """Standard normal entries for one tensor, seeded by (seed, axis, name)."""
    drawn = derived_seed(seed, axis, name)
    return normal(weight.numel(), drawn, device=weight.device, dtype=weight.dtype).view(weight.shape)


def normalised(direction: Tensor, weight: Tensor, normalize: Normalize) -> Tensor:
    """The direction with the norms of the weight, changed in place to save a copy of the largest layer.

    `filter`: each slice along dim 0 gets the norm of the same slice of the weight; `layer`: the tensor as a whole;
    `park2022`: norms along dim 0, one per remaining index, as the published notebooks do; `none`: unscaled.
    """
    if normalize == "none":
        return direction
    dims = {"filter": tuple(range(1, weight.dim())), "layer": tuple(range(weight.dim())), "park2022": (0,)}[normalize]
    # Norms in float64: the direction of a zero filter is zero, any other ratio is exact to float32.
    target, length = _norms(weight, dims), _norms(direction, dims)
    ratio = torch.where(length > 0, target / length.clamp_min(1e-300), 0.0)
    return direction.mul_(ratio.to(direction))


def _norms(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Norms over some dimensions in float64; if per filter, some filters at a time to save memory."""
    parts = torch.split(tensor, FILTERS) if 0 not in dims else (tensor,)
    return torch.cat([part.double().square().sum(dims, keepdim=True) for part in parts]).sqrt()
