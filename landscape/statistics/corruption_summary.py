"""Summaries of scores over corruptions and severities: means, and errors relative to a baseline, with their errors.

All corruptions are of the same images, whose scores are therefore dependent. The images are divided into blocks; every
summary is a weighted sum of scores per image, so that its error follows from the sums per block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from landscape.headline import HIGHER, LOWER, Headline, with_errors
from landscape.probe import Quantity, Values
from landscape.statistics import calibration, intervals

if TYPE_CHECKING:
    import xarray as xr

BLOCKS = 100
METRICS: Mapping[str, tuple[str, str, str]] = {  # long name, units, name of the mean relative to a baseline
    "accuracy": ("accuracy", "1", "mce"),
    "nll": ("negative log likelihood", "nats", "mcnll"),
    "ece": ("expected calibration error", "1", "mcece"),
}
BOUNDS = {"accuracy": "share", "nll": "positive", "ece": "positive"}
HEADLINES = (
    Headline("clean accuracy", "clean_accuracy", reading=HIGHER, samples=True),
    Headline("mean accuracy", "mean_accuracy", reading=HIGHER,
             column=16, title="corrupted", definition="accuracy under common corruptions, mean"),
    Headline("mean nll", "mean_nll", reading=LOWER),
    Headline("mean ece", "mean_ece", reading=LOWER),
    Headline("mCE", "mce", reading=LOWER),
    Headline("mCNLL", "mcnll", reading=LOWER),
    Headline("mCECE", "mcece", reading=LOWER),
)  # fmt: skip
RELATIVE = {"accuracy": "corruption error", "nll": "corruption NLL", "ece": "corruption ECE"}
CHANCE = "ece_chance"  # per cell: what the ECE is too large by at most, on average
PER_CELL, PER_BLOCK, PER_SIZE = ("corruption", "severity"), ("block",), ("size",)


def quantities() -> dict[str, Quantity]:
    """What is stored for every corruption and severity."""
    found = {"samples": Quantity("samples")}
    for name, (long_name, units, _) in METRICS.items():
        found[name] = Quantity(long_name, units, bounds=BOUNDS[name], error="samples", ends=name == "ece")
    return {**found, CHANCE: Quantity("mean ECE of a calibrated network of the same confidences")}


def block_quantities() -> dict[str, Quantity]:
    """The sums per block of samples, from which the errors of the summaries follow."""
    terms = {"accuracy": "correctness", "nll": "negative log likelihood", "ece": "calibration gap"}
    return {f"{name}_block": Quantity(f"sum of the {terms[name]}", METRICS[name][1], PER_BLOCK) for name in METRICS}


def size_quantities() -> dict[str, Quantity]:
    """What is stored for every size of an ensemble, of the first so many members."""
    found = {f"size_{name}": Quantity(long_name, units, PER_SIZE) for name, (long_name, units, _) in METRICS.items()}
    found[f"size_{CHANCE}"] = replace(quantities()[CHANCE], dims=PER_SIZE)
    for name, quantity in block_quantities().items():
        found[f"size_{name}"] = replace(quantity, dims=(*PER_SIZE, *PER_BLOCK))
    return found


def summaries(*, baseline: bool, sizes: bool = False) -> dict[str, Quantity]:
    """What `reduced` computes; of the sizes of an ensemble, the means over all corruptions and severities."""
    found: dict[str, Quantity] = {}
    for name, (long_name, units, relative) in METRICS.items():
        for prefix, over, dims in (
            ("type", "severities", ("corruption",)),
            ("severity", "corruptions", ("severity",)),
            ("mean", "corruptions and severities", ()),
        ):
            found[f"{prefix}_{name}"] = Quantity(
                f"{long_name}, mean over {over}", units, dims, bounds=BOUNDS[name], error="samples", over="block",
                ends=name == "ece",
            )  # fmt: skip
        if baseline:
            for of, what, dims in ((f"relative_{name}", "", ("corruption",)), (relative, "mean ", ())):
                found[of] = Quantity(
                    f"{what}{RELATIVE[name]} relative to the baseline", dims=dims,
                    error="samples, of a fixed baseline", over="block", ends=name == "ece",
                )  # fmt: skip
    means = {f"size_{name}": replace(one, dims=PER_SIZE) for name, one in found.items() if sizes and not one.dims}
    return found | means


def reduced(data: Mapping[str, np.ndarray]) -> Values:
    """The summaries of stored scores; NaN where a corruption or severity that takes part is not finished.

    mCE (Hendrycks & Dietterich 2019): mean over corruptions of sum_s error / sum_s error of the baseline, as a
    fraction; mCNLL and mCECE are the same of NLL and ECE. Of an ensemble also of its first members, for every size.
    Every ECE is too large by chance, and so is their mean: its interval reaches down by what a calibrated network has.
    """
    found: dict[str, np.ndarray] = dict(_reduced(data))
    if "size_nll" not in data:
        return found
    whole = {name: data[name] for name in data if name in ("done", "block_samples") or name.startswith("baseline_")}
    each = []
    for k in range(data["size_nll"].shape[2]):
        of_size = {name: data[f"size_{name}"][:, :, k] for name in (*METRICS, CHANCE)}
        each.append(_reduced({**whole, **of_size, **{f"{n}_block": data[f"size_{n}_block"][:, :, k] for n in METRICS}}))
    means = [name for name, one in with_errors(summaries(baseline=True)).items() if name in found and not one.dims]
    return {**found, **{f"size_{name}": np.array([one[name] for one in each]) for name in means}}


def _reduced(data: Mapping[str, np.ndarray]) -> Values:
    done = data["done"] == 1
    found: dict[str, np.ndarray] = {}
    types, severities = done.shape
    for name, (_, _, relative) in METRICS.items():
        rows, columns = np.zeros((types, *done.shape)), np.zeros((severities, *done.shape))
        rows[np.arange(types), np.arange(types)] = 1 / severities
        columns[np.arange(severities), :, np.arange(severities)] = 1 / types
        weights = {
            f"type_{name}": rows,
            f"severity_{name}": columns,
            f"mean_{name}": np.full((1, *done.shape), 1 / done.size),
        }
        whole: dict[str, np.ndarray] = {}  # sums of weights, where errors stand for accuracies
        with np.errstate(invalid="ignore", divide="ignore"):
            if f"baseline_{name}" in data:
                baseline = data[f"baseline_{name}"]
                share = 1 / (1 - baseline if name == "accuracy" else baseline).sum(axis=1)
                of = rows * severities * share[:, None, None]
                weights |= {f"relative_{name}": of, relative: of.mean(axis=0, keepdims=True)}
                if name == "accuracy":
                    whole = {f"relative_{name}": of.sum(axis=(1, 2)), relative: of.sum(axis=(1, 2)).mean()}
            for key, of in weights.items():
                value, error, *ends = map(_scalar, _weighted(data, name, of))
                found |= {key: whole[key] - value if key in whole else value, f"{key}_se": error}
                found |= zip((f"{key}_low", f"{key}_high"), ends, strict=False)
    return found


def paired_difference(data: xr.Dataset, other: xr.Dataset) -> dict[str, tuple[float, calibration.Interval]]:
    """Mean scores over corruptions and severities of a result minus those of another one on the same images.

    Intervals are those of Student's t over blocks of samples, which both have in common. The error of the ECE is that
    of its calibration gaps, whose signs per bin are taken as given; each end goes further by what one of the two may be
    too large by chance.
    """
    found = {}
    for name in METRICS:
        value = float(data[f"mean_{name}"]) - float(other[f"mean_{name}"])
        sums, others = (one[f"{name}_block"].values.mean(axis=(0, 1)) for one in (data, other))
        counts = data["block_samples"].values
        error = float(_error_over_blocks((sums - others)[None] / counts, counts)[0])
        low, high = intervals.interval(value, error, len(counts))
        if name == "ece":  # of a result without what chance adds, the interval is not known
            mine, theirs = (float(one[CHANCE].mean()) if CHANCE in one else np.nan for one in (data, other))
            low, high = low - mine, high + theirs
        found[name] = value, calibration.Interval(error, float(low), float(high))
    return found


def _weighted(data: Mapping[str, np.ndarray], name: str, weights: np.ndarray) -> tuple[np.ndarray, ...]:
    """Sums of scores over cells with weights (k, corruption, severity), their errors, the ends of ECEs, (k,) each."""
    value, n = _over_cells(data, name, weights), len(data.get("block_samples", ()))
    if not n or f"{name}_block" not in data:
        return value, *[np.full(len(value), np.nan)] * (3 if name == "ece" else 1)
    counts, sums = data["block_samples"], data[f"{name}_block"]
    with np.errstate(invalid="ignore", divide="ignore"):
        parts = np.where((weights != 0)[..., None], weights[..., None] * sums, 0.0).sum(axis=(1, 2)) / counts
    error = _error_over_blocks(parts, counts)
    if name != "ece":
        return value, error
    half = intervals.quantile(n) * error
    return value, error, np.maximum(value - _over_cells(data, CHANCE, weights) - half, 0.0), value + half


def _over_cells(data: Mapping[str, np.ndarray], name: str, weights: np.ndarray) -> np.ndarray:
    known = np.where(data["done"] == 1, data[name], np.nan)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(weights != 0, weights * known, 0.0).sum(axis=(1, 2)))


def _error_over_blocks(parts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Standard errors of means over samples, from the means (k, block) of blocks of `counts` samples, (k,)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        total = counts.sum()
        mean = (parts * counts).sum(axis=1, keepdims=True) / total
        spread = (counts * (parts - mean) ** 2).sum(axis=1) / (len(counts) - 1)
        return np.asarray(np.sqrt(spread / total))


def _scalar(values: np.ndarray) -> np.ndarray:
    return values[0] if values.shape == (1,) else values
