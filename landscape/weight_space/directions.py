"""Draw random directions in weight space with filter normalisation (Li et al. 2018, section 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from landscape.options import matching
from landscape.probe import derived_seed
from landscape.products.vectors import inner

Normalize = Literal["filter", "layer", "none", "park2022"]
NORMALIZE_HELP = "of random directions: filter (per output unit), layer, none, or park2022 (as published)"
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
    def along_rows(cls, shape: tuple[int, ...]) -> Filters:
        """One filter per index of dim 0: linear layers, convolutions, tables of embeddings."""
        return cls(tuple(shape), tuple(range(1, len(shape))))

    @classmethod
    def of_transposed_convolution(cls, shape: tuple[int, ...], groups: int = 1) -> Filters:
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


def orthogonal_to(fixed: Mapping[str, Tensor], direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The direction minus its component along a fixed one, rescaled to its length.

    Two random directions are nearly orthogonal; applied after normalisation, this changes lengths per filter by about
    their cosine.
    """
    names = list(direction)
    across = inner((fixed[n] for n in names), direction.values())
    share = across / inner(fixed.values(), fixed.values())
    rest = {name: (d.double() - share * fixed[name].double()) for name, d in direction.items()}
    scale = (inner(direction.values(), direction.values()) / inner(rest.values(), rest.values())) ** 0.5
    return {name: (scale * d).to(direction[name]) for name, d in rest.items()}


def standard_normal(weight: Tensor, seed: int, axis: int, name: str) -> Tensor:
    """Standard normal entries for one tensor, seeded by (seed, axis, name)."""
    generator = torch.Generator().manual_seed(derived_seed(seed, axis, name))
    return torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight)


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
