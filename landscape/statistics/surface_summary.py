"""Summarise a surface from its stored arrays: heights, curvature, convexity, and minima with their persistence."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from landscape.headline import FLATTER, HIGHER, LOWER, Headline
from landscape.probe import Quantity
from landscape.statistics import basins, intervals
from landscape.statistics.means import error_over_parts

RADII, QUOTED = (0.1, 0.25, 0.5, 1.0), 0.5  # of heights, and of the one that stands in one line of text
CENTRE = {"x": 0.0, "y": 0.0}
HEADLINES = (
    Headline("loss", "loss", CENTRE, LOWER,
             column=5, title="loss", definition="loss at the centre of the surface, in its units"),
    Headline("accuracy", "accuracy", CENTRE, HIGHER, samples=True,
             column=4, title="accuracy", definition="share of right classes at the centre of the surface"),
    Headline("least objective", "objective", {"x y": "smallest"}, where="at ({x:g}, {y:g})"),
    *(
        Headline(f"height at {r:g}", "height", {"radius": r}, FLATTER, silent=r != QUOTED, column=10 * (r == QUOTED),
                 title="height", definition=f"mean rise of the loss on a circle of radius {r:g} (filter norm)")
        for r in RADII
    ),
    *basins.HEADLINES,
)  # fmt: skip
ANGLES = 360  # of points on a circle
MINIMA = 8  # stored at most, the most persistent first
QUANTITIES: Mapping[str, Quantity] = {
    "height": Quantity("mean rise of the loss at a radius", "nats", ("radius",), error="parts of the samples"),
    "curvature": Quantity(
        "second derivative of the quadratic fitted at the centre", "nats", ("term",), error="parts of the samples"
    ),
    "non_convex": Quantity("share of inner cells with a negative second derivative in some direction"),
    "non_finite": Quantity("share of finished cells whose loss is not finite"),
    "minima": Quantity("number of local minima of the grid"),
    "clear_minima": Quantity("those whose depth has a 95 % interval above zero, with the lowest"),
    "persistence": Quantity(
        "rise from a local minimum to where a lower valley begins", "nats", ("minimum",), error="parts of the samples"
    ),
}
OBJECTIVE: Mapping[str, Quantity] = {"objective": Quantity("loss + weight decay x l2", "nats", ("x", "y"))}
PREVIEW: Mapping[str, Quantity] = {
    "hold_out_error": Quantity("greatest relative error of the loss at random hold-outs"),
    "evaluations": Quantity("points evaluated"),
}
EXECUTION_MODE: Mapping[str, Quantity] = {
    "deviation_95": Quantity("95th percentile of the control points' deviation", "standard errors"),
    "deviation_max": Quantity("greatest deviation of a control point", "standard errors"),
}


def quantities(*, preview: bool, reference: bool, decayed: bool, units: str = "nats") -> dict[str, Quantity]:
    """The summaries of a surface: of a preview, in the reference execution mode, with weight decay and these units."""
    own = {**QUANTITIES, **(OBJECTIVE if decayed else {})}
    always = {name: replace(q, units=units) if q.units == "nats" else q for name, q in own.items()}
    return {**always, **(PREVIEW if preview else {}), **({} if reference else EXECUTION_MODE)}


def summarise(data: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Heights and curvature where their cells are finished, the other summaries when all cells are."""
    x, y, finished = data["x"], data["y"], data["done"] == 1
    loss = np.where(finished, data["loss"], np.nan)
    parts = np.where(finished[..., None], data.get("loss_part", np.nan), np.nan)  # imported surfaces have none
    summaries: dict[str, Any] = {
        "non_finite": float((~np.isfinite(loss[finished])).mean()) if finished.any() else np.nan
    }
    for name, of in (("height", partial(height, radii=data["radius"])), ("curvature", curvature)):
        summaries |= {name: of(x, y, loss), f"{name}_se": error_over_parts(of(x, y, parts))}
    if "weight_decay" in data:
        summaries["objective"] = loss + data["weight_decay"] * np.where(finished, data["l2"], np.nan)
    if finished.all():
        summaries |= {"non_convex": non_convex(x, y, loss), **_topology(loss, parts)}
    if "deviates" in data and np.isfinite(data["deviates"]).any():
        deviates = data["deviates"][np.isfinite(data["deviates"])]
        summaries |= {"deviation_95": float(np.quantile(deviates, 0.95)), "deviation_max": float(deviates.max())}
    return summaries


def _topology(loss: np.ndarray, parts: np.ndarray) -> dict[str, Any]:
    every = minima(loss)
    inner = [minimum for minimum in every if np.isfinite(minimum.persistence)]
    errors = [float(error_over_parts(parts[m.saddle] - parts[m.at])) for m in inner if m.saddle is not None]
    depth, depth_se = np.full((2, MINIMA), np.nan)
    depth[: len(inner)] = [minimum.persistence for minimum in inner[:MINIMA]]
    depth_se[: len(inner)] = errors[:MINIMA]
    wide = intervals.quantile(parts.shape[-1])
    clear = sum(minimum.persistence > wide * error for minimum, error in zip(inner, errors, strict=True))
    return {
        "minima": float(len(every)), "clear_minima": float(len(every) - len(inner) + clear),
        "persistence": depth, "persistence_se": depth_se,
    }  # fmt: skip


