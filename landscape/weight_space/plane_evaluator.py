"""Evaluate the loss at points of a plane, with the weights written in place and restored bit for bit."""

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from landscape.probe import Quantity
from landscape.products.vectors import inner_products
from landscape.statistics import basins, means
from landscape.subject import batchnorm, device, weights_cache
from landscape.subject.losses import Meaning
from landscape.subject.subject import Subject
from landscape.weight_space import planes, weights_in_place
from landscape.weight_space.forward_mode import REFERENCE, ExecutionMode, ForwardPass
from landscape.weight_space.scores import Scores, parts_of

_log = logging.getLogger(__name__)
L2Definition = Literal["squared", "park2022"]
Quantities = dict[str, Quantity]
Labels = dict[str, tuple[Quantity, np.ndarray]]
SUMS = 7  # numbers of a point before those of its parts, and of the scores
MIN_SAMPLES_OF_CAP = 32  # before the evaluation of a point may stop early


def quantities(
    meaning: Meaning, l2_definition: L2Definition, mode: ExecutionMode, cap: float | None, *, scores: bool = False
) -> Quantities:
    """What the evaluator returns for every point that is stored; the arguments are those of `PlaneEvaluator`."""
    l2 = "half the squared norm of the weights" if l2_definition == "squared" else "sum of the norms of the tensors"
    over = "samples" if cap is None else "n"
    always = {
        "loss": Quantity("loss", meaning.units, bounds=meaning.bounds),
        "loss_se": Quantity("standard error of the loss over samples", meaning.units, over=over),
        "rise_se": Quantity(
            "standard error of the loss minus the checkpoint's, paired over samples", meaning.units, over=over
        ),
        "l2": Quantity(l2),
        "accuracy": meaning.of_accuracy("accuracy", bounds="share"),
        "loss_part": Quantity("loss over every 16th sample, from each of the first 16 on", meaning.units, ("part",)),
    }
    n = {"n": Quantity("samples behind the loss")}
    deviates = {"deviates": Quantity("deviation from the plain forward pass at control points", "standard errors")}
    also = basins.MEASURED if scores else {}
    return {**always, **also, **({} if cap is None else n), **({} if mode == REFERENCE else deviates)}


