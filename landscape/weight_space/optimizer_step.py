"""The step of an optimiser on one mini-batch: the objective along its update, to second order and in fact."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from landscape.curvature.preconditioner import SeenByOptimizer
from landscape.products import micro_batches, operator, vectors
from landscape.subject import optimizers, restoration
from landscape.subject.subject import Subject, l2_of
from landscape.weight_space.weights_in_place import WeightsInPlace

PASSES = 10  # forward passes of a search, that of the start included
AGREE = 2.0**-4  # relative difference of two estimates, at which a search ends
REACH = 0.25  # and their largest relative distance from a point where the loss is known
FAR = 64  # updates, beyond which roots may agree on what the loss, flattened out, does not do: a bracket must hold them
Point = tuple[float, float]  # multiple c of an update, and the change of the loss there by c
WIDTH = 2.0 ** (1 / 8)  # or ratio of the ends of a bracket, whose geometric mean is within 2^(1/16) - 1 = 4.4 %


@dataclass(frozen=True)
class CriticalStep:
    """How often an update can be lengthened before the loss exceeds its start."""

    multiple: float  # of the update; NaN where there is none, or the passes did not find it
    passes: int  # forward passes, that of the start included
    converged: bool  # the multiple is known within 2^-4 of itself


def critical_step(
    change: Callable[[float], float],
    slope: float,
    *,
    known: Point | None = None,
    guess: float = math.nan,
) -> CriticalStep:
    """The multiple c > 0 of an update at which the change of the loss turns positive, within 2^-4 of itself.

    That is the root of change / c, which is the slope at 0 and for a quadratic loss linear, so that lines and parabolas
    through the nearest points find it, from below by a little more than they say. A search ends where the roots of both
    agree within 2^-4 and are near the last point, nearer if the loss has not exceeded its start, and beyond 64 updates
    within an octave, or with a narrow bracket. It assumes a single crossing: of several, it finds one. The published
    code doubles and bisects instead.

    Args:
        change: c -> loss after c times the update - loss at the start; each call is a forward pass, the first at c = 1.
        slope: its derivative at 0. Where it is not negative the loss exceeds its start at once, and there is no c.
        known: c and change / c there, where the slope is but estimated from that; it is given up if it turns out not to
            be negative.
        guess: of c, such as -2 slope / u'Hu; NaN takes it from the slope and the change at c = 1.
    """
    if not slope < 0:
        return CriticalStep(math.nan, 1, False)
    points, low, high, at = [known or (0.0, slope)], 0.0, math.inf, 1.0
    for made in range(2, PASSES + 1):
        value = change(at) / at
        low, high = (at, high) if value <= 0 else (low, at)  # also where it is not finite
        loose = at > FAR and high > 2 * low
        roots = [guess] if made == 2 else []
        if math.isfinite(value):
            nearest = sorted(points, key=lambda point: abs(point[0] - at))[:2]
            points.append((at, value))
            line, root, start = _crossing((at, value), *nearest)
            near = abs(root - at) <= at * (REACH if high < math.inf and len(nearest) == 2 else AGREE)
            if near and abs(root - line) <= AGREE * abs(line) and not loose:
                return CriticalStep(min(max(root, low), high), made, True)
            if known and start >= 0 == low:
                break
            roots += [root, line]
        if low and high <= WIDTH * low:
            return CriticalStep(math.sqrt(low * high), made, True)
        halved = 4 * low if math.isinf(high) else math.sqrt(low * high) if low else high / 4
        further = 1 + AGREE if math.isinf(high) else 1 / (1 + AGREE) if loose else 1.0
        inside = (further * c for c in roots if low * (1 + AGREE) < further * c < high / (1 + AGREE))
        at = next(inside, halved)
    return CriticalStep(math.sqrt(low * high) if low and high < math.inf else math.nan, made, False)


def _crossing(point: Point, other: Point, *third: Point) -> tuple[float, float, float]:
    """Roots, NaN for none, of the line through two points and of the parabola through all, and its value at 0."""
    (x, y), (x1, y1) = point, other
    rise = (y - y1) / (x - x1)
    bend = sum(((y1 - y2) / (x1 - x2) - rise) / (x2 - x) for x2, y2 in third)
    slope = rise + bend * (x - x1)
    square = slope * slope - 4 * bend * y
    turned = slope + math.copysign(math.sqrt(square), slope) if square >= 0 else 0.0
    line, root = x - y / rise if rise else math.nan, x - 2 * y / turned if turned else math.nan
    return line, root, y - rise * x + bend * x * x1


TINY = 1e-6  # of torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class StepMeasurement:
    """The steps of one optimiser on the mini-batches of a subject."""

    subject: Subject
    restored: optimizers.RestoredOptimizer
    curved: operator.Curvature  # of the parameters that the optimiser moves, by double backward
    clip: float = 0.0  # largest norm of the gradient that the optimiser gets; 0 for any
    seen: SeenByOptimizer | None = None  # the preconditioned eigenvalues that are measured too

    def of(self, i: int, others: Sequence[int]) -> dict[str, Any]:
        """The quantities of the probe `step` on mini-batch i, with others on which its update is tried.

        A gradient that is not finite leaves the loss alone; a gradient or an update of zero has no direction, and the
        quantities along it are left out.
        """
        product = self.curved.product(i)
        slope = product.gradient()
        if not bool(slope.isfinite().all()):
            return {"loss": product.value, "samples": self.subject.samples(i)}
        gradient, update = self._with_decay(slope), self._update(slope)
        own = self._along(update, gradient, product)
        values: dict[str, Any] = {f"predicted_change{end}": change for end, change in own.items()}
        values |= {"samples": self.subject.samples(i), "gradient_norm": _dot(gradient, gradient) ** 0.5}
        values["update_norm"] = _dot(update, update) ** 0.5
        if values["gradient_norm"]:
            curvature = _dot(gradient, product(gradient.to(self.subject.dtype)))
            values["gradient_sharpness"] = curvature / values["gradient_norm"] ** 2
        if self.seen is not None:
            values |= self.seen.values(product, self.restored.parameters, self.subject.weight_decay, i)
        del product  # its graph, before those of other mini-batches
        bend = 2 * (own[""] - own["_first"])
        if values["update_norm"]:
            values["directional_sharpness"] = bend / values["update_norm"] ** 2
        if values["update_norm"] and values["gradient_norm"]:
            cosine = -own["_first"] / (values["update_norm"] * values["gradient_norm"])
            values["angle"] = math.degrees(math.acos(min(max(cosine, -1.0), 1.0)))
        beside = [self._beside(j, update) for j in others]
        for end in own if others else ():
            values[f"other_predicted_change{end}"] = sum(found[end] for found in beside) / len(others)
        return values | self._moved(i, others, update, own["_first"], bend)

    def _moved(self, i: int, others: Sequence[int], update: Tensor, slope: float, bend: float) -> dict[str, float]:
        """What passes at other weights say; the weights are restored bit for bit."""
        subject, parameters = self.subject, self.restored.parameters
        pieces, decay = vectors.unflat(update, list(parameters.values())), subject.weight_decay
        direction = {n: piece.to(p.dtype) for (n, p), piece in zip(parameters.items(), pieces, strict=True)}
        # the change of the weight decay is c w'u + c^2 u'u / 2
        linear, square = decay * _dot(self._weights, update), decay * _dot(update, update) / 2
        starts = {j: loss_on(subject, j) for j in (i, *others)}
        values = {"loss": starts[i] + (decay * float(l2_of(subject).detach()) if decay else 0.0)}
        with WeightsInPlace(subject, parameters) as weights:

            @cache
            def change(j: int, multiple: float) -> float:
                """Of the objective on mini-batch j after a multiple of the update."""
                weights.translate((direction, multiple))
                return loss_on(subject, j) - starts[j] + multiple * linear + multiple**2 * square

            values["actual_change"] = change(i, 1.0)
            if others:
                values["other_actual_change"] = sum(change(j, 1.0) for j in others) / len(others)
            if slope:
                found = critical_step(partial(change, i), slope, guess=-2 * slope / bend if bend > 0 else math.nan)
                values |= {"descends": float(slope < 0), "converged": float(found.converged)}
                values |= {"critical_passes": found.passes, "critical_multiple": found.multiple}
                values["critical_sharpness"] = 2.0 / (found.multiple * self.restored.learning_rate)
        return values

    def _update(self, gradient: Tensor) -> Tensor:
        """The update for a gradient of the loss, (n,) in double precision."""
        parameters = self.restored.parameters
        if self.clip:
            gradient = gradient * torch.clamp(self.clip / (torch.linalg.vector_norm(gradient) + TINY), max=1.0)
        named = dict(zip(parameters, vectors.unflat(gradient, list(parameters.values())), strict=True))
        return vectors.flat(self.restored.update(named).values()).double()

    def _along(self, update: Tensor, gradient: Tensor, product: micro_batches.MicroBatchedProduct) -> dict[str, float]:
        """The change of the objective to first (`_first`) and second order."""
        slope = _dot(gradient, update)
        return {"_first": slope, "": slope + _dot(update, product(update.to(self.subject.dtype))) / 2}

    def _beside(self, j: int, update: Tensor) -> dict[str, float]:
        product = self.curved.product(j)
        return self._along(update, self._with_decay(product.gradient()), product)

    def _with_decay(self, gradient: Tensor) -> Tensor:
        """The gradient of the objective, in double precision."""
        return gradient.double() + self.subject.weight_decay * self._weights

    @property
    def _weights(self) -> Tensor:
        """Those that the optimiser moves, (n,) in double precision."""
        return vectors.flat(p.detach().double() for p in self.restored.parameters.values())


def loss_on(subject: Subject, j: int) -> float:
    """The loss on mini-batch j at the present weights."""
    inputs, targets = subject.batch(j)
    with subject.evaluating(), restoration.evaluation_mode(subject.model):
        return float(subject.losses(subject.outputs(inputs), targets).double().mean())


def _dot(left: Tensor, right: Tensor) -> float:
    return vectors.inner([left], [right])
