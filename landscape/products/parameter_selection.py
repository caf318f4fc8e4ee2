"""Select the parameters to measure: those that match a regular expression, as a whole or layer by layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

from landscape.options import matching as names_matching
from landscape.options import nearest
from landscape.probe import Quantity

T = TypeVar("T")
PARAMS_HELP = "only parameters whose names match this REGEX"


def matching(parameters: Mapping[str, T], pattern: str) -> dict[str, T]:
    """Those whose name matches the expression anywhere, in order; all of them for an empty one.

    Raises:
        ValueError: none matches, with names close to the expression; or the model has no trainable parameter.
    """
    found = {name: parameters[name] for name in names_matching("params", pattern, parameters)}
    if not parameters:
        raise ValueError("the model has no trainable parameter, all are frozen; set requires_grad on some of them")
    if not found:
        some = nearest(pattern, parameters, "parameter")
        raise ValueError(f"--params {pattern} matches no trainable parameter; {some}")
    return found


def by_module(parameters: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Parameters by the module that owns them, in order; those of the model itself under their own first name."""
    groups: dict[str, dict[str, T]] = {}
    for name, p in parameters.items():
        groups.setdefault(ancestor(name, 1), {})[name] = p
    return groups


def ancestor(name: str, levels: int) -> str:
    """The module that many levels above a parameter; what stands directly in the model keeps its first name."""
    for _ in range(levels):
        name = name.rpartition(".")[0] or name
    return name


@dataclass(frozen=True)
class Blocks:
    """Diagonal blocks of a curvature matrix: a single one of all parameters, or one per layer on an axis `group`."""

    groups: Mapping[str, Mapping[str, Tensor]]  # parameters of each block
    per_layer: bool  # whether there is an axis `group`

    @staticmethod
    def of(parameters: Mapping[str, Tensor], *, per_layer: bool) -> "Blocks":
        return Blocks(by_module(parameters) if per_layer else {"": parameters}, per_layer)

    @property
    def sizes(self) -> np.ndarray:
        """Parameters of each block."""
        return np.array([sum(p.numel() for p in group.values()) for group in self.groups.values()])

    @property
    def axis(self) -> dict[str, np.ndarray]:
        return {"group": np.arange(len(self.groups))} if self.per_layer else {}

    @property
    def labels(self) -> dict[str, tuple[Quantity, np.ndarray]]:
        if not self.per_layer:
            return {}
        names = Quantity("module whose own parameters these are", dims=("group",)), np.array(list(self.groups))
        return {"name": names, "size": (Quantity("parameters of the group", dims=("group",)), self.sizes)}

    def position(self, index: tuple[int, ...]) -> int:
        """The block of a unit, from its index (batch,) or (batch, group)."""
        return index[1] if self.per_layer else 0

    def require_rows(self, top: int) -> None:
        """Check that the largest block has at least `top` rows. Raises ValueError: it has fewer."""
        size = int(self.sizes.max())
        if top > size:
            whose = "largest layer" if self.per_layer else "model"
            raise ValueError(f"--top {top} exceeds the {size} parameters of the {whose}; give at most {size}")
