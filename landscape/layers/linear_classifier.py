"""Fit a linear classifier: ridge regression in closed form, with the penalty that is best on held-out samples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PENALTIES = tuple(10.0 ** (k / 2) for k in range(-12, 7))  # 1e-6 to 1e3, of features with unit variance


@dataclass(frozen=True)
class Linear:
    """scores = (x - mean) / scale @ weight + bias; the class is that with the largest score."""

    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor

    def scores(self, features: Tensor) -> Tensor:
        """(n, features) to (n, classes)."""
        return (features - self.mean) / self.scale @ self.weight + self.bias


def ridge(features: Tensor, targets: Tensor, penalties: tuple[float, ...]) -> list[Linear]:
    """Minimisers of mean |scores - targets|^2 + penalty |weight|^2, one per penalty, by one eigendecomposition.

    Features, (n, features) float64, are standardised, constant ones set to zero; targets are (n, classes) float64. The
    bias has no penalty.
    """
    n = len(features)
    standard, mean, scale = standardised(features)
    bias = targets.mean(dim=0)
    values, vectors = torch.linalg.eigh(standard.T @ standard / n)
    projected = vectors.T @ (standard.T @ (targets - bias)) / n  # (features, classes)
    values = values.clamp_min(0.0)
    return [Linear(mean, scale, vectors @ (projected / (values + penalty)[:, None]), bias) for penalty in penalties]


def standardised(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features with mean 0 and variance 1 (constant ones 0), their mean, and their scale (1 for constant ones)."""
    mean, scale = features.mean(dim=0), features.std(dim=0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    return (features - mean) / scale, mean, scale


def fit_with_best_penalty(
    features: Tensor,
    targets: Tensor,
    held_out: Tensor,
    *,
    fit: Callable[[Tensor, Tensor, tuple[float, ...]], list[Linear]] = ridge,
    penalties: tuple[float, ...] = PENALTIES,
) -> tuple[Linear, float, float]:
    """Fit to all samples, with the penalty that has the best held-out accuracy when fitted to the other samples.

    Of equally good penalties, the largest is used. Targets are one-hot or class probabilities; `held_out` is (n,) bool.

    Returns:
        the classifier, its penalty, and the held-out accuracy of that penalty.
    """
    right = targets[held_out].argmax(dim=1)
    candidates = fit(features[~held_out], targets[~held_out], penalties)
    hits = (candidate.scores(features[held_out]).argmax(dim=1) == right for candidate in candidates)
    accuracies = [hit.double().mean().item() for hit in hits]
    best = max(range(len(penalties)), key=lambda i: (accuracies[i], penalties[i]))
    (fitted,) = fit(features, targets, (penalties[best],))
    return fitted, penalties[best], accuracies[best]
