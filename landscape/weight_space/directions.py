"""Directions in weight space, normalised per filter (Li et al. 2018, section 4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from landscape.curvature.vectors import inner
from landscape.probe import derived_seed

Normalize = Literal["filter", "layer", "none", "park2022"]

FILTERS = 64  # normalised at a time
# Tables of positions are looked up, not multiplied: a "filter" of them has no scale invariance to respect.
POSITIONS = r"pos(ition)?(al)?_?(emb|enc)|relative_position|rel_pos"


def random_direction(
    weights: Mapping[str, Tensor],
    *,
    seed: int,
    axis: int,
    normalize: Normalize = "filter",
    ignore: str = POSITIONS,
) -> dict[str, Tensor]:
    """A random direction for the parameters that move.

    Every tensor is drawn from its own generator keyed by (seed, axis, name), on the CPU: the same on any device, in
    any order and in any split of the work. Parameters with fewer than two dimensions (biases, norm scales) and those
    whose name `ignore` finds do not move and are left out.

    Returns:
        name -> tensor like the weight.
    """
    return {
        name: normalised(drawn(weight, seed, axis, name), weight, normalize)
        for name, weight in weights.items()
        if weight.dim() >= 2 and not (ignore and re.search(ignore, name))
    }


def orthogonal_to(fixed: Mapping[str, Tensor], direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The direction without its component along a fixed one, as long as before.

    Two random directions are nearly orthogonal; taken after normalisation, so that lengths per filter change by about
    their cosine.
    """
    names = list(direction)
    across = inner((fixed[n] for n in names), direction.values())
    share = across / inner(fixed.values(), fixed.values())
    rest = {name: (d.double() - share * fixed[name].double()) for name, d in direction.items()}
    scale = (inner(direction.values(), direction.values()) / inner(rest.values(), rest.values())) ** 0.5
    return {name: (scale * d).to(direction[name]) for name, d in rest.items()}


def drawn(weight: Tensor, seed: int, axis: int, name: str) -> Tensor:
    """Standard normal entries for one tensor, keyed by (seed, axis, name)."""
    generator = torch.Generator().manual_seed(derived_seed(seed, axis, name))
    return torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight)


def normalised(direction: Tensor, weight: Tensor, normalize: Normalize) -> Tensor:
    """The direction, changed in place to have the norms of the weight: a second copy of the largest layer would count.

    `filter`: each slice along dim 0 gets the norm of the same slice of the weight; `layer`: the tensor as a whole;
    `park2022`: norms along dim 0, one per remaining index, as the published notebooks do; `none`: unscaled.
    """
    if normalize == "none":
        return direction
    dims = {"filter": tuple(range(1, weight.dim())), "layer": tuple(range(weight.dim())), "park2022": (0,)}[normalize]
    # Norms in float64: a filter of zeros keeps its direction at zero, any other ratio is exact to fp32.
    target, length = _norms(weight, dims), _norms(direction, dims)
    ratio = torch.where(length > 0, target / length.clamp_min(1e-300), 0.0)
    return direction.mul_(ratio.to(direction))


def _norms(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Norms over some dimensions in float64; where filters stay apart, some at a time, for the sake of memory."""
    parts = torch.split(tensor, FILTERS) if 0 not in dims else (tensor,)
    return torch.cat([part.double().square().sum(dims, keepdim=True) for part in parts]).sqrt()
