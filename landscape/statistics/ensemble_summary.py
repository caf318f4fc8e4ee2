"""Summarise what is stored of an ensemble: spread over orders, entropies by size, diversity of its members."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from landscape.headline import HIGHER, LOWER, Headline
from landscape.statistics.means import mean_and_standard_error

HEADLINES = (
    *(
        Headline(f"{name} of {words}", name, {"size": size}, reading, silent=True, like=name if size else "")
        for name, reading in (("nll", LOWER), ("accuracy", HIGHER), ("ece", LOWER), ("temperature", ""))
        for words, size in (("one member", 0), ("all members", -1))
    ),
    Headline("disagreement", "mean_disagreement"),
    Headline("epistemic entropy", "epistemic_entropy", {"size": -1}),
)
LEAST_SAMPLES = 4  # of a mini-batch whose HSIC is defined


def spread(values: np.ndarray) -> np.ndarray:
    """Standard deviation over orders, (order, size) to (size,); NaN for a single order."""
    if len(values) < 2:
        return np.full(values.shape[1], np.nan)
    with np.errstate(invalid="ignore"):
        spread: np.ndarray = values.std(axis=0, ddof=1)
    return spread


def uncertainty(data: Mapping[str, np.ndarray], done: np.ndarray) -> dict[str, np.ndarray]:
    """Mean entropies per size with their standard errors."""
    predictive, aleatoric = (
        np.moveaxis(data[f"sample_{name}"][done], 1, 0).reshape(len(data["size"]), -1)
        for name in ("predictive", "aleatoric")
    )
    shown = ~np.isnan(predictive).all(axis=0)
    found = {}
    entropies = {"predictive": predictive, "aleatoric": aleatoric, "epistemic": predictive - aleatoric}
    for name, values in entropies.items():
        pairs = np.array([mean_and_standard_error(row) for row in values[:, shown]])
        found[f"{name}_entropy"], found[f"{name}_entropy_se"] = pairs.T
    return found


def diversity(data: Mapping[str, np.ndarray], done: np.ndarray) -> dict[str, Any]:
    """Disagreement, divergence and alignment of the members."""
    samples = data["samples"][done]
    found: dict[str, Any] = {"disagreement": data["differing"][done].sum(axis=0) / samples.sum()}
    aligned = data["hsic"][done][samples >= LEAST_SAMPLES].sum(axis=0)
    own = np.diag(aligned)
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = np.sqrt(np.abs(own[:, None] * own))
        found["cka"] = np.where((own[:, None] > 0) & (own > 0), aligned / scale, np.nan)
    pairs = ~np.eye(len(own), dtype=bool)
    found["mean_cka"] = found["cka"][pairs].mean()
    for name in ("disagreement", "divergence"):
        values = data[f"sample_{name}"][done]
        found[f"mean_{name}"], found[f"mean_{name}_se"] = mean_and_standard_error(values[~np.isnan(values)])
    return found
