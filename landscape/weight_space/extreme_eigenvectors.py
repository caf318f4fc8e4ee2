"""Compute extreme Hessian eigenvectors as axes of a plane, and the quadratic model of the loss at the checkpoint."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.lanczos import lanczos
from landscape.curvature.spectrum import VECTOR_RESIDUAL, memory
from landscape.options import forecast_level, format_duration
from landscape.products.mini_batch_means import over_all_samples
from landscape.products.operator import Curvature
from landscape.products.vectors import flat, random_unit, unflat
from landscape.subject.subject import Subject
from landscape.weight_space import cost_model

_log = logging.getLogger(__name__)
LOSS_CHANGE = 0.02  # relative; farther out the loss of trained networks no longer follows its curvature


@dataclass(frozen=True, eq=False)
class ExtremeEigenvectors:
    """Unit eigenvectors of the smallest (x) and the largest (y) Hessian eigenvalue of the loss over all samples."""

    directions: tuple[dict[str, Tensor], dict[str, Tensor]]  # name -> tensor, of either
    quadratic_model: dict[str, float]  # `model_loss`, slope and curvature along both; the cross term is zero


def extreme_eigenvectors(subject: Subject, seed: int) -> ExtremeEigenvectors:
    """Both ends of the Hessian's spectrum by Lanczos.

    Raises:
        ValueError: the curvature is not finite.
    """
    if _log.isEnabledFor(logging.INFO):
        count = cost_model.PRODUCTS
        seconds = count * len(subject) * cost_model.hessian_product_seconds(subject)
        _log.log(forecast_level(seconds), "Hessian eigenvectors first: about %s", format_duration(seconds))
    parameters = list(subject.parameters.values())
    product = over_all_samples(
        subject, Curvature(replace(subject, weight_decay=0.0), subject.parameters, "double-backward")
    )
    start = random_unit(subject.size, seed, device=subject.device, dtype=subject.dtype)
    room, storage = memory(start)
    try:
        tolerances = {"tol": None, "tol_residual": VECTOR_RESIDUAL}
        found = lanczos(product, start, 1, which="both", room=room, storage=storage, vectors=True, **tolerances)
    except FloatingPointError as error:
        raise ValueError(f"--plane eigen needs finite curvature: {error}; check the weights") from None
    assert found.vectors is not None
    vectors = (unflat(found.vectors[k], parameters) for k in (1, 0))
    smallest, largest = (dict(zip(subject.parameters, vector, strict=True)) for vector in vectors)
    loss, gradient = _loss_and_gradient(subject)
    slopes = (found.vectors[[1, 0]].double() @ gradient).tolist()
    model = {
        "model_loss": loss, "slope_x": slopes[0], "slope_y": slopes[1],
        "curvature_x": float(found.values[1]), "curvature_y": float(found.values[0]),
    }  # fmt: skip
    return ExtremeEigenvectors((smallest, largest), model)


def half_range(loss: float, slope: float, curvature: float) -> float:
    """Half the default range along a unit eigenvector: where curvature alone changes the loss by `LOSS_CHANGE`.

    At least twice the distance of the quadratic model's stationary point, so that it is in view. At most 1, the range
    of other planes, which a direction without curvature gets too. Rounded to two digits.
    """
    if not (curvature and np.isfinite([loss, slope, curvature]).all()):
        return 1.0
    distance = max(math.sqrt(2 * LOSS_CHANGE * (abs(loss) or 1.0) / abs(curvature)), 2 * abs(slope / curvature))
    return float(f"{min(distance, 1.0):.2g}")


def _loss_and_gradient(subject: Subject) -> tuple[float, Tensor]:
    """Loss over all samples and its flat gradient, both accumulated in float64."""
    parameters = list(subject.parameters.values())
    losses: list[Tensor] = []
    shares = [subject.samples(i) / len(subject) for i in range(len(subject.batches))]
    gradient = torch.zeros(subject.size, dtype=torch.float64, device=subject.device)
    for i, share in enumerate(shares):
        with torch.enable_grad():
            loss = subject.loss(i)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        losses.append(loss.detach())
        gradient.add_(flat(gradients).double(), alpha=share)
    return sum(share * loss for share, loss in zip(shares, torch.stack(losses).tolist(), strict=True)), gradient
