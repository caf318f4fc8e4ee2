"""Measure the loss along the update that the optimiser made, by forward passes and a gradient."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from landscape.monitoring.shards import Shards, own_parts
from landscape.products.vectors import flat, inner
from landscape.subject.subject import Subject
from landscape.weight_space.optimizer_step import WIDTH, critical_step, loss_on
from landscape.weight_space.weights_in_place import WeightsInPlace

NEAR = 8.0  # updates, within which the parabola through three losses says where the loss is back at its start
AGREE = 0.25  # with the last critical rate, to take the end of the parabola also where that is far
NOTHING = dict.fromkeys(
    ("update_norm", "predicted_change", "actual_change", "critical_sharpness", "critical_multiple", "critical_passes",
     "relative_critical_sharpness"), math.nan,
)  # fmt: skip


class AlongUpdate:
    """The last update, as the difference of the weights before and after it, whatever made it.

    With w the weights before the update u, the losses at w and w + u and the gradient at w + u give the parabola along
    u, and with it the change to first order, g'u. Critical sharpness 2 / (c eta) (Kalra et al., arXiv 2601.16979, c u
    the shortest multiple of the update that ends above the start) is then bracketed within 2^-4, around the last
    critical rate or, where that is near or about the same, around the end of the parabola: four passes where it is
    right. Relative critical sharpness is that of a second mini-batch along the same update, whose parabola takes the
    loss at w - u in place of a gradient.
    """

    def __init__(self, subject: Subject, shards: Shards) -> None:
        self._subject, self._shards = subject, shards
        self._before: dict[str, Tensor] = {}
        self._critical: dict[int, float] = {}  # the last critical learning rate by mini-batch

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Keep the weights before an update."""
        self._before = {name: p.clone() for name, p in own_parts(parameters).items()}

    def taken(self) -> dict[str, Tensor]:
        """The update since then, which is kept no longer; empty where there was none."""
        before, self._before = self._before, {}
        parameters = own_parts(self._subject.parameters)
        if before.keys() != parameters.keys():
            return {}
        update = {name: p - before[name].to(p.dtype) for name, p in parameters.items()}
        return update if 0 < self._squared(update) < math.inf else {}

    def _squared(self, update: Mapping[str, Tensor]) -> float:
        return self._shards.total(inner(update.values(), update.values()))

    def values(self, update: Mapping[str, Tensor], rate: float, end: float, gradient: Tensor) -> dict[str, Any]:
        """The quantities of an update made with a learning rate, by the loss and gradient after it; NaN without one."""
        subject, values = self._subject, dict(NOTHING)
        if update:
            values["update_norm"] = math.sqrt(self._squared(update))
            fall = self._shards.total(inner([gradient], [flat(update.values())]))
            values |= self._along(update, rate, 0, end, fall)
        if update and len(subject.batches) > 1:
            other = self._along(update, rate, 1, self._shards.mean(loss_on(subject, 1)), None)
            values["relative_critical_sharpness"] = other["critical_sharpness"]
        return values

    def _along(
        self, update: Mapping[str, Tensor], rate: float, batch: int, end: float, fall: float | None
    ) -> dict[str, float]:
        """The quantities of one mini-batch by the loss after the update and its derivative there along it."""
        passes = 1  # that of the end
        with torch.no_grad(), WeightsInPlace(self._subject, update) as weights:

            def at(multiple: float) -> float:
                nonlocal passes
                if multiple == 1.0:
                    return end
                passes += 1
                weights.translate((update, multiple - 1.0))
                return self._shards.mean(loss_on(self._subject, batch))

            start = at(0.0)
            slope = (end - at(-1.0)) / 2 if fall is None else 2 * (end - start) - fall
            bend = end - start - slope
            parabola = -slope / bend if bend > 0 else math.nan
            warm = self._critical.get(batch, math.nan) / (rate or math.nan)
            near = 0 < parabola < NEAR or abs(parabola / warm - 1) < AGREE
            known = near or math.isfinite(warm)
            guess = warm if known and not near else parabola
            found = critical_step(lambda c: at(c) - start, slope, guess=guess, spread=WIDTH if known else 2.0)
        if found.converged:
            self._critical[batch] = found.multiple * rate
        return {
            "predicted_change": slope, "actual_change": end - start, "critical_passes": passes,
            "critical_multiple": found.multiple if found.converged else math.nan,
            "critical_sharpness": 2 / (found.multiple * rate) if found.converged and rate > 0 else math.nan,
        }  # fmt: skip