def height(x: np.ndarray, y: np.ndarray, loss: np.ndarray, radii: np.ndarray) -> np.ndarray:
    """Mean loss (x, y, ...) on circles minus the loss at their centre, bilinear between grid points, (radius, ...).

    NaN beyond the grid.
    """
    from scipy.interpolate import RegularGridInterpolator

    within = np.asarray(radii) * (1 - 1e-9) <= min(x[-1], -x[0], y[-1], -y[0])
    found = np.full((len(radii), *loss.shape[2:]), np.nan)
    theta = np.arange(ANGLES) * (2 * np.pi / ANGLES)
    circle = np.stack([np.cos(theta), np.sin(theta)], axis=1)
    between = RegularGridInterpolator((x, y), loss, bounds_error=False, fill_value=None)
    with np.errstate(invalid="ignore"):
        for k in np.flatnonzero(within):
            found[k] = between(radii[k] * circle).mean(axis=0) - between([[0.0, 0.0]])[0]
    return found


def curvature(x: np.ndarray, y: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Second derivatives (xx, xy, yy) at the centre of losses (x, y, ...), (3, ...).

    By a least-squares quadratic through the 5 x 5 grid points nearest to the origin; NaN unless all are finite.
    """
    if min(len(x), len(y)) < 5 or not (x[0] < 0 < x[-1] and y[0] < 0 < y[-1]):
        return np.full((3, *loss.shape[2:]), np.nan)
    rows, columns = (np.sort(np.argsort(np.abs(axis), kind="stable")[:5]) for axis in (x, y))
    near = np.ix_(rows, columns)
    a, b = (part.ravel() for part in np.meshgrid(x[rows], y[columns], indexing="ij"))
    width = max(np.abs(a).max(), np.abs(b).max())  # well-conditioned at any scale
    a, b = a / width, b / width
    design = np.stack([np.ones_like(a), a, b, a**2 / 2, a * b, b**2 / 2], axis=1)
    weights = np.linalg.pinv(design)[3:] / width**2
    with np.errstate(invalid="ignore"):
        second = np.tensordot(weights, loss[near].reshape(len(a), *loss.shape[2:]), axes=1)
    return np.where(np.isfinite(second), second, np.nan)


def non_convex(x: np.ndarray, y: np.ndarray, loss: np.ndarray) -> float:
    """Share of inner grid points whose Hessian, by second differences, has a negative eigenvalue.

    Only points with a finite 3 x 3 neighbourhood count; NaN if there are none.
    """
    if min(loss.shape) < 3:
        return float("nan")
    with np.errstate(invalid="ignore", over="ignore"):
        hx, hy = (x[-1] - x[0]) / (len(x) - 1), (y[-1] - y[0]) / (len(y) - 1)
        inner = loss[1:-1, 1:-1]
        xx = (loss[2:, 1:-1] - 2 * inner + loss[:-2, 1:-1]) / hx**2
        yy = (loss[1:-1, 2:] - 2 * inner + loss[1:-1, :-2]) / hy**2
        xy = (loss[2:, 2:] - loss[2:, :-2] - loss[:-2, 2:] + loss[:-2, :-2]) / (4 * hx * hy)
        smallest = (xx + yy) / 2 - np.hypot((xx - yy) / 2, xy)
        rounding = 1e-13 * np.abs(inner) / min(hx, hy) ** 2  # does not make a straight valley non-convex
    known = np.isfinite(smallest)
    return float((smallest < -rounding)[known].mean()) if known.any() else float("nan")


@dataclass(frozen=True)
class Minimum:
    """A local minimum of the grid."""

    at: tuple[int, int]  # its grid point
    saddle: tuple[int, int] | None  # where its basin first meets a lower one; None for the global minimum
    persistence: float  # how much higher the saddle is; infinite for the global minimum


def minima(loss: np.ndarray) -> list[Minimum]:
    """Local minima by descending persistence: 0-dimensional homology of the sublevel sets, 4 neighbours per point.

    Points are added by ascending loss; where two basins meet, the one with the higher minimum ends (Edelsbrunner &
    Harer 2010, chapter VII). Points that are not finite are never added. A plateau counts once.
    """
    values, columns = loss.ravel(), loss.shape[1]
    parent = np.full(values.size, -1)
    found: list[Minimum] = []

    def bottom(point: int) -> int:
        while parent[point] != point:
            parent[point] = parent[parent[point]]
            point = int(parent[point])
        return point

    def place(point: int) -> tuple[int, int]:
        return point // columns, point % columns

    order = np.argsort(values, kind="stable")
    rank = np.empty(values.size, dtype=int)
    rank[order] = np.arange(values.size)
    for point in order[np.isfinite(values[order])].tolist():
        parent[point] = point
        i, j = place(point)
        for di, dj in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            if 0 <= i + di < loss.shape[0] and 0 <= j + dj < columns:
                other = point + di * columns + dj
                if parent[other] >= 0:
                    low, high = sorted((bottom(point), bottom(other)), key=rank.__getitem__)
                    if low != high:
                        parent[high] = low
                        if values[point] > values[high]:
                            found.append(Minimum(place(high), place(point), float(values[point] - values[high])))
    roots = [point for point in range(values.size) if parent[point] == point]
    found += [Minimum(place(root), None, float("inf")) for root in roots]
    return sorted(found, key=lambda minimum: (-minimum.persistence, minimum.at))
