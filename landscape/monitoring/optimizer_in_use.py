"""The optimiser of a training that a library runs."""

from typing import Any

from torch.optim import Optimizer

from landscape.curvature.preconditioner import RULES


def optimizer_in_use(found: Any) -> Optimizer | None:
    """The optimiser of PyTorch behind a library's wrapper, if its stability threshold is known; else None."""
    while not isinstance(found, Optimizer) or type(found) not in RULES:
        found = getattr(found, "optimizer", None)
        if found is None:
            return None
    return found