class PlaneEvaluator(contextlib.AbstractContextManager["PlaneEvaluator"]):
    """Losses at points of a plane; a context manager that restores the model.

    In addition to the model there are three copies of its weights: w0, d1 and d2. (A fourth, w0 + x d1 of the current
    row, would save 2.5 of the 7.4 ms per write at 11 M weights, and 0.03 of 0.08 ms at 0.2 M.) Sums are float64 on the
    device; they are transferred once per row, on a CPU once per point, so that a killed job loses none. A point
    whose loss is clearly above the cap is not evaluated to the end.
    """

    def __init__(
        self,
        subject: Subject,
        plane: planes.Plane,
        statistics: weights_in_place.RunningStatistics = weights_in_place.FROZEN,
        *,
        l2_definition: L2Definition = "squared",
        mode: ExecutionMode = REFERENCE,
        cap: float | None = None,
        scores: Scores | None = None,
    ) -> None:
        self._scores = scores
        self._subject, self._recalibrate, self._l2_definition = subject, statistics.recalibrate, l2_definition
        self._mode, self._cap = mode, cap
        self._forward, self._reference = ForwardPass(subject, mode), ForwardPass(subject, REFERENCE)
        trainable = subject.parameters
        moving = {name: trainable[name] for name in {**plane.directions[0], **plane.directions[1]}}
        self._ends = plane.ends if statistics.interpolate else ({}, {})
        self._weights = weights_in_place.WeightsInPlace(subject, [*moving, *self._ends[0]])
        zero = torch.zeros(())
        self._first, self._second = (
            {name: direction.get(name, zero.to(p).expand_as(p)).to(p) for name, p in moving.items()}
            for direction in plane.directions
        )
        fixed = [p.detach() for name, p in trainable.items() if name not in moving]
        origin = [self._weights.original[name] for name in moving]
        self._at_origin: list[Tensor] = []
        self._parts = parts_of(subject)
        self._part_of = torch.arange(len(subject), device=subject.device) % self._parts
        self._moves = 0  # to other points than the origin: the first two
        self._grams = _grams(origin, list(self._first.values()), list(self._second.values()), fixed)

    def __exit__(self, *error: object) -> None:
        self._weights.restore()

    def at(self, x: float, y: float) -> dict[str, Any]:
        (values,) = self.evaluate([(x, y, False)])
        return values

    def evaluate(self, points: Iterable[tuple[float, float, bool]]) -> Iterator[dict[str, Any]]:
        """The `quantities` of all points (x, y, control), in order.

        At a control point `deviates` is the deviation of the loss from that of the reference mode, elsewhere NaN. From
        a device they come by rows, while it computes the next one.
        """
        on_host = self._subject.device.type == "cpu"
        row: list[tuple[float, float]] = []
        own: list[Tensor] = []
        under_way: list[tuple[list[tuple[float, float]], device.Transfer]] = []
        for x, y, control in points:
            if row and (on_host or x != row[0][0]):
                under_way.append((row, device.Transfer(torch.stack(own))))
                row, own = [], []
                if on_host or len(under_way) > 1:
                    yield from self._transferred(*under_way.pop(0))
            with self._subject.evaluating():
                own.append(self._sums(x, y, control))
            row.append((x, y))
        under_way += [(row, device.Transfer(torch.stack(own)))] if row else []
        for last in under_way:
            yield from self._transferred(*last)

    def _transferred(self, row: Sequence[tuple[float, float]], table: device.Transfer) -> Iterator[dict[str, Any]]:
        for (x, y), sums in zip(row, table.wait().tolist(), strict=True):
            own = SUMS + self._parts
            scores = self._scores.values(sums[own:]) if self._scores else {}
            yield self._values(x, y, np.array(sums[SUMS:own]), *sums[:SUMS]) | scores

    def _sums(self, x: float, y: float, control: bool) -> Tensor:
        """Over samples: loss, loss^2, correct, rise, rise^2; number of samples; loss in the reference mode, (7,).

        Behind these the loss over every part of the samples, and the table of the scores.
        """
        if not self._at_origin:  # before the first move
            self._at_origin = _losses_at_origin(self._subject, self._recalibrate, self._mode)
            if self._scores:
                self._scores.at_checkpoint()
        self._move_to(x, y)
        if self._moves < 2 and (x or y):
            self._moves += 1
            self._forward.check_again()  # whether a pass that was recorded at another point follows the weights
            if self._scores:
                self._scores.check_again()
        sums = torch.zeros(5, dtype=torch.float64, device=self._subject.device)
        samples, reference = 0, torch.full_like(sums[:1], math.nan)
        of_parts, own = sums.new_zeros(self._parts), list[tuple[Tensor, Tensor]]()
        for i in range(len(self._forward)):
            of_batch, losses, right = self._forward.sums(i, self._at_origin[i])
            if self._scores:
                own.append((losses.clone(), right.clone().double()))
            of_parts.index_add_(0, self._part_of[samples : samples + len(losses)], losses)
            sums += of_batch
            samples += len(losses)
            if i & (i + 1) == 0 and self._far_above_cap(sums, samples):  # after 1, 2, 4, 8, ... mini-batches
                break
        if control:
            plain = [self._reference.losses_and_right(k)[0].sum() for k in range(i + 1)]
            reference = torch.stack(plain).sum(dim=0, keepdim=True)
        found = [sums, torch.full_like(reference, samples), reference, of_parts]
        if self._scores:
            losses, right = (torch.cat([one[k] for one in own]) for k in (0, 1))
            found.append(self._scores.table((losses, right), self._scores.further_samples()).flatten())
        return torch.cat(found)

    def _far_above_cap(self, sums: Tensor, samples: int) -> bool:
        """Whether the mean exceeds the cap by more than four standard errors, or is not finite."""
        if self._cap is None or samples < MIN_SAMPLES_OF_CAP or self._subject.traits.mean_only:
            return False
        total, squares = sums[:2].tolist()
        mean, error = _mean_and_error(total, squares, samples)
        return not math.isfinite(mean) or mean - 4 * error > self._cap

    def _values(
        self, x: float, y: float, of_parts: np.ndarray, total: float, squares: float, right: float, rise: float,
        rises: float, samples: float, reference: float,
    ) -> dict[str, Any]:  # fmt: skip
        mean, error = _mean_and_error(total, squares, samples)
        with np.errstate(all="ignore"):
            deviates = float(np.abs(np.float64(total) - reference) / samples / np.float64(error))
        rise_error = _mean_and_error(rise, rises, samples)[1]
        if self._subject.traits.mean_only:
            error = rise_error = math.nan
            of_parts = np.full_like(of_parts, math.nan)
        return {
            "loss_part": of_parts / np.ceil((samples - np.arange(self._parts)) / self._parts),
            "loss": mean, "loss_se": error, "rise_se": rise_error,
            "l2": self._l2_at(x, y), "accuracy": right / samples, "n": samples, "deviates": deviates,
        }  # fmt: skip

    def _move_to(self, x: float, y: float) -> None:
        self._weights.translate((self._first, x), (self._second, y))
        if self._ends[0]:
            share, second_share = weights_in_place.barycentric(x, y)
            self._weights.interpolate(self._ends[0], share, self._ends[1], second_share)
        if self._recalibrate:
            batchnorm.refresh(self._subject, self._recalibrate)

    def _l2_at(self, x: float, y: float) -> float:
        """From inner products alone: ||w0 + x d1 + y d2||^2 is a quadratic form in (1, x, y)."""
        point = np.array([1.0, x, y])
        squared = np.clip(np.einsum("i,tij,j->t", point, self._grams, point), 0.0, None)
        return float(0.5 * squared.sum() if self._l2_definition == "squared" else np.sqrt(squared).sum())


