"""NEP and APE, two numbers about the spectra of many mini-batches (Park & Kim, arXiv 2202.06709)."""

from __future__ import annotations

import numpy as np

RESAMPLES = 1000


def summaries(values: np.ndarray) -> dict[str, float]:
    """NEP and APE of all eigenvalues, each with a 95 % bootstrap interval over mini-batches.

    Args:
        values: eigenvalues, (batch, rank), NaN where a matrix has fewer.
    """
    if len(values) == 0:
        return {}
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    found: dict[str, float] = {}
    for name, statistic in (("nep", negative_share), ("ape", positive_mean)):
        found[name] = statistic(values)
        spread = np.array([statistic(values[rows]) for rows in draws])
        if len(values) > 1 and np.isfinite(spread).any():
            found[f"{name}_low"], found[f"{name}_high"] = np.nanquantile(spread, [0.025, 0.975])
    return found


def negative_share(values: np.ndarray) -> float:
    """NEP: share of negative values, a measure of non-convexity."""
    return float((values < 0).sum() / np.isfinite(values).sum())


def positive_mean(values: np.ndarray) -> float:
    """APE: mean of the positive values, a measure of sharpness; NaN where there are none."""
    positive = values[values > 0]
    return float(positive.mean()) if positive.size else float("nan")
