"""Draw max-eigenvalue spectra of the Hessian in two panels (Park & Kim, arXiv 2105.12639 and 2202.06709)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.figure import Axes, Figure, Look
from landscape.results.reader import parameters_of
from landscape.statistics import ratio, rounding
from landscape.statistics.paired import Difference, paired_t
from landscape.statistics.seed_groups import FEWEST, two_groups
from landscape.statistics.stored import half_width

MEANING = (
    "The largest-magnitude Hessian eigenvalues of many mini-batches: NEP is the share of negative ones (non-"
    "convexity), APE the mean of the positive ones (sharpness), each with the 95 % bootstrap interval over "
    "mini-batches. They depend on batch size, phase of training, augmentation and weight decay: compare only "
    "results of one protocol; of the preconditioned Hessian, a dotted line is the stability threshold."
)
Range = tuple[float, float]
FEW = 10  # eigenvalues of a side from which it has a density: of fewer each is a tick, of which a kernel makes a hill
UNEVEN = 10.0  # ratio of the widths of spectra from which a linear axis hides the lower one
FAR = 2.0  # a stability threshold beyond so many times the largest eigenvalues is not drawn
PAPER: tuple[Range, Range] = ((-120.0, 0.0), (0.0, 900.0))


def draw(
    data: xr.Dataset, axes: tuple[Axes, Axes], *, look: Look, ranges: tuple[Range, Range] | None = None
) -> tuple[Axes, Axes]:
    """Draw the density of all eigenvalues, its negative side on the first axes and its positive side on the second.

    By default the ranges of both sides follow the data's quantiles; the paper's are in `PAPER`.
    """
    values = eigenvalues(data)
    for ax, (low, high) in zip(axes, ranges or axis_ranges([data]), strict=True):
        draw_density(ax, values, np.linspace(low, high, 400), look)
        ax.set(xlim=(low, high), xlabel=f"{'preconditioned ' if 'threshold' in data else ''}Hessian eigenvalue")
        if low < (limit := threshold(data)) <= high:
            ax.axvline(limit, color=look.color, linestyle=":", linewidth=0.9)
    top = max(float(np.max(line.get_ydata())) for ax in axes for line in ax.lines)
    for ax in axes:
        ax.set_ylim(0, 1.05 * top or 1.0)
    axes[0].set_ylabel("density")
    return axes


def draw_density(ax: Axes, values: np.ndarray, at: np.ndarray, look: Look) -> np.ndarray:
    """Draw the density of eigenvalues, which is returned, and those of a side with few as ticks on the axis."""
    curve = density(values, at)
    ax.plot(at, curve, color=look.color, linestyle=look.line, label=look.label)
    ax.fill_between(at, curve, color=look.color, alpha=0.07, linewidth=0)
    few = [float(v) for side in sides(values) if side.size < FEW for v in side if at[0] < v < at[-1]]
    if few:
        foot, across = [0.03] * len(few), ax.get_xaxis_transform()
        ax.scatter(few, foot, 40, color=look.color, marker="|", linewidths=0.8, transform=across, clip_on=False)
    return curve


def page(results: Sequence[xr.Dataset], looks: Sequence[Look], *, ranges: tuple[Range, Range] | None = None) -> Figure:
    """All results overlaid, NEP and APE in the legend; a logarithmic density where the peaks are very uneven."""
    pairs = list(zip(results, looks, strict=True))
    legend = [replace(look, label=f"{look.label}: {_numbers(data)}", marker="") for data, look in pairs]
    note = f"In brackets: 95 % intervals over mini-batches. {ticks(results)}".rstrip()
    if uneven(results):
        note += f" Logarithmic density, as the spectra differ in width by more than {UNEVEN:g} times."
    figure = style.page(results, looks, height=2.1, legend=legend, note=note)
    one_sided = not any((eigenvalues(data) < 0).any() for data in results)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[0.3 if one_sided else 1.0, 1.0])
    for data, look in pairs:
        draw(data, (left, right), look=look, ranges=ranges or axis_ranges(results))
    even_out((left, right), results)
    return figure


def ticks(results: Sequence[xr.Dataset]) -> str:
    """What ticks on the axis are, for the caption; nothing where there are none."""
    few = any(0 < side.size < FEW for data in results for side in sides(eigenvalues(data)))
    return f"Ticks: the eigenvalues of a side with fewer than {FEW}, which has no density." if few else ""


def uneven(results: Sequence[xr.Dataset]) -> bool:
    """Whether one sharp peak would flatten the others: by the widths of the spectra, not by how a kernel smooths them.

    The peak of a density is about the inverse of the range that holds half of the eigenvalues.
    """
    quartiles = [np.quantile(values, (0.25, 0.75)) for data in results if (values := eigenvalues(data)).size > 1]
    widths = [high - low for low, high in quartiles if high > low]
    return len(widths) > 1 and max(widths) > UNEVEN * min(widths)


def even_out(axes: tuple[Axes, Axes], results: Sequence[xr.Dataset]) -> None:
    """Name the sides; make the density that they share logarithmic where the spectra are uneven."""
    left, right = axes
    if uneven(results):
        peaks = [
            max(float(np.max(line.get_ydata())) for line in pair) for pair in zip(left.lines, right.lines, strict=True)
        ]
        left.set_yscale("log")
        left.set_ylim(0.03 * min(filter(None, peaks), default=1.0), 2 * (max(peaks) or 1.0))
    left.set_title("negative")
    right.set_title("positive")
    right.set_ylabel("")


def threshold(data: xr.Dataset) -> float:
    """The eigenvalue at which the optimiser becomes unstable; NaN for other matrices than the preconditioned one."""
    return float(data["threshold"].max()) if "threshold" in data else np.nan


def eigenvalues(data: xr.Dataset) -> np.ndarray:
    """All finite eigenvalues of the finished mini-batches."""
    values = data["eigenvalue"].values.ravel()
    return np.asarray(values[np.isfinite(values)])


def axis_ranges(results: Sequence[xr.Dataset]) -> tuple[Range, Range]:
    """Ranges of both sides that hold nearly all values of every result; single outliers do not stretch them."""
    low, high = 0.0, 0.0
    for data in results:
        values = eigenvalues(data)
        negative, positive = values[values < 0], values[values > 0]
        low = min(low, 1.15 * float(np.quantile(negative, 0.01)) if negative.size else 0.0)
        high = max(high, 1.15 * float(np.quantile(positive, 0.99)) if positive.size else 0.0)
        high = max(high, 1.05 * limit if (limit := threshold(data)) < FAR * high else 0.0)
    high = high or -low or 1.0
    return (low or -0.1 * high, 0.0), (0.0, high)


def sides(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The negative eigenvalues, and the others."""
    return values[values < 0], values[values >= 0]