@weights_cache.once_per_weights
def _losses_at_origin(subject: Subject, recalibrate: int, mode: ExecutionMode) -> list[Tensor]:
    """Losses per sample of the checkpoint itself, per mini-batch."""
    if recalibrate:
        batchnorm.refresh(subject, recalibrate)
    forward = ForwardPass(subject, mode)
    return [forward.losses_and_right(i)[0] for i in range(len(forward))]


def _mean_and_error(total: float, squares: float, samples: float) -> tuple[float, float]:
    mean, error = means.mean_and_standard_error_from_sums(np.float64(total), np.float64(squares), samples)
    return float(mean), float(error)


def _grams(
    origin: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], fixed: Sequence[Tensor]
) -> np.ndarray:
    """Inner products of (w0, d1, d2) per tensor, (tensors, 3, 3) float64; fixed tensors have no directions."""
    moving = list(zip(origin, first, second, strict=True))
    pairs = [(a, b) for vectors in moving for a in vectors for b in vectors] + [(w, w) for w in fixed]
    products = np.array(inner_products(pairs))
    grams = np.zeros((len(moving) + len(fixed), 3, 3))
    grams[: len(moving)] = products[: 9 * len(moving)].reshape(-1, 3, 3)
    grams[len(moving) :, 0, 0] = products[9 * len(moving) :]
    return grams


def path_labels(subject: Subject, plane: planes.Plane, statistics: weights_in_place.RunningStatistics) -> Labels:
    """Coordinates and names; of checkpoints also their losses. Empty where the plane has no path."""
    if not plane.path.size:
        return {}
    per_snapshot = ("snapshot",)
    return {
        "path_x": (Quantity("first coordinate of the snapshot", plane.units, per_snapshot), plane.path[0]),
        "path_y": (Quantity("second coordinate of the snapshot", plane.units, per_snapshot), plane.path[1]),
        "path_name": (Quantity("snapshot", dims=per_snapshot), np.array(plane.path_names)),
        **(_checkpoint_losses(subject, plane, statistics) if plane.kind == "checkpoints" else {}),
    }


def _checkpoint_losses(subject: Subject, plane: planes.Plane, statistics: weights_in_place.RunningStatistics) -> Labels:
    """The checkpoints' own losses, and by how much the plane's differ from them."""
    own, shown = _losses(subject, plane, weights_in_place.OWN), _losses(subject, plane, statistics)
    losses = zip(plane.path_names, shown, own, strict=True)
    words = ", ".join(f"{name or subject.label} {here:.4g} (its own {itself:.4g})" for name, here, itself in losses)
    prefix = f"batch-norm statistics {statistics}; " if any(plane.ends) else ""
    _log.info("surface: %sloss at the checkpoints: %s", prefix, words)
    per_snapshot, units = ("snapshot",), subject.meaning.units
    return {
        "path_loss": (Quantity("loss of the checkpoint itself", units, per_snapshot), own),
        "path_excess": (Quantity("loss on the plane minus the checkpoint's own", units, per_snapshot), shown - own),
    }


@weights_cache.once_per_weights
def _losses(subject: Subject, plane: planes.Plane, statistics: weights_in_place.RunningStatistics) -> np.ndarray:
    with PlaneEvaluator(subject, plane, statistics) as evaluator:
        return np.array([evaluator.at(x, y)["loss"] for x, y in plane.path.T.tolist()])
