"""Store the metrics of a classifier as a result, for `landscape reproduce`; `landscape evaluate` only prints them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from landscape.headline import HIGHER, LOWER, Headline
from landscape.predictions import evaluation
from landscape.probe import Plan, Probe, Quantity, Unit, Values
from landscape.subject.loading.checks import refuse_stochastic
from landscape.subject.subject import Subject

METRICS = {
    "loss": Quantity("cross-entropy", "nats", bounds="positive", error="samples"),
    "accuracy": Quantity("share of right classes", bounds="share", error="samples"),
    "top5": Quantity("share with the right class among the first five", bounds="share", error="samples"),
    "brier": Quantity("Brier score", error="samples"),
    "ece": Quantity("expected calibration error", error="samples"),
}


@dataclass(frozen=True)
class Evaluation(Probe):
    """The metrics of `evaluate` of all samples, measured as one unit. Not a command."""

    name: ClassVar[str] = "evaluate"
    uses: ClassVar[tuple[str, ...]] = ("batch_size", "seed")  # the random numbers of several passes depend on both
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("loss", "loss", {"passes": -1}, LOWER),
        Headline("accuracy", "accuracy", {"passes": -1}, HIGHER),
    )

    deterministic: ClassVar[bool] = False  # several passes of a stochastic network are averaged

    passes: int = 1

    def plan(self, subject: Subject) -> Plan:
        if self.passes == 1:
            refuse_stochastic(subject)
        return Plan(
            over={"passes": np.array([self.passes])},
            quantities={"samples": Quantity("samples"), **METRICS},
            about={"passes": Quantity("passes whose probabilities are averaged")},
        )

    def measure(self, subject: Subject, unit: Unit) -> Values:
        batches, forward = subject.each_batch(), subject.forward
        return evaluation.evaluate(subject.model, batches, passes=self.passes, seed=subject.seed, forward=forward)
