"""Distance of the weights from those at the start of a run, also of a resumed run that no longer has them."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from landscape.probe import derived_seed

BUCKETS = 2**14


class Start:
    """The weights at the start: a copy, or in a resumed run the sketch of them that its results file holds.

    A count sketch (Charikar, Chen & Farach-Colton 2002) adds up the weights, each with a random sign, in `BUCKETS`
    random buckets. It is linear, and E|S x|^2 = |x|^2 with the variance 2 (|x|^4 - sum x_i^4) / BUCKETS at most, so
    that |S x| is |x| with a relative standard error of at most 1 / sqrt(2 BUCKETS) = 0.55 %. Of a model with at most so
    many weights it is the weights themselves.
    """

    def __init__(self, parameters: Mapping[str, Tensor], sketch: np.ndarray | None = None) -> None:
        self._copies = None if sketch is not None else {n: p.detach().clone() for n, p in parameters.items()}
        self.sketch = sketch_of(parameters) if sketch is None else sketch

    def distance(self, parameters: Mapping[str, Tensor]) -> tuple[float, float]:
        """|w - w_0| and its standard error, which is 0 where it is exact."""
        if self._copies is not None:
            parts = [
                torch.linalg.vector_norm(p.detach().double() - self._copies[n].double()) for n, p in parameters.items()
            ]
            return float(torch.linalg.vector_norm(torch.stack(parts))), 0.0
        found = float(np.linalg.norm(sketch_of(parameters) - self.sketch))
        exact = sum(p.numel() for p in parameters.values()) <= BUCKETS
        return found, 0.0 if exact else found / math.sqrt(2 * BUCKETS)


def sketch_of(parameters: Mapping[str, Tensor]) -> np.ndarray:
    """The count sketch of the weights, (BUCKETS,), zeros behind the weights themselves where these are fewer."""
    size = sum(p.numel() for p in parameters.values())
    if size <= BUCKETS:
        whole = torch.cat([p.detach().reshape(-1).double().cpu() for p in parameters.values()])
        return np.pad(whole.numpy(), (0, BUCKETS - size))
    total = torch.zeros(BUCKETS, dtype=torch.float64)
    for number, p in enumerate(parameters.values()):
        generator = torch.Generator().manual_seed(derived_seed(0, "start", number))
        drawn = torch.randint(2 * BUCKETS, (p.numel(),), generator=generator)
        values = p.detach().reshape(-1).double().cpu()
        total.index_add_(0, drawn % BUCKETS, torch.where(drawn < BUCKETS, values, -values))
    return total.numpy()
