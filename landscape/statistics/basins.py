"""Radii of basins: how far from a checkpoint each score stays within its interval.

A score is the mean over the samples of one data set of a loss or of the accuracy. Its interval ends where it is worse
than at the checkpoint by a margin, by default two of its standard errors there. Chen et al. 2025 (arXiv 2505.17646)
call the region in which a score stays a basin, along random directions (most-case), the worst one, or that of a
fine-tuning; their margin is read off by eye.
"""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from landscape.headline import FLATTER_ABOVE, LOWER, Headline
from landscape.options import invalid
from landscape.probe import Quantity
from landscape.statistics.intervals import quantile
from landscape.statistics.means import error_over_parts

MARGIN = "2se"
ANGLES = 72  # rays of a plane
SIDES = (-1.0, 1.0)  # of a line
ENDS = ("", "_low", "_high")  # of a name: a radius and its interval
MEASURED: Mapping[str, Quantity] = {
    "score_value": Quantity("score", "score", ("score",)),
    "score_se": Quantity("standard error of the score over samples", "score", ("score",), over="score_samples"),
    "score_worse": Quantity("by how much the score is worse than at the checkpoint", "score", ("score",)),
    "score_worse_se": Quantity(
        "standard error of that difference, paired over samples", "score", ("score",), over="score_samples"
    ),
    "score_worse_part": Quantity("that difference over every 16th sample, from each of the first 16 on", "score",
                                 ("score", "part")),
}  # fmt: skip
HEADLINES = (
    Headline("basin of {score_name}", "basin_mean", {"score": "each"}, FLATTER_ABOVE),
    Headline("narrowest basin of {score_name}", "basin_least", {"score": "each"}, FLATTER_ABOVE, unlike="basin_mean"),
)
LINE = (  # of a line that does not end at another checkpoint
    Headline("loss", "loss", {"direction": 0, "t": 0.0}, LOWER, unless="barrier"),
    Headline("highest", "loss", {"direction t": "largest"}, unless="barrier"),
)
PROFILES = ("profile_mean", "profile_mean_se", "profile_most", "profile_most_se")
Radius = tuple[float, float, float]  # value and ends of the 95 % interval; see `radius`
UNKNOWN: Radius = (math.nan, math.nan, math.nan)


def parse_margin(text: str) -> tuple[float, str]:
    """Parse `2se`, `10%` or a number: the number, and which of `se`, `%` or "" it is in.

    Raises:
        OptionError: it is something else, or below 0.
    """
    found = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?)(se|%|)", text.strip())
    try:
        return float(found[1]), found[2]  # type: ignore[index]
    except (TypeError, ValueError):
        raise invalid(
            "margin", text or "nothing", "standard errors such as 2se, a share such as 10%, or a number"
        ) from None


def margin_of(text: str, value: float, error: float) -> float:
    """By how much a score may be worse, from its value and standard error at the checkpoint; NaN if it has no value."""
    if not math.isfinite(value):
        return math.nan
    number, unit = parse_margin(text or MARGIN)
    return number * {"se": error, "%": abs(value) / 100, "": 1.0}[unit]


def summaries(units: str, *, plane: bool) -> dict[str, Quantity]:
    """What `of_lines` and `of_plane` give, in units of the distance."""
    mean = "radius of the basin: where the mean over directions leaves it" if plane else "mean radius of the basins"
    found: dict[str, Quantity] = {}
    names = {"basin_mean": mean, "basin_least": "radius of the basin in the worst direction"}
    if not plane:
        names["basin_radius"] = "radius of the basin"
    for name, words in names.items():
        dims = ("direction", "side", "score") if name == "basin_radius" else ("score",)
        found[name] = Quantity(words, units, dims)
        found[f"{name}_low"] = Quantity(f"{words}, lower end of the 95 % interval", units, dims)
        found[f"{name}_high"] = Quantity(f"{words}, upper end; infinite where the score never leaves", units, dims)
    for name in PROFILES if plane else ():
        words = "of the worst direction" if "most" in name else "averaged over directions"
        error = "standard error of the score's worsening" if name.endswith("_se") else "worsening of the score"
        over = "part" if name.endswith("_se") else ""
        found[name] = Quantity(f"{error} {words}", "score", ("distance", "score"), over=over)
    return found


