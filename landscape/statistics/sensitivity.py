"""Summarise perturbed weights: changes of loss and accuracy, additivity, the predictor and its rank correlation."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from landscape.statistics import intervals, means, stored

PARTS = 8  # of a mini-batch, over which sums of several units are compared
ALL = 0  # place of all units together
MEANS = ("loss_increase", "accuracy_drop")  # over samples


def summaries(data: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Everything that `Sensitivity` stores beside what it measures; arrays are (batch, trial, place)."""
    count = len(data["setting"])
    found: dict[str, Any] = {}
    sums = [f"{name}_{kind}" for name in MEANS for kind in ("sum", "square_sum")]
    trials = {name: data[name][:, :count] for name in ("done", "samples", *sums)}  # (batch, setting, place)
    n = np.where(trials["done"] == 1, trials["samples"], 0.0).sum(axis=0)
    for name, values in means.means_by_name(trials, MEANS).items():  # (setting, place)
        found |= {name: values[:, 1:].T, f"together_{name}": values[:, ALL]}
    for name in MEANS:
        found |= {f"{name}_se.n": n[:, 1:], f"together_{name}_se.n": n[:, ALL]}
    found |= _additivity(data, count)
    trace, error, n = _mean_trace(data, count)
    norms = np.asarray(data["squared_norm"])[:, :count, 1:]  # the same in every finished mini-batch
    change = np.fmax.reduce(np.where(np.isfinite(norms), norms, np.nan), axis=0).T  # (unit, setting)
    found |= {"squared_change": change, "mean_trace": trace, "mean_trace_se": error, "mean_trace_se.n": n}
    found["predictor"] = trace[:, None] * change
    pairs = [rank_correlation(found["predictor"][:, s], found["loss_increase"][:, s]) for s in range(count)]
    names = ("rank_correlation", "rank_correlation_low", "rank_correlation_high")
    found |= dict(zip(names, np.array(pairs).reshape(count, 3).T, strict=True))
    few = "fewer than four units, or no difference between them"
    why = few if np.isnan(found[names[0]]).all() else "all ranks agree"
    return found | stored.unmeasured((name, "", why) for name in names if np.isnan(found[name]).all())


def rank_correlation(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Spearman's rank correlation of the finite pairs of (n,) and (n,), and its 95 % interval.

    By Fisher's transformation with the variance (1 + r^2 / 2) / (n - 3) of Bonett & Wright (2000). NaN for fewer than
    four pairs, or equal values; the interval also where all ranks agree, since its variance is then unknown.
    """
    from scipy.stats import rankdata

    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    n = len(x)
    if n < intervals.FEWEST or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan, math.nan, math.nan
    r = float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])
    if abs(r) > 1 - 1e-12:
        return round(r), math.nan, math.nan
    half = intervals.NORMAL * math.sqrt((1 + r**2 / 2) / (n - 3))
    return r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


def parts_of(data: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the loss increase over parts of the samples, (part, setting, place), and samples of each part, (part,).

    Of the mini-batches that are finished at every setting and place; parts without samples are left out.
    """
    count = len(data["setting"])
    done = (data["done"][:, :count] == 1).all(axis=(1, 2))
    sums = np.moveaxis(np.asarray(data["part_loss_increase"])[done, :count], -1, 1)  # (batch, part, setting, place)
    samples = np.asarray(data["samples"])[done, 0, 0].astype(int)
    sizes = np.array([[len(part) for part in np.array_split(np.empty(n), PARTS)] for n in samples]).reshape(-1, PARTS)
    known = sizes.ravel() > 0
    return sums.reshape(-1, *sums.shape[2:])[known], sizes.ravel()[known]


def over_parts(sums: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over samples and its standard error, from sums over parts (part, ...) and their sizes (part,).

    The error is that of a ratio of sums over independent parts; NaN for fewer than two.
    """
    n, parts = sizes.sum(), len(sizes)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums.sum(axis=0) / n
        rest = sums - sizes.reshape(-1, *(1,) * (sums.ndim - 1)) * mean
        spread = parts / (parts - 1) * (rest**2).sum(axis=0) if parts > 1 else np.full_like(mean, np.nan)
        return mean, np.sqrt(spread) / n


def _additivity(data: Mapping[str, np.ndarray], count: int) -> dict[str, Any]:
    """The sum of single increases, and that of all units together minus it, with the paired error over parts."""
    sums, sizes = parts_of(data)
    if not len(sizes):
        unknown = np.full(count, np.nan)
        return dict.fromkeys(("sum_loss_increase", "additivity_error", "additivity_error_se"), unknown)
    single = sums[:, :, 1:].sum(axis=2)
    error, spread = over_parts(sums[:, :, ALL] - single, sizes)
    return {
        "sum_loss_increase": over_parts(single, sizes)[0], "additivity_error": error, "additivity_error_se": spread,
        "additivity_error_se.n": len(sizes),
    }  # fmt: skip


def _mean_trace(data: Mapping[str, np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Trace of every unit's Hessian block over its size, its error over random vectors, and how many, (unit,) each.

    The mean over finished vectors of a mini-batch, then over mini-batches by their samples; NaN without any vector.
    """
    forms = np.asarray(data["quadratic_form"])[:, count:, 1:]  # (batch, vector, unit)
    done = (data["done"][:, count:, 1:] == 1) & np.isfinite(forms)
    unit_size = np.asarray(data["size"], dtype=float)
    samples = np.where(done, data["samples"][:, count:, 1:], 0.0)
    if not forms.shape[1]:
        return (np.full(len(unit_size), np.nan),) * 3
    known = done.any(axis=1)
    n = done.sum(axis=1)  # (batch, unit)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(done, forms, 0.0).sum(axis=1) / n
        rest = np.where(done, forms - mean[:, None], 0.0)
        variance = np.where(n > 1, (rest**2).sum(axis=1) / (n - 1) / n, np.nan)
        share = np.where(known, samples.max(axis=1), 0.0)
        share = share / share.sum(axis=0)
        trace = np.where(known, share * mean, 0.0).sum(axis=0)
        error = np.sqrt(np.where(known, share**2 * variance, 0.0).sum(axis=0))
    any_known = known.any(axis=0)
    mean, spread = (np.where(any_known, part, np.nan) / unit_size for part in (trace, error))
    return mean, spread, np.where(n > 1, n, 0).sum(axis=0)
