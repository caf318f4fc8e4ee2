"""Lesion study: what breaks when one unit is removed (Park & Kim 2022, Fig. 10; Veit et al. 2016)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch

from landscape import batchnorm
from landscape.layers import labels, layers_of
from landscape.lesions import Removal, removals, removed
from landscape.probe import Plan, Quantity, Unit, Values, regular_expression
from landscape.probes.surface import recalibration
from landscape.subject import Subject, per_sample


@dataclass(frozen=True)
class Lesion:
    """Accuracy drop and loss increase when one unit is removed from the trained network, without retraining.

    Positive = worse. Errors are those of the paired differences per sample. One pass over the samples per unit and one
    for the intact network.
    """

    name: ClassVar[str] = "lesion"
    uses: ClassVar[tuple[str, ...]] = ()
    split: ClassVar[str] = "test"
    batch_size: ClassVar[int] = 128
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"park2022": {}}

    layers: Annotated[tuple[str, ...], "regular expression: only units whose name or layer it finds"] = ()
    bn: Annotated[str, "batch-norm statistics: frozen, or recalibrate:K on K mini-batches after each removal"] = (
        "frozen"
    )

    def __post_init__(self) -> None:
        recalibration(self.bn)
        for pattern in self.layers:
            regular_expression("layers", pattern)

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters, and what refreshed statistics depend on."""
        return {**asdict(self), **batchnorm.dependence(subject, recalibration(self.bn))}

    def plan(self, subject: Subject) -> Plan:
        found = self._removals(subject)
        loss, right = subject.intact
        rules = np.array([removal.rule for removal in found])
        about = labels([removal.layer for removal in found], "unit")
        about["name"] = (about["name"][0], np.array([removal.name for removal in found]))
        return Plan(
            over={"unit": np.arange(len(found))},
            labels={**about, "rule": (Quantity("what was done", dims=("unit",)), rules)},
            quantities={
                "accuracy_drop": Quantity("accuracy before - after"),
                "accuracy_drop_se": Quantity("its standard error over samples"),
                "loss_increase": Quantity("loss after - before", "nats"),
                "loss_increase_se": Quantity("its standard error over samples", "nats"),
            },
            about={"unit": Quantity("removed unit")},
            facts={"intact_loss": loss.mean().item(), "intact_accuracy": right.mean().item()},
        )

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (i,) = unit.index
        loss_before, right_before = subject.intact
        kept = batchnorm.statistics(subject.model)
        count = recalibration(self.bn)
        try:
            with removed(subject.model, self._removals(subject)[i]):
                if count:
                    batchnorm.refresh(subject, count)
                loss, right = per_sample(subject)
        finally:
            batchnorm.restore(subject.model, kept)
        accuracy_drop, accuracy_drop_se = paired(right_before, right)
        loss_increase, loss_increase_se = paired(loss, loss_before)
        return {
            "accuracy_drop": accuracy_drop,
            "accuracy_drop_se": accuracy_drop_se,
            "loss_increase": loss_increase,
            "loss_increase_se": loss_increase_se,
        }

    def _removals(self, subject: Subject) -> list[Removal]:
        found = subject.once("removals", lambda: removals(subject.model, layers_of(subject)))
        chosen = [r for r in found if not self.layers or _named(r, self.layers)]
        if not chosen:
            names = ", ".join(removal.name for removal in found[:5])
            raise ValueError(f"--layers {' '.join(self.layers)} matches no unit; there are {names}, ...")
        return chosen


def paired(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Mean of the differences per sample and its standard error."""
    difference = one - other
    n = len(difference)
    error = (difference.std(correction=1) / n**0.5).item() if n > 1 else float("nan")
    return difference.mean().item(), error


def _named(removal: Removal, patterns: tuple[str, ...]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in (removal.name, removal.layer.name))