def radius(r: np.ndarray, worse: np.ndarray, half: np.ndarray, margin: float) -> Radius:
    """Where a worsening first exceeds the margin on the way out, linear between points, with its 95 % interval.

    `r` ascends from above 0; at 0 nothing is worse. `half` is half the width of the worsening's own intervals: the ends
    are where their upper ends, and their lower ends, first exceed the margin. Where the score never leaves, the value
    is the last distance and the upper end infinite. A worsening of infinity leaves after the point before. NaN where
    an unfinished point (NaN) comes first.
    """
    if not len(r) or math.isnan(margin):
        return UNKNOWN
    r, worse, half = (np.concatenate([[0.0], values]) for values in (r, worse, half))
    half = np.where(np.isinf(worse), 0.0, half)
    value, low, high = (_left(r, values, margin) for values in (worse, worse + half, worse - half))
    last = _first_above(worse - half, margin)
    if last is not None and (last == len(r) or math.isinf(worse[last])):
        high = float(r[last]) if last < len(r) else math.inf
    return value, low, high


def _left(r: np.ndarray, values: np.ndarray, margin: float) -> float:
    """Where values first cross the margin, linear between points; NaN where it is not known."""
    i = _first_above(values, margin)
    if i is None:
        return math.nan
    if i == len(r) or math.isinf(values[i]):
        return float(r[i - 1])
    return float(r[i - 1] + (margin - values[i - 1]) / (values[i] - values[i - 1]) * (r[i] - r[i - 1]))


def _first_above(values: np.ndarray, margin: float) -> int | None:
    """Position of the first value above the margin, their number where none is; None where it is not known."""
    i = next((i for i, value in enumerate(values) if not value <= margin), len(values))
    return None if i < len(values) and math.isnan(values[i]) else i


def _together(radii: np.ndarray, parts: np.ndarray) -> dict[str, np.ndarray]:
    """Mean and least of radii (curve, score, 3), the former's interval from theirs.

    The distances of their ends add up like errors with the correlations that the worsenings (curve, score, part) have
    where the curves leave (Zou & Donner 2008, Stat. Med. 27:1693).
    """
    value, (curves, scores) = radii[..., 0], radii.shape[:2]
    bounded = np.full((scores, 3), np.nan)
    for s, mean in enumerate(value.mean(axis=0)):
        lengths = np.abs(radii[:, s, 1:].T - value[:, s])  # (end, curve)
        with np.errstate(invalid="ignore", divide="ignore"):
            together = np.nan_to_num(np.corrcoef(parts[:, s]).reshape(curves, curves), nan=1.0)
            below, above = (np.sqrt(max(one @ together @ one, 0.0)) / curves for one in lengths)
        bounded[s] = mean, max(mean - below, 0.0), np.inf if np.isinf(lengths[1]).any() else mean + above
    least = np.array([_least([(*one,) for one in radii[:, s].tolist()]) for s in range(radii.shape[1])])
    return {
        f"{name}{end}": values[:, i]
        for name, values in (("basin_mean", bounded), ("basin_least", least)) for i, end in enumerate(ENDS)
    }  # fmt: skip


def of_lines(data: Mapping[str, np.ndarray], *, forward: bool = False) -> dict[str, np.ndarray]:
    """Radii of every direction to either side of t = 0, their mean and the least, from the arrays of lines.

    `forward`: mean and least are over the radii at positive t alone.
    """
    (worse, error), (_, parts) = (_finished(data, name) for name in ("score_worse_se", "score_worse_part"))
    t, half = data["t"], quantile(data["score_samples"]) * error
    margins, directions = data["score_margin"], worse.shape[0]
    radii = np.full((directions, len(SIDES), len(margins), 3), np.nan)
    leaving = np.full((*radii.shape[:-1], parts.shape[-1]), np.nan)
    for side, sign in enumerate(SIDES):
        out = np.flatnonzero(sign * t > 0)[:: int(sign)]
        for k, s in np.ndindex(directions, len(margins) if len(out) else 0):
            margin, on_way = float(margins[s]), worse[k, out, s]
            radii[k, side, s] = radius(sign * t[out], on_way, half[k, out, s], margin)
            leaving[k, side, s] = parts[k, out[min(_first_above(on_way, margin) or 0, len(out) - 1)], s]
    sides = [side for side, sign in enumerate(SIDES) if (sign * t > 0).any() and (sign > 0 or not forward)]
    each = {f"basin_radius{end}": radii[..., i] for i, end in enumerate(ENDS)}
    curves = (of[:, sides or [1]].reshape(-1, *of.shape[2:]) for of in (radii, leaving))
    return {**each, **_together(*curves)}


def distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Distances from a plane's origin at which every direction is within the grid; 0 alone where none is."""
    reach = min(x[-1], -x[0], y[-1], -y[0])
    step = max(np.diff(x).max(), np.diff(y).max())
    return np.linspace(0.0, reach, max(math.ceil(reach / step - 1e-9), 1) + 1) if reach > 0 else np.zeros(1)


