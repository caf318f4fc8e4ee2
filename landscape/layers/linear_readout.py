"""Read classes off a network's last layer by a linear classifier, in place of the network's own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from landscape.data.structure import Forward, Nested
from landscape.discovery.layer import Layer
from landscape.layers import forward_hooks, linear_classifier, selection
from landscape.layers.pooled_features import held_out, pooled, pooled_features, training_samples
from landscape.options import OptionError
from landscape.subject import losses, weights_cache
from landscape.subject.subject import Subject


@dataclass(frozen=True, eq=False)
class LinearReadout:
    """A forward pass whose outputs are the scores of a linear classifier of one layer's features."""

    base: Forward
    layer: Layer
    pool: str  # see `pooled_features.pooled`
    classifier: linear_classifier.Linear

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
    fit: dict[str, Any] = {"fit": linear_classifier.logistic, "penalties": linear_classifier.LOGISTIC_PENALTIES}
    classifier, penalty, _ = linear_classifier.fit_with_best_penalty(x, targets, held_out(len(x)), **fit)
    converted = [
        part.to(subject.device, subject.dtype)
        for part in (classifier.mean, classifier.scale, classifier.weight, classifier.bias)
    ]
    forward = LinearReadout(subject.forward, layer, pool, linear_classifier.Linear(*converted))
    gradient = linear_classifier.gradient(classifier, x, targets, penalty)
    words = f"linear classifier of {layer.name} ({pool}), fitted to {len(train)} training samples"
    return Readout(replace(subject, forward=forward), words, penalty, gradient)
