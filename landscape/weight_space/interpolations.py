"""What is measured between two checkpoints: as they are or aligned, with batch norm's statistics recomputed or not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from landscape.subject import batchnorm
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights
from landscape.weight_space import barriers
from landscape.weight_space.aligned_networks import aligned_line, line_between
from landscape.weight_space.barriers import Samples
from landscape.weight_space.lines import ModelOnLine, StraightLine
from landscape.weight_space.weights_in_place import RunningStatistics


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
    """What `barriers.values_at` says of some points; the samples' losses at the ends are measured once."""
    with ModelOnLine(subject, line, statistics) as model:
        ends = _ends(subject, line, statistics)
        for t in (0.0, 1.0):
            if t not in ends:
                model.move_to(t)
                ends[t] = barriers.samples_of(subject)
        for t in at:
            if t not in ends:
                model.move_to(t)
            values = barriers.values_at(t, ends[t] if t in ends else barriers.samples_of(subject), ends)
            if subject.traits.mean_only:
                values |= {"loss_se": np.nan, "excess_se": np.nan}
            yield values


@once_per_weights
def _ends(subject: Subject, line: StraightLine, statistics: RunningStatistics) -> dict[float, Samples]:
    return {}
