"""Draw the spectral density from the Lanczos runs of the eigenvalue search, on log axes that show the bulk."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import xarray as xr

from landscape.plots import style
from landscape.plots.figure import Figure, Look
from landscape.plots.figures import density
from landscape.plots.figures.density import axis_resolution_of

MEANING = (
    "The density of all Hessian eigenvalues of a mini-batch, mean over mini-batches with its 95 % interval as a "
    "band. It comes at no cost with the eigenvalues: every Lanczos run is a quadrature of the density with "
    "as many nodes as products, coarse in the bulk and sharp at the ends."
)


draw = density.draw  # the mean over mini-batches


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All results overlaid with one broadening."""
    resolution = axis_resolution_of(results)
    legend = [replace(look, marker="") for look in looks]
    note = f"{resolution.note()} Band: 95 % interval over mini-batches."
    return style.overlaid(results, looks, partial(draw, resolution=resolution), height=2.3, legend=legend, note=note)[0]
