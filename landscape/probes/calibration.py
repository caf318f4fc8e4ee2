"""Measure the calibration of a classifier's probabilities, before and after temperature scaling (Guo et al. 2017)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
from torch import Tensor

from landscape.headline import HIGHER, LOWER, Headline
from landscape.options import require
from landscape.predictions.scores import (
    PART,
    class_targets,
    labelled,
    logits_and_targets,
    padded,
    refuse_other_than_classifier,
    sample_scores,
)
from landscape.predictions.temperature import Temperature, TemperatureFit, in_fit
from landscape.probe import Plan, Probe, Quantity, Unit, Values
from landscape.statistics import calibration as statistics
from landscape.statistics.calibration import METRIC_NAMES
from landscape.statistics.intervals import interval
from landscape.subject.subject import Subject, more_samples
from landscape.subject.weights_cache import once_per_weights

KEPT = 1 << 22  # logits that are kept in memory for a second look; of more, the network is run a second time
SCALED = ("nll", "brier", "confidence", "binned")  # the others do not depend on the temperature
DIFFERENCES = ("nll", "brier", "ece")  # by temperature scaling


@dataclass(frozen=True)
class Calibration(Probe):
    """NLL, accuracy, top-5, Brier score, calibration error and the statistics at 0.9, each with a bootstrap interval.

    ECE over the bins (0, 0.1] to (0.9, 1] of the confidence, signed as confidence - accuracy. The temperature minimises
    the NLL of a random half of the samples; `held_*` and `scaled_*` are measured on the other half before and after,
    `scaling_*` is their paired difference. Scores of every sample are stored, so that checkpoints measured on the same
    samples are compared sample by sample. Several labels per sample (`--loss bce`) are two classes each, and a mask has
    a class per pixel: every sample weighs the same, and intervals are over samples.
    """

    name: ClassVar[str] = "calibration"
    smallest: ClassVar[Mapping[str, Any]] = {"draws": 20}
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("nll", "nll", reading=LOWER),
        Headline("accuracy", "accuracy", reading=HIGHER,
                 column=1, title="accuracy", definition="share of right classes"),
        Headline("ece", "ece", reading=LOWER, column=6, title="ECE", definition="expected calibration error"),
        Headline("signed ece", "ece_signed"),
        Headline("temperature", "temperature"),
    )  # fmt: skip

    draws: Annotated[int, "bootstrap resamples behind the intervals"] = 1000
    seed: Annotated[int, "seed of the half that the temperature is fitted on, and of the bootstrap"] = 0

    def __post_init__(self) -> None:
        require(2 <= self.draws <= statistics.MOST_DRAWS, "draws", self.draws, f"2 to {statistics.MOST_DRAWS:,}")

    def plan(self, subject: Subject) -> Plan:
        refuse_other_than_classifier(subject, "calibration")
        if len(subject) < 2:
            raise ValueError(
                f"calibration fits a temperature on half of the samples, got 1 sample; {more_samples(subject)}"
            )
        several = labelled(class_targets(subject, 0)) is not None
        rows = max(map(subject.samples, range(len(subject.batches))))
        return Plan(
            over={"batch": np.arange(len(subject.batches))},
            axes={
                "row": np.arange(rows), "bin": (np.arange(statistics.BINS) + 0.5) / statistics.BINS,
                **({"part": np.arange(statistics.BINNED)} if several else {}),
            },
            quantities={
                **_of_samples(several),
                "fitted_temperature": Quantity(
                    "temperature fitted on the other half, the same in every unit", error="samples"
                ),
            },
            summaries={
                **_with_ends("", ", all samples"),
                **{f"held_{name}": _metric(name, ", half without the fit") for name in METRIC_NAMES},
                **_with_ends("scaled_", ", same half after temperature scaling"),
                **{
                    f"scaling_{name}": Quantity(f"{METRIC_NAMES[name]}, change by temperature scaling", ends=True)
                    for name in DIFFERENCES
                },
                "temperature": Quantity("temperature", error="samples", ends=True),
                **{
                    f"{prefix}bin_{name}": Quantity(f"{name} in the bin{where}", dims=("bin",))
                    for prefix, where in {"": "", "scaled_": ", half without the fit, scaled"}.items()
                    for name in ("count", "confidence", "accuracy")
                },
            },
            about={
                "row": Quantity("sample in the mini-batch"),
                "bin": Quantity("centre of the bin of confidence"),
                **({"part": PART} if several else {}),
            },
            facts={"data_sha256": subject.data.sha256},
        )  # fmt: skip

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Mini-batches share the temperature, which is fitted in one pass over all of them."""
        temperature, known = _fit(subject, self.seed)
        rows = max(map(subject.samples, range(len(subject.batches))))
        for unit in units:
            (i,) = unit.index
            logits, targets = known[i] if known else logits_and_targets(subject, i)
            scores = vars(sample_scores(logits, targets))
            scaled = vars(sample_scores(logits / temperature.value, targets))
            values = {f"sample_{name}": value for name, value in scores.items()}
            for name in SCALED:
                if name in scaled:
                    values[f"sample_scaled_{name}"] = scaled[name]
                    scaled[name][in_fit(subject, self.seed, i)] = np.nan
            yield {
                **{name: padded(value, rows) for name, value in values.items()},
                "fitted_temperature": temperature.value,
                "fitted_temperature_se": temperature.error,
            }

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Metrics of all finished samples, and of the half that the temperature was not fitted on."""
        every = statistics.stored_scores(data)
        held, scaled = (statistics.stored_scores(data, held_out=True, scaled=scaled) for scaled in (False, True))
        found: dict[str, Any] = {}
        for prefix, scores in (("", every), ("scaled_", scaled)):
            intervals = statistics.bootstrap(scores, draws=self.draws, seed=self.seed)
            for name, value in statistics.summary(scores).items():
                interval = intervals[name]
                found |= {f"{prefix}{name}": value, f"{prefix}{name}_se": interval.error}
                found[f"{prefix}{name}_se.n"] = len(scores)
                found |= {f"{prefix}{name}_low": interval.low, f"{prefix}{name}_high": interval.high}
            diagram = statistics.bins(statistics.sums(scores).sum(axis=0))
            found |= {f"{prefix}bin_{name}": values for name, values in diagram.items()}
        found |= {f"held_{name}": value for name, value in statistics.summary(held).items()}
        differences = statistics.paired_difference(scaled, held, draws=self.draws, seed=self.seed)
        for name in DIFFERENCES:
            value, interval = differences[name]
            found |= {f"scaling_{name}": value, f"scaling_{name}_low": interval.low}
            found[f"scaling_{name}_high"] = interval.high
        fitted = dict.fromkeys(("fitted_temperature_se.n", "temperature_se.n"), len(every) - len(held))
        return {**found, **_temperature(data), **fitted}


def _of_samples(several: bool) -> dict[str, Quantity]:
    """Scores of every sample, and of the half without the fit after scaling; `several`: of its labels or pixels."""
    per_row = ("row",)
    scores = {
        "nll": Quantity("negative log likelihood of the sample", "nats", per_row),
        "correct": Quantity("1 where the most probable class is the true one", dims=per_row),
        "top5": Quantity("1 where the true class is among the five most probable", dims=per_row),
        "brier": Quantity("sum over classes of (p - y)^2 of the sample", dims=per_row),
        "confidence": Quantity("largest probability of the sample", dims=per_row),
    }
    if several:
        scores["binned"] = Quantity("shares of its labels or pixels by bin of confidence", dims=("row", "part"))
    scaled = {
        f"sample_scaled_{name}": replace(
            quantity, long_name=f"{quantity.long_name}, scaled; NaN in the half of the fit"
        )
        for name, quantity in scores.items()
        if name in SCALED
    }
    return {**{f"sample_{name}": quantity for name, quantity in scores.items()}, **scaled}


def _metric(name: str, where: str) -> Quantity:
    return Quantity(f"{METRIC_NAMES[name]}{where}", "nats" if name == "nll" else "1")


def _with_ends(prefix: str, where: str) -> dict[str, Quantity]:
    """Every metric with its standard error and interval."""
    return {f"{prefix}{name}": replace(_metric(name, where), error="samples", ends=True) for name in METRIC_NAMES}


def _temperature(data: Mapping[str, np.ndarray]) -> dict[str, float]:
    value, error = (data[name][data["done"] == 1] for name in ("fitted_temperature", "fitted_temperature_se"))
    if not value.size:
        return {}
    fitted = np.isfinite(data["sample_scaled_confidence"]).sum()  # the other half is as large, to one sample
    low, high = interval(value[0], error[0], fitted)
    return {
        "temperature": value[0], "temperature_se": error[0], "temperature_low": max(low, 0.0), "temperature_high": high
    }  # fmt: skip


@once_per_weights
def _fit(subject: Subject, seed: int) -> tuple[Temperature, list[tuple[Tensor, Tensor]]]:
    """The temperature of one half of the samples, in one pass over the data.

    With the logits and targets of every mini-batch; without any where there are too many.
    """
    fit, kept = TemperatureFit(), []
    keeps = True
    for i in range(len(subject.batches)):
        logits, targets = logits_and_targets(subject, i)
        half = np.flatnonzero(in_fit(subject, seed, i)).tolist()
        if half:
            fit.add(logits[half], targets[half])
        keeps = keeps and logits[0].numel() * len(subject) <= KEPT
        if keeps:
            kept.append((logits, targets))
    return fit.fitted(), kept if keeps else []
