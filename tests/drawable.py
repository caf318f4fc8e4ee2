"""Results to draw: those of the made-up study, and the axes that each figure needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import synthetic
import xarray as xr
from matplotlib.figure import Figure

from landscape.plots import FIGURES
from landscape.results import reader

VIT = synthetic.NETWORKS[0].label
# Of some results only: tests of their own.
SPECIAL = {
    "hessian_phases", "hessian_layers", "saddle", "noise_pictures", "calibration_train", "calibration_test",
    "tokens_moved", "density_blocks", "trace_blocks",
}  # fmt: skip
OF_SEVERAL = {"calibration_test"}  # of those, what a file of several networks has
UNFINISHED = {  # by the share of finished units: no number of the figure is known yet
    # a variance between groups; a mean over all corruptions; a change from the intact network, measured first; planes
    # of single images, which come after the lines
    0.001: {"noise_scale", "corruption_sizes", "sensitivity", "sensitivity_predictor", "input_images"},
    0.4: {"corruption_sizes"},
}
EVERYDAY = [name for name in FIGURES if name not in SPECIAL]


def result_of(study: Path, probe: str, label: str = VIT) -> xr.Dataset:
    ((_, data),) = reader.find(study, probe=probe, label=label)
    return data


def axes_for(name: str) -> Any:
    return FIGURES[name].axes_in(Figure())
