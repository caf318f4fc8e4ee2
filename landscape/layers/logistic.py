"""Fit a linear classifier by multinomial logistic regression, with L-BFGS (Liu & Nocedal 1989).

Unlike scikit-learn's, the targets may be class probabilities, and classes may be missing among them.
"""

import torch
from torch import Tensor

from landscape.layers.linear_classifier import Linear, standardised

PENALTIES = tuple(10.0**k for k in range(-6, 2))  # of features with unit variance
TOLERANCE = 1e-6  # of the largest component of the gradient; scikit-learn's is 1e-4
ITERATIONS = 1000
HISTORY = 20


def logistic(features: Tensor, targets: Tensor, penalties: tuple[float, ...]) -> list[Linear]:
    """Minimisers of mean cross-entropy + penalty |weight|^2 / 2, one per penalty, each started from the next larger's.

    Arguments as for `ridge`: features are standardised, constant ones set to zero, and the bias has no penalty.
    """
    standard, mean, scale = standardised(features)
    weight = torch.zeros(features.shape[1], targets.shape[1], dtype=features.dtype, device=features.device)
    bias = torch.zeros_like(weight[0])
    classifiers: dict[float, Linear] = {}
    for penalty in sorted(set(penalties), reverse=True):
        weight, bias = _fitted(standard, targets, penalty, weight, bias)
        classifiers[penalty] = Linear(mean, scale, weight, bias)
    return [classifiers[penalty] for penalty in penalties]


def gradient(classifier: Linear, features: Tensor, targets: Tensor, penalty: float) -> float:
    """The largest absolute component of the objective's gradient at a classifier: 0 at the minimum."""
    residual = (classifier.scores(features).softmax(dim=1) - targets) / len(features)  # (n, classes)
    standard = (features - classifier.mean) / classifier.scale
    components = [(standard.T @ residual + penalty * classifier.weight).flatten(), residual.sum(dim=0)]
    return torch.cat(components).abs().max().item()


def _fitted(standard: Tensor, targets: Tensor, penalty: float, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias at the minimum, or after `ITERATIONS`."""
    with torch.inference_mode(False), torch.enable_grad():
        weight, bias = (start.clone().requires_grad_() for start in (weight, bias))
        optimizer = torch.optim.LBFGS(
            [weight, bias], max_iter=ITERATIONS, tolerance_grad=TOLERANCE, tolerance_change=0.0, history_size=HISTORY,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def objective() -> Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(standard @ weight + bias, targets)
            loss = loss + 0.5 * penalty * weight.square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(objective)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()
