"""The loss at points of a plane, with the weights written in place and restored bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.vectors import inner
from landscape.results.statistics import mean_and_standard_error_from_sums
from landscape.subject import batchnorm
from landscape.subject.derived import once_per_weights
from landscape.subject.subject import Subject
from landscape.weight_space.forward_mode import Forward, Manner
from landscape.weight_space.planes import Plane
from landscape.weight_space.weights_in_place import Between

L2Definition = Literal["squared", "park2022"]
PLAIN = Manner()
FEWEST = 32  # samples before a point may be called off the chart


class Evaluator:
    """The loss at points of a plane; a context manager that leaves the model as it found it.

    Weights are written in place, moving tensors only, each time from w0: steps along the grid would drift. Beside the
    model there are three copies of its weights: w0, d1 and d2. (A fourth, w0 + x d1 of the present row, would save
    2.5 of the 7.4 ms that a write takes at 11 M weights, and 0.03 of 0.08 ms at 0.2 M.) Sums are float64 on the device;
    one transfer per row, on a CPU per point, so that a kill loses none.

    Args:
        subject: whose model is moved.
        plane: where to.
        recalibrate: mini-batches that refresh batch norm's statistics at every point; 0 keeps them.
        interpolate: on a plane through checkpoints, move what no direction moves (batch norm's statistics) too.
        l2_definition: see `Surface`.
        manner: of the forward passes.
        cap: a point whose loss is clearly above it is left early.
    """

    def __init__(
        self,
        subject: Subject,
        plane: Plane,
        recalibrate: int = 0,
        l2_definition: L2Definition = "squared",
        *,
        manner: Manner = PLAIN,
        cap: float | None = None,
        interpolate: bool = False,
    ) -> None:
        self._subject, self._recalibrate, self._l2 = subject, recalibrate, l2_definition
        self._manner, self._cap = manner, cap
        self._forward, self._exact = Forward(subject, manner), Forward(subject, PLAIN)
        moving = {**plane.directions[0], **plane.directions[1]}
        trainable = subject.parameters
        parameters = [trainable[name] for name in moving]
        self._live = [p.data for p in parameters]
        self._origin = [p.data.clone() for p in parameters]
        zero = torch.zeros(())
        self._first, self._second = (
            [d.get(n, zero.to(p).expand_as(p)).to(p) for n, p in zip(moving, self._origin, strict=True)]
            for d in plane.directions
        )
        still = [p.detach() for name, p in trainable.items() if name not in moving]
        self._grams = _grams(self._origin, self._first, self._second, still)
        self._statistics = batchnorm.statistics(subject.model)
        self._at_origin: list[Tensor] = []
        self._between = Between(subject, *plane.ends) if interpolate and any(plane.ends) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch._foreach_copy_(self._live, self._origin)
        if self._between is not None:
            self._between.restore()
        batchnorm.restore(self._subject.model, self._statistics)

    def at(self, x: float, y: float, *, control: bool = False) -> dict[str, float]:
        """What `along` says of one point."""
        (found,) = self.along([(x, y, control)])
        return found

    def along(self, points: Iterable[tuple[float, float, bool]]) -> Iterator[dict[str, float]]:
        """Loss and standard error, rise over the checkpoint's standard error, l2, accuracy, samples used, in order.

        Args:
            points: (x, y, control); a control point also says by how many standard errors its loss `deviates` from that
                of the plain manner, others have NaN there.
        """
        row: list[tuple[float, float, Tensor]] = []
        for x, y, control in points:
            if row and (x != row[0][0] or self._subject.device.type == "cpu"):
                yield from self._fetched(row)
                row = []
            with torch.inference_mode():
                row.append((x, y, self._sums(x, y, control)))
        yield from self._fetched(row)

    def _fetched(self, row: list[tuple[float, float, Tensor]]) -> Iterator[dict[str, float]]:
        if row:
            table = torch.stack([sums for _, _, sums in row]).tolist()  # the row's only transfer
            for (x, y, _), numbers in zip(row, table, strict=True):
                yield self._point(x, y, *numbers)

    def _sums(self, x: float, y: float, control: bool) -> Tensor:
        """Over samples: loss, its square, correct, rise, its square; samples; the loss in the plain manner, (7,)."""
        if not self._at_origin:  # before the first move
            self._at_origin = _losses_at_origin(self._subject, self._recalibrate, self._manner)
        self._move(x, y)
        if self._recalibrate:
            batchnorm.refresh(self._subject, self._recalibrate)
        sums = torch.zeros(5, dtype=torch.float64, device=self._subject.device)
        samples, exact = 0, torch.full_like(sums[:1], math.nan)
        for i in range(len(self._forward)):
            outputs, targets = self._forward(i)
            losses = self._subject.losses(outputs, targets).double()
            rise = losses - self._at_origin[i]
            right = self._subject.right(outputs, targets).sum()
            sums += torch.stack([losses.sum(), losses.square().sum(), right, rise.sum(), rise.square().sum()])
            samples += len(targets)
            if i & (i + 1) == 0 and self._far_above(sums, samples):  # after 1, 2, 4, 8, ... mini-batches
                break
        if control:
            parts = [self._subject.losses(*self._exact(k)).double().sum() for k in range(i + 1)]
            exact = torch.stack(parts).sum(dim=0, keepdim=True)
        return torch.cat([sums, torch.full_like(exact, samples), exact])

    def _far_above(self, sums: Tensor, samples: int) -> bool:
        """Whether the mean is off the chart beyond doubt, by four standard errors, or not finite."""
        if self._cap is None or samples < FEWEST:
            return False
        total, squares = sums[:2].tolist()
        mean, error = _mean(total, squares, samples)
        return not math.isfinite(mean) or mean - 4 * error > self._cap

    def _point(
        self, x: float, y: float, total: float, squares: float, right: float, rise: float, rises: float,
        samples: float, exact: float,
    ) -> dict[str, float]:  # fmt: skip
        mean, error = _mean(total, squares, samples)
        with np.errstate(all="ignore"):
            deviates = float(np.abs(np.float64(total) - exact) / samples / np.float64(error))
        return {
            "loss": mean, "loss_se": error, "rise_se": _mean(rise, rises, samples)[1], "l2": self._l2_at(x, y),
            "accuracy": right / samples, "n": samples, "deviates": deviates,
        }  # fmt: skip

    def _move(self, x: float, y: float) -> None:
        if self._subject.device.type == "cpu":  # bound by memory: one pass less
            for live, origin, first in zip(self._live, self._origin, self._first, strict=True):
                torch.add(origin, first, alpha=x, out=live)
        else:  # bound by launches: three in all
            torch._foreach_copy_(self._live, self._origin)
            torch._foreach_add_(self._live, self._first, alpha=x)
        torch._foreach_add_(self._live, self._second, alpha=y)
        if self._between is not None:
            self._between.place(x, y)

    def _l2_at(self, x: float, y: float) -> float:
        """From inner products alone: ||w0 + x d1 + y d2||^2 is a quadratic form in (1, x, y)."""
        point = np.array([1.0, x, y])
        squared = np.clip(np.einsum("i,tij,j->t", point, self._grams, point), 0.0, None)
        return float(0.5 * squared.sum() if self._l2 == "squared" else np.sqrt(squared).sum())


@once_per_weights
def _losses_at_origin(subject: Subject, recalibrate: int, manner: Manner) -> list[Tensor]:
    """Losses per sample of the checkpoint itself, per mini-batch."""
    if recalibrate:
        batchnorm.refresh(subject, recalibrate)
    forward = Forward(subject, manner)
    return [subject.losses(*forward(i)).double() for i in range(len(forward))]


def _mean(total: float, squares: float, samples: float) -> tuple[float, float]:
    mean, error = mean_and_standard_error_from_sums(np.float64(total), np.float64(squares), samples)
    return float(mean), float(error)


def _grams(origin: list[Tensor], first: list[Tensor], second: list[Tensor], still: list[Tensor]) -> np.ndarray:
    """Inner products of (w0, d1, d2) per tensor, (tensors, 3, 3) float64."""
    grams = []
    for vectors in zip(origin, first, second, strict=True):
        grams.append([[inner([a], [b]) for b in vectors] for a in vectors])
    grams += [[[inner([w], [w]), 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]] for w in still]
    return np.array(grams)
