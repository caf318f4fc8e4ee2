"""Compare results on the same samples: which of them are, and differences of means with their paired errors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import xarray as xr

from landscape.results.statistics import QUANTILE, Ends

SAMPLES = ("data_sha256", "samples")  # the attributes that say which samples a result is of


def comparable(results: Sequence[xr.Dataset], also: Callable[[xr.Dataset], Hashable] = lambda data: None) -> list[int]:
    """Positions of finished results on the same samples, the first such set; empty where there is none.

    `also` is what else must be equal.
    """
    finished = [i for i, data in enumerate(results) if (data["done"] == 1).all() and data.attrs.get("data_sha256")]
    about = {i: (*(results[i].attrs.get(name) for name in SAMPLES), also(results[i])) for i in finished}
    for i in finished:
        same = [j for j in finished if j >= i and about[j] == about[i]]
        if len(same) > 1:
            return same
    return []


def mean_difference(values: np.ndarray, other: np.ndarray, *, shares: bool = False) -> tuple[np.ndarray, Ends]:
    """Mean over the last axis of paired values minus others, and the ends of its 95 % interval.

    Of shares of right answers the interval is that of Bonett & Price (2012), with one more sample of either sign: it
    says something even where no two answers differ.
    """
    difference = values - other
    n = difference.shape[-1]
    with np.errstate(invalid="ignore"):  # infinite losses of both
        mean = difference.mean(axis=-1)
        if shares:
            gained, lost = ((np.clip(sign * difference, 0, None).sum(axis=-1) + 1) / (n + 2) for sign in (1, -1))
            half = QUANTILE * np.sqrt((gained + lost - (gained - lost) ** 2) / (n + 2))
            low, high = gained - lost - half, gained - lost + half
            return mean, (np.clip(np.minimum(low, mean), -1, 1), np.clip(np.maximum(high, mean), -1, 1))
        half = QUANTILE * difference.std(axis=-1, ddof=1) / np.sqrt(n) if n > 1 else np.full(mean.shape, np.nan)
    return mean, (mean - half, mean + half)
