"""Preconditioned sharpness of a subject against the stability threshold of its optimiser: what is stored of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from landscape.curvature.preconditioner import Preconditioner, preconditioner
from landscape.probe import Quantity
from landscape.results.statistics import mean_and_standard_error
from landscape.subject.optimizer_options import OptimizerOptions
from landscape.subject.optimizers import restored_optimizer
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

UNITS = "1 / learning rate"


@once_per_weights
def optimizer_of(subject: Subject, options: OptimizerOptions) -> tuple[Preconditioner, str]:
    """The preconditioner of a subject's optimiser at the state beside its weights, and that optimiser in words.

    Raises:
        ValueError: as `restored_optimizer` and `preconditioner`; the subject has weight decay of its own.
    """
    if subject.weight_decay:
        raise ValueError(
            f"--weight-decay {subject.weight_decay:g} is not used with --operator preconditioned, which takes that of "
            "the optimiser; leave it out, and --preset, which sets it"
        )
    restored = restored_optimizer(subject, options)
    return preconditioner(restored.optimizer, restored.copies), restored.words


def stability_quantities() -> dict[str, Quantity]:
    """What is stored of every matrix beside its eigenvalues."""
    return {
        "threshold": Quantity("largest eigenvalue at which the optimiser is stable on a quadratic", UNITS),
        "ratio": Quantity("largest eigenvalue / threshold: above 1 the optimiser is unstable on a quadratic"),
        "ratio_error": Quantity("estimated error of the ratio, from that of the eigenvalue"),
    }


def stability_values(values: Mapping[str, Any], threshold: float) -> dict[str, float]:
    """Those values of one matrix, from those of its spectrum; the ratio is NaN where that is not finite."""
    eigenvalues = values["eigenvalue"]
    found = {"threshold": threshold, "ratio": np.nan, "ratio_error": np.nan}
    if np.isfinite(eigenvalues).any():
        at = int(np.nanargmax(eigenvalues))
        found |= {"ratio": eigenvalues[at] / threshold, "ratio_error": values["error"][at] / threshold}
    return found


def stability_summary_quantities(dims: tuple[str, ...]) -> dict[str, Quantity]:
    """The quantities of `stability_summaries`."""
    return {
        "sharpness": Quantity("preconditioned sharpness: the largest eigenvalue, mean over mini-batches", UNITS, dims),
        "sharpness_se": Quantity("its standard error over mini-batches", UNITS, dims),
        "stability": Quantity("preconditioned sharpness / threshold", dims=dims),
        "stability_se": Quantity("its standard error over mini-batches", dims=dims),
    }


def stability_summaries(data: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Mean of the largest eigenvalue over finished mini-batches, also as a share of the threshold; of each layer."""
    ratio = np.where(data["done"] == 1, data["ratio"], np.nan)
    thresholds = data["threshold"][np.isfinite(data["threshold"])]
    threshold = thresholds[0] if thresholds.size else np.nan
    rows = [_mean(column) for column in ratio.reshape(len(ratio), -1).T]
    mean, error = (np.reshape(part, ratio.shape[1:]) for part in zip(*rows, strict=True))
    return {
        "sharpness": mean * threshold, "sharpness_se": error * threshold, "stability": mean, "stability_se": error
    }  # fmt: skip


def _mean(values: np.ndarray) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    return mean_and_standard_error(known) if known.size else (np.nan, np.nan)
