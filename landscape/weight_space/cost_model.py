"""What a surface costs on this machine: the seconds of its parts, each timed, and how often a run needs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from landscape.curvature.operator import Curvature
from landscape.curvature.vectors import random_unit
from landscape.subject import batchnorm
from landscape.subject.subject import Subject
from landscape.weight_space.forward_mode import Forward, Manner

Grid = tuple[int, int]
SECONDS = 0.5  # of passes behind a rate: one alone may take twice its time where other programs run
PRODUCTS = 30  # that the two ends of a Hessian take: 14 to 30 on the demo networks, at most 200
PLAIN = Manner()


@dataclass(frozen=True)
class Work:
    """What a run consists of.

    Args:
        points: how many points of a grid are evaluated.
        controls: how many of them the plain manner evaluates too.
        recalibrate: mini-batches that refresh batch norm at every point.
        corners: evaluations in the plain manner before the first point.
        eigen: whether the directions are eigenvectors, which are sought first.
    """

    points: Callable[[Grid], int]
    controls: Callable[[Grid], int] = lambda grid: 0
    recalibrate: int = 0
    corners: int = 0
    eigen: bool = False


@dataclass(frozen=True)
class Rates:
    """Seconds of the parts of a run; of those a run has not, 0.

    Args:
        forward: per sample and pass, in the manner of the run.
        plain: per sample and pass, in the plain manner.
        refresh: of batch norm's statistics, per point.
        product: of the Hessian of all samples, per sample.
        compilation: for a last mini-batch of another size, where the timed samples had none.
    """

    forward: float
    plain: float = 0.0
    refresh: float = 0.0
    product: float = 0.0
    compilation: float = 0.0

    def before(self, work: Work, samples: int) -> float:
        """Seconds before the first point: the directions and the checkpoints that span a plane."""
        found = work.corners * (samples * self.plain + self.refresh)
        return found + (PRODUCTS * samples * self.product if work.eigen else 0.0)

    def during(self, points: int, controls: int, samples: int) -> float:
        """Seconds of so many points, and of the checkpoint itself, which all are compared with."""
        return (points + 1) * (samples * self.forward + self.refresh) + controls * samples * self.plain

    def total(self, work: Work, grid: Grid, samples: int) -> float:
        """Seconds of a run."""
        points = self.during(work.points(grid), work.controls(grid), samples)
        return self.compilation + self.before(work, samples) + points


def rates(subject: Subject, manner: Manner, work: Work) -> Rates:
    """Each part of the work, timed on a mini-batch of the full size."""
    compilation = _compiled(subject, manner) if manner.compile else 0.0
    plain = _forward(subject, PLAIN) if manner != PLAIN or work.corners else 0.0
    return Rates(
        forward=_forward(subject, manner),
        plain=plain,
        refresh=_refresh(subject, work.recalibrate) if work.recalibrate else 0.0,
        product=product(subject) if work.eigen else 0.0,
        compilation=compilation,
    )


def product(subject: Subject) -> float:
    """Seconds per sample of a product with the Hessian of all samples, its graph built anew as there."""
    curvature = Curvature(replace(subject, weight_decay=0.0), subject.parameters, "kept")
    vector = random_unit(subject.size, 0, device=subject.device, dtype=subject.dtype)
    return _timed(lambda: curvature.product(0)(vector)[0].item()) / len(subject.batch(0)[1])


def _forward(subject: Subject, manner: Manner) -> float:
    forward, samples = Forward(subject, manner), len(subject.batch(0)[1])
    with torch.inference_mode():
        return _timed(lambda: subject.losses(*forward(0)).double().sum().item()) / samples


def _compiled(subject: Subject, manner: Manner) -> float:
    """Compile for all sizes of mini-batches; the seconds of another compilation where they have but one size."""
    forward, last = Forward(subject, manner), len(subject.batches) - 1
    with torch.inference_mode():
        start = time.perf_counter()
        forward(0)
        took = time.perf_counter() - start
        if len(subject.batch(last)[1]) == len(subject.batch(0)[1]):
            return took
        forward(last)
    return 0.0


def _refresh(subject: Subject, count: int) -> float:
    kept = batchnorm.statistics(subject.model)
    with torch.inference_mode():
        try:
            return _timed(lambda: batchnorm.refresh(subject, count))
        finally:
            batchnorm.restore(subject.model, kept)


def _timed(work: Callable[[], object]) -> float:
    """Mean seconds, after a warm-up."""
    work()
    start, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - start < SECONDS:
        work()
        count += 1
    return (time.perf_counter() - start) / count
