"""The numbers that stand for a surface, from its stored arrays alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from landscape.linalg.relief import Minimum, curvature, height, minima, non_convex
from landscape.probe import Quantity

RADII = (0.1, 0.25, 0.5, 1.0)
MINIMA = 8  # the most persistent ones are stored
CLEAR = 2.0  # standard errors that tell a minimum from noise
QUANTITIES: Mapping[str, Quantity] = {
    "height": Quantity("mean rise of the loss at a radius", "nats", ("radius",)),
    "height_se": Quantity("standard error of the height, at most", "nats", ("radius",)),
    "curvature": Quantity("second derivative of the quadratic fitted at the centre", "nats", ("term",)),
    "curvature_se": Quantity("standard error of the second derivative, at most", "nats", ("term",)),
    "non_convex": Quantity("share of inner cells with a negative second derivative in some direction"),
    "non_finite": Quantity("share of finished cells whose loss is not finite"),
    "minima": Quantity("number of local minima of the grid"),
    "clear_minima": Quantity("those deeper than two standard errors, with the lowest"),
    "persistence": Quantity("rise from a local minimum to where a lower valley begins", "nats", ("minimum",)),
    "persistence_se": Quantity("standard error of the persistence, at most", "nats", ("minimum",)),
}
OF_PREVIEW: Mapping[str, Quantity] = {
    "hold_out_error": Quantity("greatest relative error of the loss at random hold-outs"),
    "evaluations": Quantity("points evaluated"),
}
OF_MANNER: Mapping[str, Quantity] = {
    "deviation_95": Quantity("95th percentile of the control points' deviation", "standard errors"),
    "deviation_max": Quantity("greatest deviation of a control point", "standard errors"),
}


def quantities(*, preview: bool, plain: bool, units: str = "nats") -> dict[str, Quantity]:
    """What `of` fills in, and beside it for a preview; `units` are the loss's."""
    own = {name: replace(q, units=units) if q.units == "nats" else q for name, q in QUANTITIES.items()}
    return {**own, **(OF_PREVIEW if preview else {}), **({} if plain else OF_MANNER)}


def of(data: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Summaries: heights and curvature where their cells are finished, the rest when all are."""
    x, y, finished = data["x"], data["y"], data["done"] == 1
    loss = np.where(finished, data["loss"], np.nan)
    rise_se = np.where(finished, data.get("rise_se", np.nan), np.nan)  # an earlier version did not store it
    heights = np.array([height(x, y, loss, radius, rise_se=rise_se) for radius in data["radius"]])
    second, second_se = curvature(x, y, loss, rise_se)
    found: dict[str, Any] = {
        "height": heights[:, 0], "height_se": heights[:, 1], "curvature": second, "curvature_se": second_se,
        "non_finite": float((~np.isfinite(loss[finished])).mean()) if finished.any() else np.nan,
    }  # fmt: skip
    if finished.all():
        found |= {"non_convex": non_convex(x, y, loss), **_topology(loss, rise_se)}
    if "deviates" in data and np.isfinite(data["deviates"]).any():
        deviates = data["deviates"][np.isfinite(data["deviates"])]
        found |= {"deviation_95": float(np.quantile(deviates, 0.95)), "deviation_max": float(deviates.max())}
    return found


def _topology(loss: np.ndarray, rise_se: np.ndarray) -> dict[str, Any]:
    every = minima(loss)
    inner = [minimum for minimum in every if np.isfinite(minimum.persistence)]
    errors = [_error(minimum, rise_se) for minimum in inner]
    depth, depth_se = (np.full(MINIMA, np.nan) for _ in range(2))
    depth[: len(inner)] = [minimum.persistence for minimum in inner[:MINIMA]]
    depth_se[: len(inner)] = errors[:MINIMA]
    clear = sum(minimum.persistence > CLEAR * error for minimum, error in zip(inner, errors, strict=True))
    return {
        "minima": float(len(every)), "clear_minima": float(len(every) - len(inner) + clear),
        "persistence": depth, "persistence_se": depth_se,
    }  # fmt: skip


def _error(minimum: Minimum, rise_se: np.ndarray) -> float:
    assert minimum.saddle is not None
    return float(rise_se[minimum.at] + rise_se[minimum.saddle])
