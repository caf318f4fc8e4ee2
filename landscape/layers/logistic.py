"""Linear classifiers by multinomial logistic regression, fitted by L-BFGS (Liu & Nocedal 1989)."""

from __future__ import annotations

import torch
from torch import Tensor

from landscape.layers.linear_classifier import Linear, standardised

PENALTIES = tuple(10.0**k for k in range(-6, 2))  # of features with unit variance
TOLERANCE = 1e-6  # of the largest component of the gradient; scikit-learn's is 1e-4
ITERATIONS = 1000
HISTORY = 20


def logistic(features: Tensor, targets: Tensor, penalties: tuple[float, ...]) -> list[Linear]:
    """Minimisers of mean cross-entropy + penalty |weight|^2 / 2, one per penalty, each started from a stronger one's.

    Features are standardised; a constant one is left at zero. The bias carries no penalty.

    Args:
        features: (n, features) float64.
        targets: (n, classes) float64, one-hot or shares.
        penalties: each positive.
    """
    standard, mean, scale = standardised(features)
    weight = torch.zeros(features.shape[1], targets.shape[1], dtype=features.dtype, device=features.device)
    bias = torch.zeros_like(weight[0])
    found: dict[float, Linear] = {}
    for penalty in sorted(set(penalties), reverse=True):
        weight, bias = _fitted(standard, targets, penalty, weight, bias)
        found[penalty] = Linear(mean, scale, weight, bias)
    return [found[penalty] for penalty in penalties]


def gradient(classifier: Linear, features: Tensor, targets: Tensor, penalty: float) -> float:
    """The largest component of the objective's gradient at a classifier: 0 at the minimum."""
    excess = (classifier.scores(features).softmax(dim=1) - targets) / len(features)  # (n, classes)
    standard = (features - classifier.mean) / classifier.scale
    largest = torch.cat([(standard.T @ excess + penalty * classifier.weight).flatten(), excess.sum(dim=0)]).abs().max()
    return largest.item()


def _fitted(standard: Tensor, targets: Tensor, penalty: float, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias at the minimum, or where `ITERATIONS` have led."""
    with torch.inference_mode(False), torch.enable_grad():
        weight, bias = (start.clone().requires_grad_() for start in (weight, bias))
        search = torch.optim.LBFGS(
            [weight, bias],
            max_iter=ITERATIONS,
            tolerance_grad=TOLERANCE,
            tolerance_change=0.0,
            history_size=HISTORY,
            line_search_fn="strong_wolfe",
        )

        def objective() -> Tensor:
            search.zero_grad()
            loss = torch.nn.functional.cross_entropy(standard @ weight + bias, targets)
            loss = loss + 0.5 * penalty * weight.square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        search.step(objective)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()
