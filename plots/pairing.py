"""Differences of the headline numbers of two results on the same samples, pair by pair, where a probe stores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import xarray as xr

from landscape.plots.appearance import parameters_of
from landscape.results import corruption_summary, flatness
from landscape.results.calibration import SampleScores, paired_difference, stored_scores
from landscape.results.paired import Difference, by_error, mcnemar, paired_t
from landscape.results.ratio import linearised
from landscape.results.seed_groups import FEWEST

OF_SAMPLES = 6  # mini-batches from which measures are paired whose own errors are over all samples
Differences = Mapping[str, Difference]  # by the name of the headline number


def paired(data: xr.Dataset, other: xr.Dataset) -> Differences:
    """A result minus another one, for those numbers that are paired; none where the samples are not known to be same.

    Both are finished and of one probe and protocol.
    """
    sha256 = data.attrs.get("data_sha256")
    same = sha256 and sha256 == other.attrs.get("data_sha256")
    own = OF_PROBE.get(str(data.attrs.get("probe", "")))
    if own is None or not same:
        return {}
    if own is not _flatness and data["done"].shape != other["done"].shape:  # measures are paired one by one
        return {}
    return own(data, other)


def _calibration(data: xr.Dataset, other: xr.Dataset) -> Differences:
    mine, theirs = (stored_scores(one) for one in (data, other))
    return _scores(mine, theirs, int(parameters_of(data).get("draws", 1000)))


def _scores(mine: SampleScores, theirs: SampleScores, draws: int) -> Differences:
    """Means over samples by Student's t, shares by McNemar's test, and the calibration error by bootstrap."""
    ece, interval = paired_difference(mine, theirs, draws=draws)["ece"]
    resampled = f"paired bootstrap of {draws} resamples"
    return {
        "nll": paired_t(mine.nll, theirs.nll),
        "accuracy": mcnemar(mine.correct, theirs.correct),
        "ece": by_error(ece, interval.error, len(mine), resampled, (interval.low, interval.high)),
        "signed ece": paired_t(mine.confidence - mine.correct, theirs.confidence - theirs.correct),
    }


def _ensemble(data: xr.Dataset, other: xr.Dataset) -> Differences:
    """Of the means over all members."""
    nll, right = ([one[f"sample_{name}"].isel(size=-1).values for one in (data, other)] for name in ("nll", "correct"))
    there = np.isfinite(right[0]) & np.isfinite(right[1])
    return {
        "nll of all members": paired_t(*(part[there] for part in nll)),
        "accuracy of all members": mcnemar(*(part[there] for part in right)),
    }


def _corruption(data: xr.Dataset, other: xr.Dataset) -> Differences:
    from landscape.plots.corruption import images_of

    if images_of(data) != images_of(other):
        return {}
    found = corruption_summary.paired_difference(data, other)
    names = {"accuracy": "mean accuracy", "nll": "mean nll", "ece": "mean ece"}
    blocks = data.sizes["block"]
    return {
        names[name]: by_error(value, interval.error, blocks, f"paired over {blocks} blocks of samples")
        for name, (value, interval) in found.items()
    }


def _attack(data: xr.Dataset, other: xr.Dataset) -> Differences:
    from landscape.plots import attack

    quantity, eps = attack.quantity_of(data), data["eps"].values[-1:]
    if quantity != attack.quantity_of(other) or eps != other["eps"].values[-1:]:
        return {}
    found = {}
    for method in attack.names_of(data):
        mine, theirs = (attack.samples_of(one, method, eps, quantity)[0] for one in (data, other))
        name = f"{attack.NAMES.get(method, method)} at {255 * eps[0]:g}/255"
        found[name] = mcnemar(mine, theirs) if quantity == "accuracy" else paired_t(mine, theirs)
    return found


def mini_batches(data: xr.Dataset) -> dict[str, np.ndarray]:
    """Values per mini-batch, (batch,), whose means are NEP, APE and the mean largest eigenvalue; none otherwise.

    A ratio is linearised, so that the spread of the values gives its error.
    """
    if data.attrs.get("probe") != "hessian" or data["eigenvalue"].ndim != 2:
        return {}
    values = data["eigenvalue"].transpose("batch", "rank").values
    values = values[np.isfinite(values).any(axis=1)]
    positive = values > 0
    return {
        "nep": linearised((values < 0).sum(axis=1), np.isfinite(values).sum(axis=1)),
        "ape": linearised(np.where(positive, values, 0.0).sum(axis=1), positive.sum(axis=1)),
        "largest eigenvalue": data["largest"].values,
    }


def _hessian(data: xr.Dataset, other: xr.Dataset) -> Differences:
    """Over mini-batches, which hold the same samples; NEP and APE linearised around their values."""
    if data["eigenvalue"].ndim != 2 or data.attrs.get("batch_size") != other.attrs.get("batch_size"):
        return {}
    mine, theirs = mini_batches(data), mini_batches(other)
    if any(len(values) != one.sizes["batch"] for one in (data, other) for values in mini_batches(one).values()):
        return {}  # a mini-batch whose spectrum is not finite has no pair
    return {name: paired_t(values, theirs[name], "mini-batches") for name, values in mine.items()}


def _flatness(data: xr.Dataset, other: xr.Dataset) -> Differences:
    """Of every measure over mini-batches of the same samples, or over random vectors, which are the same too.

    Of few pairs the interval by Student's t is wider than that by the errors of both where these are over samples.
    """
    mine, theirs = (_parts(one) for one in (data, other))
    alike = data.attrs.get("batch_size") == other.attrs.get("batch_size")
    return {
        name: paired_t(one.values, theirs[name].values, one.of, one.shares)
        for name, one in mine.items()
        if name in theirs
        and _fewest(name) <= len(one.values)
        and np.array_equal(one.numbers, theirs[name].numbers)
        and (alike or one.of != "mini-batches")
    }


def _fewest(name: str) -> int:
    """How many pairs a difference is tested by, at least."""
    return OF_SAMPLES if flatness.MEASURES[name].over == "samples" else FEWEST


def _parts(data: xr.Dataset) -> dict[str, flatness.Parts]:
    return flatness.parts({str(name): data[name].values for name in data.variables})


def why_unpaired(name: str, data: xr.Dataset, other: xr.Dataset) -> str:
    """Why a measure of flatness of two results is not paired; "" of other probes."""
    if data.attrs.get("probe") != "flatness" or name not in flatness.MEASURES:
        return ""
    over = flatness.MEASURES[name].over
    if over == "noise draws":
        return "its noise draws are not stored one by one"
    if over == "residual":
        return "its error is that of the search"
    sha256 = data.attrs.get("data_sha256")
    if not sha256 or sha256 != other.attrs.get("data_sha256"):
        return "the samples are not known to be the same"
    if over != "random vectors" and data.attrs.get("batch_size") != other.attrs.get("batch_size"):
        return "mini-batches of different sizes"
    counts = [len(one[name].values) if name in one else 1 for one in map(_parts, (data, other))]
    units = "random vectors" if over == "random vectors" else "mini-batches"
    if min(counts) < _fewest(name):
        return f"fewer than {_fewest(name)} {units}"
    return f"different numbers of {units}" if counts[0] != counts[1] else f"different {units}"


OF_PROBE: Mapping[str, Callable[[xr.Dataset, xr.Dataset], Differences]] = {
    "attack": _attack,
    "calibration": _calibration,
    "corruption": _corruption,
    "ensemble": _ensemble,
    "flatness": _flatness,
    "hessian": _hessian,
}
