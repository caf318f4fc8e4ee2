"""Draw the mean two-dimensional spectrum of feature maps, per layer (Park & Kim 2022, Fig. 2a shows its diagonal)."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style, theme
from landscape.plots.figure import Axes, Figure, Look, Normalize

MEANING = (
    "The whole Fourier spectrum of the feature maps, zero frequency in the middle of each tile and the highest of the "
    "layer's own grid at its edges: a bright middle alone is a smooth map, a cross stands for edges along the axes, "
    "bright spots off the middle for a periodic pattern, such as from strides. Levels are relative to "
    "each layer's own zero frequency."
)
TILES = 10  # per network at most, in one column of a paper half of them; more are too small to read
PITCH = 2.3  # of tiles that are 2 (from -pi to pi) wide
HEIGHT = 0.98  # inches per network
MAP = "viridis"
NOTE = "Frequencies from -π to π of each layer's own grid, vertical and horizontal."


def draw(data: xr.Dataset, ax: Axes, *, norm: Normalize | None = None) -> Axes:
    """Draw the mean spectra of the layers, or of ten evenly spaced ones, side by side from shallow to deep."""
    norm = norm or _scale([data])
    layers = shown(data)
    for place, layer in enumerate(layers):
        row = data.isel(layer=layer)
        sides = [row[f"{side}_frequency"].values for side in ("column", "row")]
        (left, right), (low, high) = (_edges(side[np.isfinite(side)]) for side in sides)
        values = row["spectrum"].values[: np.isfinite(sides[1]).sum(), : np.isfinite(sides[0]).sum()]
        x = place * PITCH
        ax.imshow(values, origin="lower", extent=(x + left, x + right, low, high), cmap=MAP, norm=norm)
        name = str(layer) if theme.narrow() else f"{layer} {row['kind'].item()}"
        ax.text(x, 1.15, name, ha="center", va="bottom", fontsize=style.SMALL)
    ax.set(xlim=(-1.15, max(len(layers) - 1, 0) * PITCH + 1.15), ylim=(-1.15, 1.6), aspect="equal")
    ax.axis("off")
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One row of tiles per network, with one scale."""
    known = {(len(shown(data)), len(_known(data))) for data in results}
    thinned = [f"{some} of {every}" for some, every in sorted(known) if some < every]
    note = f"{NOTE} Drawn: {' and '.join(thinned)} layers, evenly spaced." if thinned else NOTE
    figure = style.page(results, looks, height=HEIGHT * len(results), note=note)
    axes = figure.subplots(len(results), 1, squeeze=False)[:, 0]
    norm = _scale(results)
    for data, look, ax in zip(results, looks, axes, strict=True):
        draw(data, ax, norm=norm)
        ax.set_xlim(-1.15, (_most() - 1) * PITCH + 1.15)  # tiles of one size in every row
        ax.set_title(look.label, fontsize=style.RC["axes.titlesize"], loc="left", pad=2)
    bar = style.colour_bar(figure, list(axes), norm, MAP, "", aspect=12 * len(results), pad=0.01)
    bar.set_label("Δ\u00a0ln\u00a0A", fontsize=style.SMALL)
    return figure


def _most() -> int:
    return TILES // 2 if theme.narrow() else TILES


def shown(data: xr.Dataset) -> list[int]:
    """Positions of the layers that have a spectrum, thinned evenly to `TILES`."""
    found = _known(data)
    return [found[i] for i in np.unique(np.linspace(0, len(found) - 1, _most()).round().astype(int))] if found else []


def _known(data: xr.Dataset) -> list[int]:
    """Positions of the layers with more than one frequency and finite values."""
    rows, columns = (np.isfinite(data[f"{side}_frequency"].values).sum(axis=1) for side in ("row", "column"))
    finite = np.isfinite(data["spectrum"].values).any(axis=(1, 2))
    found: list[int] = np.flatnonzero((rows * columns > 1) & finite).tolist()
    return found


def _edges(frequencies: np.ndarray) -> tuple[float, float]:
    """Outer edges of the cells centred on some frequencies."""
    half = 1.0 / len(frequencies)
    return float(frequencies[0]) - half, float(frequencies[-1]) + half


def _scale(results: Sequence[xr.Dataset]) -> Normalize:
    """From the lowest to the highest value that will be drawn; zero frequencies, which are 0, do not count."""
    from matplotlib.colors import Normalize

    values = np.concatenate([data["spectrum"].values[shown(data)].ravel() for data in results])
    values = values[np.isfinite(values) & (values != 0)]
    if not len(values):
        return Normalize(-1, 0)
    return Normalize(float(values.min()), max(float(values.max()), 0.0))
