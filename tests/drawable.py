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
    "tokens_moved",
}  # fmt: skip
EVERYDAY = [name for name in FIGURES if name not in SPECIAL]


def result_of(study: Path, probe: str, label: str = VIT) -> xr.Dataset:
    ((_, data),) = reader.find(study, probe=probe, label=label)
    return data


def axes_for(name: str) -> Any:
    return FIGURES[name].axes_in(Figure())
