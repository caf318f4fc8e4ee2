"""Results to draw, those of the made-up study, the axes that each figure needs, and what a readable page is."""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import synthetic
import xarray as xr
from matplotlib.figure import Figure

from landscape.plots import FIGURES
from landscape.plots.tidy import _gap, _shown, _touch
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


def texts(page: Figure) -> list[Any]:
    """Texts that a reader sees: what is written in figure and axes, and labels of flat axes, without those of ticks."""
    shown = [text for part in (page, *page.subfigs) for text in part.texts]
    shown += [text for legend in page.legends for text in legend.get_texts()]
    for ax in (ax for ax in page.axes if ax.get_visible()):
        legend = ax.get_legend()
        shown += [ax.title, *ax.texts, *(legend.get_texts() if legend else ())]
        if ax.axison and ax.name == "rectilinear":
            shown += [ax._left_title, ax._right_title, ax.xaxis.label, ax.yaxis.label]  # type: ignore[attr-defined]
    return [text for text in shown if text.get_visible() and text.get_text().strip()]


def check_layout(page: Figure, name: str) -> None:
    """No text of a drawn figure is cut off, covers another or is below 6 pt, and labels of ticks do not touch.

    A logarithmic axis has two numbers at least, and powers of ten without factors.
    """
    page.dpi = matplotlib.rcParams["savefig.dpi"]
    boxes = []
    for ax in page.axes:
        for side, axis in enumerate((ax.xaxis, ax.yaxis) if ax.name == "rectilinear" else ()):
            labels = [(label, label.get_window_extent()) for label in _shown(axis)]
            said = [label.get_text() for label, _ in labels]
            assert axis.get_scale() != "log" or (len(said) != 1 and r"\times" not in "".join(said)), (name, said)
            pairs = itertools.pairwise(box for _, box in labels)
            assert not any(_touch(one, other, side, _gap(page, side)) for one, other in pairs), name
            boxes += labels if ax.axison and ax.get_visible() else []
        sizes = [text.get_fontsize() for text in ax.findobj(matplotlib.text.Text) if text.get_text()]
        assert min(sizes, default=6.0) >= 6.0, name
    boxes += [(text, text.get_window_extent()) for text in texts(page)]
    assert [text.get_text() for text, box in boxes if box.x0 < -1 or box.x1 > page.bbox.x1 + 1] == []
    ends = np.array([[[box.x0, box.y0], [box.x1, box.y1]] for _, box in boxes])  # (text, end, axis)
    reach = np.minimum(ends[:, None, 1], ends[:, 1]) - np.maximum(ends[:, None, 0], ends[:, 0])  # in pixels
    one, other = np.nonzero(np.triu(reach.min(axis=-1) > 1, k=1))
    assert [(boxes[i][0].get_text(), boxes[j][0].get_text()) for i, j in zip(one, other, strict=True)] == []


def of_networks(study: Path, name: str, count: int) -> list[xr.Dataset]:
    """Results of so many networks for a figure, each under a label of its own."""
    entry = FIGURES[name]
    stored = entry.selected([data for group, data in stored_in(study) if group.startswith(f"{entry.probe}/")])
    return [data.assign_attrs(label=f"{data.attrs['label']} {i}") for i, data in enumerate((12 * stored)[:count])]
