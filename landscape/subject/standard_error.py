"""Mean and standard error of a tensor: `results.statistics` for values that PyTorch reduces.

PyTorch and NumPy sum in different orders, so that the last digits of a stored error differ between the two.
"""

from __future__ import annotations

import math

from torch import Tensor


def mean_and_standard_error(values: Tensor) -> tuple[float, float]:
    """Mean of independent values (n,) and its standard error, std / sqrt(n); NaN for a single value."""
    n = len(values)
    return values.mean().item(), values.std().item() / n**0.5 if n > 1 else math.nan
