"""Results to draw: those of the made-up study, and the axes that each figure needs."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
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
ERRORS = ("_se", "_low", "_high", "_spread")
KEPT = ("done", "x", "y", "t", "depth", "size", "unit", "batch", "layer", "epoch", "radius", "band", "frequency")
EVERYDAY = [name for name in FIGURES if name not in SPECIAL]
OF_STUDY = [name for name in FIGURES if name in (*EVERYDAY, *OF_SEVERAL)]


@cache
def stored_in(path: Path) -> list[tuple[str, xr.Dataset]]:
    """All results of a file that no test changes, in the order of figures; read once."""
    return reader.by_checkpoint(reader.groups(path))


def result_of(study: Path, probe: str, label: str = VIT) -> xr.Dataset:
    """A copy of one result."""
    (found,) = (d for name, d in stored_in(study) if name.startswith(f"{probe}/") and d.attrs["label"] == label)
    return found.copy(deep=True)


def spoilt(data: xr.Dataset, *, errors: bool) -> xr.Dataset:
    """A result with -inf, inf and NaN as the first, the second and the last value of its errors, or of its numbers."""
    changed = {}
    for name, values in data.data_vars.items():
        is_error = str(name).endswith(ERRORS)
        if values.dtype.kind == "f" and name not in KEPT and is_error == errors:
            whole = np.array(values.values)
            for place, value in ((0, -np.inf), (1, np.inf), (-1, np.nan)):
                if abs(place) < whole.size:
                    whole.flat[place] = value
            changed[name] = values.copy(data=np.full(whole.shape, np.inf) if whole.size == 1 else whole)
    return data.assign(changed)


def axes_for(name: str) -> Any:
    return FIGURES[name].axes_in(Figure())
