"""Loss and accuracy between two checkpoints, above and below the straight line between those of the ends.

The barrier is the largest excess, max_t [L(t) - (1 - t) L(0) - t L(1)] (Frankle et al. 2020, arXiv 1912.05671). Its
standard error is that of the excess of every sample there, whose noise mostly cancels.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from landscape.probe import Quantity
from landscape.statistics.means import mean_and_standard_error
from landscape.subject import batchnorm
from landscape.subject.losses import Meaning
from landscape.subject.sample_statistics import per_sample
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights
from landscape.weight_space.aligned_networks import aligned_line, line_between
from landscape.weight_space.lines import ModelOnLine, StraightLine
from landscape.weight_space.weights_in_place import RunningStatistics

Samples: TypeAlias = tuple[np.ndarray, np.ndarray]  # loss and correctness of every sample
SUMMARIES = ("barrier", "barrier_se", "barrier_at", "accuracy_barrier", "accuracy_barrier_se")


def samples_of(subject: Subject) -> Samples:
    """The loss and the correctness of every sample at the present weights."""
    loss, right = per_sample(subject)
    return loss.numpy(), right.numpy()


def values_at(t: float, samples: Samples, ends: Mapping[float, Samples]) -> dict[str, float]:
    """What is stored at a point of a line: means with their errors and, between two ends, the excess with its own."""
    (loss, loss_se), (accuracy, accuracy_se) = (mean_and_standard_error(values) for values in samples)
    values = {"loss": loss, "loss_se": loss_se, "accuracy": accuracy, "accuracy_se": accuracy_se}
    if ends:
        signs = {"excess": 1.0, "accuracy_deficit": -1.0}
        for (name, sign), now, start, end in zip(signs.items(), samples, ends[0.0], ends[1.0], strict=True):
            with np.errstate(invalid="ignore"):
                difference = sign * (now - (1 - t) * start - t * end)
            values[name], values[f"{name}_se"] = mean_and_standard_error(difference)
    return values


def means(meaning: Meaning) -> dict[str, Quantity]:
    """Loss and accuracy at a point."""
    return {
        "loss": Quantity("loss", meaning.units, bounds=meaning.bounds),
        "loss_se": Quantity("standard error of the loss over samples", meaning.units, over="samples"),
        "accuracy": meaning.of_accuracy("accuracy", bounds="share"),
        "accuracy_se": meaning.of_accuracy("standard error of the accuracy over samples", over="samples"),
    }


def paired(meaning: Meaning) -> dict[str, Quantity]:
    """Loss above, and accuracy below, the straight line between those of the ends."""
    excess = "loss above the straight line between the ends' losses"
    deficit = "accuracy below the straight line between the ends' accuracies"
    return {
        "excess": Quantity(excess, meaning.units),
        "accuracy_deficit": meaning.of_accuracy(deficit),
        "excess_se": Quantity(f"standard error of the {excess}", meaning.units, over="samples"),
        "accuracy_deficit_se": meaning.of_accuracy(f"standard error of the {deficit}", over="samples"),
    }


def summaries(meaning: Meaning, per_line: tuple[str, ...]) -> dict[str, Quantity]:
    """The highest barriers of a line."""
    return {
        "barrier": Quantity("largest excess of the loss between the ends", meaning.units, per_line),
        "barrier_se": Quantity("standard error of the barrier over samples", meaning.units, per_line, over="samples"),
        "barrier_at": Quantity("where the barrier is", "share of the way", per_line),
        "accuracy_barrier": meaning.of_accuracy("largest deficit of the accuracy between the ends", per_line),
        "accuracy_barrier_se": meaning.of_accuracy(
            "standard error of the accuracy barrier over samples", per_line, over="samples"
        ),
    }


def highest(data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Largest excess and deficit of every line whose points from end to end are finished; NaN for the others.

    The position t is the last of the unit axes.
    """
    between = (data["t"] >= 0.0) & (data["t"] <= 1.0)
    t, shape = data["t"][between], data["done"].shape[:-1]
    found = {name: np.full(shape, np.nan) for name in SUMMARIES}
    complete = (data["done"][..., between] == 1).all(axis=-1) & ({0.0, 1.0} <= set(t))
    for k in map(tuple, np.argwhere(complete)):
        excess, deficit = data["excess"][k][between], data["accuracy_deficit"][k][between]
        top, low = int(np.argmax(excess)), int(np.argmax(deficit))
        values = [excess[top], data["excess_se"][k][between][top], t[top]]
        values += [deficit[low], data["accuracy_deficit_se"][k][between][low]]
        for name, value in zip(SUMMARIES, values, strict=True):
            found[name][k] = value
    return found


@dataclass(frozen=True)
class Curve:
    """One way from a checkpoint to another."""

    name: str
    aligned: bool
    statistics: RunningStatistics


def curves(subject: Subject, *, align: bool, repair: int) -> list[Curve]:
    """The curves of a network; with batch norm also with its statistics recomputed at every point, ends included.

    Interpolated statistics are not those of the interpolated network, whose activations shrink (Jordan et al. 2023,
    arXiv 2211.08403); recomputing them over `repair` mini-batches of the samples mends that.
    """
    count = min(repair, len(subject.batches)) if batchnorm.has_statistics(subject.model) else 0
    found = []
    for aligned in (False, True)[: 1 + align]:
        name = "aligned" if aligned else "as they are"
        found.append(Curve(name, aligned, RunningStatistics(interpolate=True)))
        if count:
            found.append(Curve(f"{name}, batch norm recomputed", aligned, RunningStatistics(recalibrate=count)))
    return found


def line_of(subject: Subject, other: str, curve: Curve, restarts: int, seed: int) -> StraightLine:
    """The line of a curve to another checkpoint."""
    return aligned_line(subject, other, restarts, seed) if curve.aligned else line_between(subject, other)


def points(
    subject: Subject, line: StraightLine, statistics: RunningStatistics, at: Sequence[float]
) -> Iterator[Mapping[str, float]]:
    """What `values_at` says of some points; the samples' losses at the ends are measured once."""
    with ModelOnLine(subject, line, statistics) as model:
        ends = _ends(subject, line, statistics)
        for t in (0.0, 1.0):
            if t not in ends:
                model.move_to(t)
                ends[t] = samples_of(subject)
        for t in at:
            if t not in ends:
                model.move_to(t)
            values = values_at(t, ends[t] if t in ends else samples_of(subject), ends)
            if subject.traits.mean_only:
                values |= {"loss_se": np.nan, "excess_se": np.nan}
            yield values


@once_per_weights
def _ends(subject: Subject, line: StraightLine, statistics: RunningStatistics) -> dict[float, Samples]:
    return {}
