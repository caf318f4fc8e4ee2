"""Measure the accuracy of a linear classifier on the frozen features of every layer (Alain & Bengio 2017)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from landscape.headline import HIGHER, Headline
from landscape.layers import layer_patterns, linear_classifier, selection
from landscape.layers.linear_classifier import fit_with_best_penalty
from landscape.layers.pooled_features import (
    HELD_OUT,
    LEAST_SAMPLES,
    has_head,
    held_out,
    pooled_features,
    training_samples,
)
from landscape.options import OptionError, at_least, one_of, parse_count
from landscape.probe import Plan, Probe, Quantity, Unit, Values, make_texts
from landscape.statistics.means import MEMBER_ERROR
from landscape.subject.sample_statistics import intact_per_sample, mean_and_standard_error
from landscape.subject.subject import Subject

NAMES = {"ridge": "ridge", "lbfgs": "logistic regression's"}


@dataclass(frozen=True)
class ProbeLinear(Probe):
    """Accuracy on the test split of a linear classifier fitted to each layer's features of the train split.

    The classifier is ridge regression in closed form, or logistic regression (`lbfgs`). The features are averages over
    positions (`mean`), or the class token (`cls`). The penalty is selected on a held-out fifth of the training samples,
    never on those that are scored. Where both splits are one set of samples, the classifier is fitted to samples that
    are not scored. One forward pass over the samples of each split for all layers.
    """

    name: ClassVar[str] = "probe-linear"
    logits: ClassVar[bool] = False
    smallest: ClassVar[Mapping[str, Any]] = {"train_samples": 64}
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("shallowest", "accuracy", {"layer": "first"}),
        Headline("deepest", "accuracy", {"layer": "last"}, column=15, title="linear probe",
                 definition="accuracy of a linear classifier on the last layer"),
        Headline("best", "accuracy", {"layer": "largest"}, HIGHER, "at {name}"),
    )  # fmt: skip

    layers: layer_patterns.LayerPatterns = ()
    pool: Annotated[Literal["mean", "cls"], "features of a map: mean over positions, or the class token"] = "mean"
    train_samples: Annotated[str, "samples of the train split to fit on: a number, or all"] = "8192"
    solver: Annotated[
        Literal["ridge", "lbfgs"], "ridge regression in closed form, or logistic regression by L-BFGS"
    ] = "ridge"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", layer_patterns.expand(self.layers))
        one_of("pool", self.pool, ("mean", "cls"))
        one_of("solver", self.solver, ("ridge", "lbfgs"))
        make_texts(self, "train_samples")
        at_least("train_samples", parse_count("train_samples", self.train_samples, 10**9), LEAST_SAMPLES)

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The digest of the training samples for their number."""
        images = training_samples(subject, self.train_samples).images
        assert images is not None
        return {"train_samples": images.sha256}

    def plan(self, subject: Subject) -> Plan:
        if subject.spec is not None and subject.spec.split == "train":
            raise OptionError(
                "--split train would score the training samples; drop it: probe-linear scores the test split"
            )
        layers, train = selection.layers_of(subject, self.layers), training_samples(subject, self.train_samples)
        if self.pool == "cls":
            selection.require_class_token(layers)
        own = None if subject.members else pooled_features(subject, self.layers, self.pool, None)
        right = intact_per_sample(subject)[1] if own is None else own[2]
        convergence = {
            "gradient": Quantity("largest component of the objective's gradient at the fit", "nats"),
            "converged": Quantity(f"1 where that is at most {linear_classifier.TOLERANCE}"),
        }
        return Plan(
            over={"layer": np.arange(len(layers))},
            labels=selection.layer_labels(layers, "layer"),
            quantities={
                "accuracy": Quantity("accuracy of a linear probe", bounds="share", error="samples"),
                "held_out_accuracy": Quantity("accuracy on the samples that chose the penalty"),
                "fitted_accuracy": Quantity("accuracy on the samples that it was fitted on"),
                "penalty": Quantity(f"{NAMES[self.solver]} penalty, of features with unit variance"),
                "features": Quantity("number of features"),
                **(convergence if self.solver == "lbfgs" else {}),
                **({"accuracy_member_se": Quantity(MEMBER_ERROR, over="members")} if subject.members else {}),
            },
            facts={
                **({"members": subject.members} if subject.members else {}),
                "intact_accuracy": right.mean().item() if has_head(subject) else np.nan,
                "fitted_on": f"{len(train)} samples, {round(HELD_OUT * 100)} % of them held out to choose the penalty",
            },
        )

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (i,) = unit.index
        fits = [self._fitted(subject, i, member) for member in range(subject.members) or (None,)]
        hits = torch.stack([own for _, own in fits])  # (member, N)
        accuracy, error = mean_and_standard_error(hits.mean(dim=0))
        means = {name: float(np.mean([values[name] for values, _ in fits])) for name in fits[0][0]}
        of_members = {"accuracy_member_se": mean_and_standard_error(hits.mean(dim=1))[1]} if subject.members else {}
        return {"accuracy": accuracy, "accuracy_se": error, **means, **of_members}

    def _fitted(self, subject: Subject, i: int, member: int | None) -> tuple[dict[str, float], Tensor]:
        """What is stored of a classifier on the features of layer i, and which samples it gets right, (N,)."""
        train = training_samples(subject, self.train_samples)
        features, targets, _ = pooled_features(train, self.layers, self.pool, member, subject)
        others, wanted, _ = pooled_features(subject, self.layers, self.pool, member)
        classes = max(targets.shape[1], wanted.shape[1])
        targets, wanted = (F.pad(shares, (0, classes - shares.shape[1])) for shares in (targets, wanted))
        x = features[i].double()
        classifier, penalty, held_out_accuracy = fit_with_best_penalty(x, targets, held_out(len(x)), self.solver)
        convergence: dict[str, float] = {}
        if self.solver == "lbfgs":
            gradient = linear_classifier.gradient(classifier, x, targets, penalty)
            convergence = {"gradient": gradient, "converged": float(gradient <= linear_classifier.TOLERANCE)}
        hits, fitted = (
            (classifier.scores(x.double()).argmax(dim=1) == y.argmax(dim=1)).double()
            for x, y in ((others[i], wanted), (features[i], targets))
        )
        values = {
            "held_out_accuracy": held_out_accuracy, "fitted_accuracy": fitted.mean().item(), "penalty": penalty,
            "features": features[i].shape[1], **convergence,
        }  # fmt: skip
        return values, hits
