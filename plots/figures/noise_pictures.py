"""Draw the mask of every frequency band, its noise, and an image with it (Park & Kim 2022, Fig. D.6)."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style, theme
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "What the networks were given: the frequencies that each band passes (bright, zero frequency in the centre), the "
    "noise of that band alone around grey, and images with it. Noise and masks are the same for all networks on the "
    "same data, so one result is shown."
)
ROWS = 3  # of images at most
PASSED, STOPPED = (1.0, 0.75, 0.1), (0.1, 0.1, 0.15)  # colours of frequencies


def draw(data: xr.Dataset, ax: Axes) -> Axes:
    """Draw a column per band: mask, noise on the first image, and the first images with it; empty bands stay white."""
    bands, images = data["band"].values, data["image"].values[:ROWS]
    noisy = data["noisy_image"].transpose("band", "picture", "channel", "row", "column").values
    rows: list[list[np.ndarray | None]] = [[None, *np.where(data["mask"].values[..., None] == 1, PASSED, STOPPED)]]
    rows.append([None, *(np.clip(0.5 + one[0] - images[0], 0, 1).transpose(1, 2, 0) for one in noisy)])
    for k, image in enumerate(images):
        rows.append([image.transpose(1, 2, 0), *(one[k].transpose(1, 2, 0) for one in noisy)])
    columns = ["image", *(f"{band:.2g}π" for band in bands)]
    return style.mosaic(ax, rows, columns, ["mask", "noise", *([""] * len(images))])


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """The first result."""
    count = len(results[0]["band"]) + 1
    height = theme.page_width() * (2 + min(ROWS, len(results[0]["picture"]))) / count
    figure = style.page(results, looks, height=height)
    draw(results[0], figure.subplots())
    return figure


def select(results: Sequence[xr.Dataset]) -> list[int]:
    """The first result alone."""
    return [0] if results else []
