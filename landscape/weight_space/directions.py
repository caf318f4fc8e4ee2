"""Draw random directions in weight space with filter normalisation (Li et al. 2018, section 4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from landscape.curvature.vectors import inner
from landscape.probe import derived_seed

Normalize = Literal["filter", "layer", "none", "park2022"]

FILTERS = 64  # normalised at once
# Position embeddings are looked up, not multiplied: their rows have no scale invariance.
POSITIONS = r"pos(ition)?(al)?_?(emb|enc)|relative_position|rel_pos"


def random_direction(
    weights: Mapping[str, Tensor], *, seed: int, axis: int, normalize: Normalize = "filter", ignore: str = POSITIONS
) -> dict[str, Tensor]:
    """A random direction for all parameters that move, name -> tensor like the weight.

    Every tensor is drawn on the CPU from its own generator, seeded by (seed, axis, name): the same on any device, in
    any order and in any split of the work. Parameters with fewer than two dimensions (biases, norm scales) and those
    whose names match the regular expression `ignore` do not move and are left out.

    Raises:
        ValueError: no parameter moves.
    """
    direction = {
        name: normalised(standard_normal(weight, seed, axis, name), weight, normalize)
        for name, weight in weights.items()
        if weight.dim() >= 2 and not (ignore and re.search(ignore, name))
    }
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
