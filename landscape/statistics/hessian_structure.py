"""Summaries over mini-batches of how their Hessians are made: ratios, and the diagonal with its distribution."""

from collections.abc import Mapping

import numpy as np

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
LINEAR = ("diagonal", "diagonal_mean")  # means over samples of those of mini-batches: their errors add in squares
PREFIX = "batch_"


def over_batches(data: Mapping[str, np.ndarray], names: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Means over finished mini-batches weighted by their samples, by name, and their standard errors.

    The diagonal is that over all samples, with the error over random vectors. Everything else is a mean over
    mini-batches of what differs between them: its error is that of their spread, which contains that of the random
    vectors; with one mini-batch the latter alone.
    """
    found: dict[str, np.ndarray] = {}
    for name in names:
        if name.endswith("_se"):
            continue
        values, errors = data[PREFIX + name], data.get(f"{PREFIX}{name}_se")
        rows = values.reshape(len(values), -1).astype(float)
        known = (data["done"] == 1) & np.isfinite(rows).any(axis=1)
        if not known.any():
            return {}
        share = data["samples"][known] / data["samples"][known].sum()
        mean = np.tensordot(share, values[known].astype(float), axes=1)
        found[name] = mean
        if errors is None:
            continue
        squares = np.tensordot(share**2, errors[known].astype(float) ** 2, axes=1)
        count = len(share)
        if name not in LINEAR and count > 1:
            squares = np.tensordot(share**2, (values[known] - mean) ** 2, axes=1) * count / (count - 1)
        found[f"{name}_se"] = np.sqrt(squares)
    return found