def density(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Gaussian kernel density, each side of 0 by itself: the areas are NEP and 1 - NEP, or 0 of fewer than `FEW`.

    Kernels are reflected at 0, since those of many small positive eigenvalues would reach far into the negative ones.
    """
    positive = at >= 0 if at.max() > 0 else np.zeros(len(at), dtype=bool)  # 0 ends a range of negative ones
    found = np.zeros(len(at))
    for own, there in zip(sides(values), (~positive, positive), strict=True):
        if own.size >= FEW and there.any():
            width = _bandwidth(own) or 0.01 * float(np.abs(at).max())  # a spike that can be seen
            z = (at[there][:, None] - np.concatenate([own, -own])) / width  # (points, values)
            found[there] = np.exp(-0.5 * z**2).sum(axis=1) / (values.size * width * np.sqrt(2 * np.pi))
    return found


def _bandwidth(values: np.ndarray) -> float:
    """Silverman's robust bandwidth, 0.9 min(std, IQR / 1.34) n^(-1/5); a tenth of equal values.

    The plain standard deviation would let a few very large eigenvalues smear the many small ones.
    """
    spread = np.quantile(values, 0.75) - np.quantile(values, 0.25)
    deviation = values.std(ddof=1) if values.size > 1 else 0.0
    return float(0.9 * (min(deviation, spread / 1.34) or deviation) * values.size**-0.2 or 0.1 * np.abs(values).max())


def _numbers(data: xr.Dataset) -> str:
    parts = [f"{name.upper()} {with_interval(data, name)}" for name in ("nep", "ape") if name in data]
    if "stability" in data and data["stability"].ndim == 0:
        stability = rounding.plus_minus(float(data["stability"]), float(half_width(data, "stability")))
        parts = [f"{stability} of the stability threshold {threshold(data):.3g}"]
    found = np.isfinite(data["eigenvalue"].values)
    unsure = int((found & (data["converged"].values == 0)).sum())
    return ", ".join(parts + ([f"{unsure} of {found.sum()} not converged"] if unsure else []))


def with_interval(data: xr.Dataset, name: str) -> str:
    """NEP or APE as text, with its interval where that is known."""
    value, low, high = (
        float(data.variables[key].values) if key in data else np.nan for key in (name, f"{name}_low", f"{name}_high")
    )
    return f"{value:.3g} [{low:.3g}, {high:.3g}]" if np.isfinite(low + high) else f"{value:.3g}"


def notes(data: xr.Dataset) -> dict[str, str]:
    """The threshold of the optimiser, and what not to trust."""
    found = {"threshold": f"{threshold(data):.4g}"} if np.isfinite(threshold(data)) else {}
    stored = data.variables
    axes = [axis for axis in ("group", "batch", "rank") if axis in stored["eigenvalue"].dims]
    values = stored["eigenvalue"].transpose(*axes).values
    finite = np.isfinite(values)
    done = stored["done"].transpose(*axes[:-1]).values == 1
    if (lost := done & ~finite.any(-1)).any():
        found["not finite"] = _mini_batches(lost)
    unsure = (stored["converged"].transpose(*axes).values == 0) & finite
    if unsure.any():
        found["not converged"] = f"{unsure.sum()} of {finite.sum()} values, {_mini_batches(unsure.any(-1))}"
    if "missed" in data and (missed := stored["missed"].values).max(initial=0) > 0:
        found["found by a second search"] = str(int(missed.sum()))
    elif parameters_of(data).get("verify") is False and values.shape[-1] > 1:
        found["copies of equal values"] = "not excluded"
    return found


def _mini_batches(where: np.ndarray, most: int = 5) -> str:
    """Mini-batches, the last axis, by name: `mini-batches 3, 7, ...`."""
    indices = np.flatnonzero(where.reshape(-1, where.shape[-1]).any(0))
    named = ", ".join(str(i) for i in indices[:most])
    return f"mini-batch{'es' if len(indices) > 1 else ''} {named}{', ...' if len(indices) > most else ''}"


def paired(data: xr.Dataset, other: xr.Dataset) -> Mapping[str, Difference]:
    """Over mini-batches, which hold the same samples; NEP and APE linearised around their values."""
    sizes = [(one["done"].shape, one.attrs.get("batch_size")) for one in (data, other)]
    if data["eigenvalue"].ndim != 2 or sizes[0] != sizes[1]:
        return {}
    mine, theirs = _of_batches(data), _of_batches(other)
    if any(len(values) != one.sizes["batch"] for one in (data, other) for values in _of_batches(one).values()):
        return {}  # a mini-batch whose spectrum is not finite has no pair
    return {name: paired_t(values, theirs[name], "mini-batches") for name, values in mine.items()}


def unpaired(name: str, data: xr.Dataset, other: xr.Dataset) -> Difference | str:
    """The difference of two means over mini-batches of other samples; "" of too few."""
    one, another = (_of_batches(result).get(name, np.empty(0)) for result in (data, other))
    return two_groups(one, another, "mini-batches") if min(len(one), len(another)) >= FEWEST else ""


def _of_batches(data: xr.Dataset) -> dict[str, np.ndarray]:
    """Values per mini-batch, (batch,), whose means are NEP, APE and the mean largest eigenvalue; none otherwise.

    A ratio is linearised, so that the spread of the values gives its error.
    """
    if data["eigenvalue"].ndim != 2:
        return {}
    values = data["eigenvalue"].transpose("batch", "rank").values
    values = values[np.isfinite(values).any(axis=1)]
    positive = values > 0
    return {
        "nep": ratio.linearised((values < 0).sum(axis=1), np.isfinite(values).sum(axis=1)),
        "ape": ratio.linearised(np.where(positive, values, 0.0).sum(axis=1), positive.sum(axis=1)),
        "largest eigenvalue": data["largest"].values,
    }
