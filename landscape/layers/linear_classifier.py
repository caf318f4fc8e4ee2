"""Fit a linear classifier with the penalty that is best on held-out samples, and read a network's classes off it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.data.structure import Forward, Nested
from landscape.discovery.layer import Layer
from landscape.layers import forward_hooks, selection
from landscape.layers.pooled_features import held_out, pooled, pooled_features, training_samples
from landscape.options import OptionError
from landscape.subject import losses, weights_cache
from landscape.subject.subject import Subject

PENALTIES = tuple(10.0 ** (k / 2) for k in range(-12, 7))  # 1e-6 to 1e3, of features with unit variance
LOGISTIC_PENALTIES = tuple(10.0**k for k in range(-6, 2))
Solver = Literal["ridge", "lbfgs"]  # `ridge`, `logistic`
TOLERANCE = 1e-6  # of the largest component of the gradient; scikit-learn's is 1e-4
ITERATIONS = 1000
HISTORY = 20


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
    features: Tensor, targets: Tensor, held_out: Tensor, solver: Solver = "ridge"
) -> tuple[Linear, float, float]:
    """Fit to all samples, with the penalty that has the best held-out accuracy when fitted to the other samples.

    Of equally good penalties, the largest is used. Targets are one-hot or class probabilities; `held_out` is (n,) bool.

    Returns:
        the classifier, its penalty, and the held-out accuracy of that penalty.
    """
    fit, penalties = (ridge, PENALTIES) if solver == "ridge" else (logistic, LOGISTIC_PENALTIES)
    right = targets[held_out].argmax(dim=1)
    candidates = fit(features[~held_out], targets[~held_out], penalties)
    hits = (candidate.scores(features[held_out]).argmax(dim=1) == right for candidate in candidates)
    accuracies = [hit.double().mean().item() for hit in hits]
    best = max(range(len(penalties)), key=lambda i: (accuracies[i], penalties[i]))
    (fitted,) = fit(features, targets, (penalties[best],))
    return fitted, penalties[best], accuracies[best]


def logistic(features: Tensor, targets: Tensor, penalties: tuple[float, ...]) -> list[Linear]:
    """Minimisers of mean cross-entropy + penalty |weight|^2 / 2, one per penalty, each started from the next larger's.

    By L-BFGS (Liu & Nocedal 1989). Arguments as for `ridge`; unlike scikit-learn's, the targets may be class
    probabilities, and classes may be missing among them.
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


@dataclass(frozen=True, eq=False)
class LinearReadout:
    """A forward pass whose outputs are the scores of a linear classifier of one layer's features."""

    base: Forward
    layer: Layer
    pool: str  # see `pooled_features.pooled`
    classifier: Linear

    def __call__(self, model: Callable[..., Any], inputs: Nested) -> Tensor:
        """Logits, (N, classes)."""
        assert isinstance(model, nn.Module)
        features: list[Tensor] = []

        def receive(_: int, tensor: Tensor) -> None:
            features.append(pooled(self.layer, tensor, self.pool))

        with forward_hooks.feature_hooks(model, [self.layer], receive):
            self.base(model, inputs)
        return self.classifier.scores(features[-1])


@dataclass(frozen=True, eq=False)
class Readout:
    """A subject whose logits are those of a linear classifier, and how that was made."""

    subject: Subject
    in_words: str
    penalty: float  # of features with unit variance
    gradient: float  # largest component of the objective's gradient at the fit, in nats


@weights_cache.once_per_weights
def with_linear_classifier(subject: Subject, pool: str, samples: str) -> Readout:
    """Fit multinomial logistic regression to the last layer's features of clean samples of the train split.

    As `probe-linear --solver lbfgs` fits it: features with unit variance, the penalty that is best on a held-out fifth.
    None of the samples that are measured is fitted. The classifier stays as it is whatever the inputs.

    Args:
        subject: a network, or an encoder without a classifier.
        pool: "mean" over positions, or "cls".
        samples: of the train split: a number, or "all".

    Raises:
        OptionError: the subject has members, or measures the train split.
        ValueError: its data have no classes, or its loss is not that of classes.
    """
    if subject.members:
        raise OptionError("--classifier linear reads one network; drop --mc-dropout")
    if subject.spec is not None and subject.spec.split == "train":
        raise OptionError("--classifier linear is fitted to the train split; drop --split train")
    if subject.losses is not losses.cross_entropy or subject.dense:
        raise ValueError("--classifier linear predicts a class per image, by cross-entropy; drop --loss")
    layer = selection.layers_of(subject, ())[-1]
    if pool == "cls":
        selection.require_class_token([layer])
    train = training_samples(subject, samples)
    features, targets, _ = pooled_features(train, (), pool, None, subject)
    x = features[-1].double()
    classes = subject.images.classes if subject.images is not None else targets.shape[1]
    targets = F.pad(targets, (0, max(0, classes - targets.shape[1])))
    classifier, penalty, _ = fit_with_best_penalty(x, targets, held_out(len(x)), "lbfgs")
    converted = (part.to(subject.device, subject.dtype) for part in vars(classifier).values())
    forward = LinearReadout(subject.forward, layer, pool, Linear(*converted))
    words = f"linear classifier of {layer.name} ({pool}), fitted to {len(train)} training samples"
    return Readout(replace(subject, forward=forward), words, penalty, gradient(classifier, x, targets, penalty))