def of_plane(data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Radii of the mean over directions and of the worst direction, and the profiles of both, from a plane's arrays.

    Along each of `ANGLES` rays values are bilinear between grid points; rays end at the border of the grid. Errors are
    those of the same numbers of disjoint parts of the samples. The interval of the worst direction is that of the ray
    on which the score leaves first.
    """
    x, y, r, margins = data["x"], data["y"], data["distance"], data["score_margin"]
    worse, parts = _finished(data, "score_worse_part")
    wide = quantile(parts.shape[-1])
    theta = np.arange(ANGLES) * (2 * np.pi / ANGLES)
    rays = np.stack([np.cos(theta), np.sin(theta)], axis=1)  # (angle, 2)
    around, around_parts = _between(x, y, worse, parts, r[:, None, None] * rays)  # (distance, angle, score[, part])
    worst = np.where(np.isnan(around), np.inf, around).argmax(axis=1)[:, None]
    found: dict[str, np.ndarray] = {
        "profile_mean": around.mean(axis=1), "profile_mean_se": error_over_parts(around_parts.mean(axis=1)),
    }  # fmt: skip
    for name, values in (("profile_most", around), ("profile_most_se", error_over_parts(around_parts))):
        found[name] = np.take_along_axis(values, worst, axis=1)[:, 0]
    for name in PROFILES:
        found[name][0] = 0.0
    radii = np.full((2, len(margins), 3), np.nan)
    step = min(np.diff(x).min(), np.diff(y).min())
    lengths = [_length(x, y, ray) for ray in rays]
    ways = [step * np.arange(1, math.floor(length / step + 1e-9) + 1) for length in lengths]
    points = np.concatenate([way[:, None] * ray for way, ray in zip(ways, rays, strict=True)])
    ends = np.cumsum([len(way) for way in ways])[:-1]
    along, along_parts = _between(x, y, worse, parts, points)
    halves = wide * error_over_parts(along_parts)
    each = zip(ways, np.split(along, ends), np.split(halves, ends), strict=True)
    reached = [(way, *on_ray) for way, *on_ray in each if len(way)]
    for s, margin in enumerate(map(float, margins)):
        radii[0, s] = radius(r[1:], found["profile_mean"][1:, s], wide * found["profile_mean_se"][1:, s], margin)
        radii[1, s] = _least([radius(way, w[:, s], half[:, s], margin) for way, w, half in reached])
    for i, name in enumerate(("basin_mean", "basin_least")):
        found |= {f"{name}{end}": radii[i, :, k] for k, end in enumerate(ENDS)}
    return found


def _least(radii: Sequence[Radius]) -> Radius:
    """The least radius with the ends of its own interval; NaN where any is not known."""
    return UNKNOWN if any(math.isnan(one[0]) for one in radii) else min(radii, default=UNKNOWN)


def _finished(data: Mapping[str, np.ndarray], beside: str) -> tuple[np.ndarray, np.ndarray]:
    """Worsening and another array; NaN where a point is not finished, infinity where a finished one is not finite."""
    done, worse = data["done"] == 1, data["score_worse"]
    other = data.get(beside, np.full_like(worse[..., None], np.nan))  # results without parts have no errors from them
    finite = np.where(np.isfinite(worse), worse, np.inf)
    first, second = (
        np.where(done.reshape(*done.shape, *(1,) * (of.ndim - done.ndim)), of, np.nan) for of in (finite, other)
    )
    return first, second


def _length(x: np.ndarray, y: np.ndarray, ray: np.ndarray) -> float:
    """How far a ray from the origin stays within the grid; 0 where the origin is not in it."""
    if not (x[0] <= 0 <= x[-1] and y[0] <= 0 <= y[-1]):
        return 0.0
    ends = [axis[-1] if part > 0 else axis[0] for axis, part in zip((x, y), ray, strict=True)]
    return float(min(end / part for end, part in zip(ends, ray, strict=True) if abs(part) > 1e-12))


def _between(
    x: np.ndarray, y: np.ndarray, worse: np.ndarray, other: np.ndarray, points: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Worsening and another array at points (..., 2) of a grid; infinite in cells with an infinite corner."""
    from scipy.interpolate import RegularGridInterpolator

    lost = np.isinf(worse)
    parts = (np.where(lost, 0.0, worse), lost.astype(float), np.where(lost[..., None], 0.0, other))
    if not (x[0] <= 0 <= x[-1] and y[0] <= 0 <= y[-1]):
        first, second = (np.full((*points.shape[:-1], *part.shape[2:]), np.nan) for part in (worse, other))
        return first, second
    at = np.clip(points, (x[0], y[0]), (x[-1], y[-1]))  # a rounding error outside
    value, share, spread = (RegularGridInterpolator((x, y), part)(at) for part in parts)
    return np.where(share > 1e-9, np.inf, value), spread
