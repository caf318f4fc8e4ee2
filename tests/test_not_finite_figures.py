"""Figures of results whose numbers or errors are infinite or not numbers: they draw, and mark where those are."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from drawable import EVERYDAY, VIT, result_of
from matplotlib.figure import Figure

from landscape.plots import FIGURES, appearance, broken, lesion

ERRORS = ("_se", "_low", "_high", "_spread")
KEPT = ("done", "x", "y", "t", "depth", "size", "unit", "batch", "layer", "epoch", "radius", "band", "frequency")


def spoilt(data: xr.Dataset, *, errors: bool) -> xr.Dataset:
    """A result with -inf, inf and NaN as the first, the second and the last value of its errors, or of its numbers."""
    changed = data.copy(deep=True)
    for name, values in changed.data_vars.items():
        is_error = str(name).endswith(ERRORS)
        if values.dtype.kind == "f" and name not in KEPT and is_error == errors:
            whole = np.array(values.values)
            for place, value in ((0, -np.inf), (1, np.inf), (-1, np.nan)):
                if abs(place) < whole.size:
                    whole.flat[place] = value
            if whole.size == 1:
                whole = np.full(whole.shape, np.inf)
            changed[name] = values.copy(data=whole)
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYDAY)
@pytest.mark.parametrize("errors", [True, False], ids=["errors", "numbers"])
def test_a_figure_of_numbers_that_are_not_finite_draws(study: Path, name: str, errors: bool) -> None:
    probe = FIGURES[name].probe
    data = spoilt(result_of(study, probe, VIT), errors=errors)
    if FIGURES[name].drawable(data):
        page = FIGURES[name].module.page([data], appearance.looks([data]))
        page.savefig(io.BytesIO(), format="png", dpi=50)


def test_infinite_values_are_at_the_edge_and_values_without_an_error_are_crossed() -> None:
    ax = Figure().subplots()
    at, value = np.arange(5.0), np.array([1.0, np.inf, 2.0, -np.inf, np.nan])
    error = np.array([0.1, 0.1, -np.inf, np.nan, np.inf])
    ax.errorbar(at, value, broken.bar(error))
    broken.mark(ax, at, value, error)
    broken.mark(ax, at, value, error)  # of a second network
    marks = {line.get_marker(): line.get_xydata().tolist() for line in ax.lines[1:]}
    assert marks == {"x": [[2.0, 2.0]], "^": [[1.0, 1.0]], "v": [[3.0, 0.0]]}
    assert [text.get_text() for text in ax.texts] == ["× no finite error\ntriangles at the edge: infinite"]
    ax = Figure().subplots()
    broken.mark(ax, at, value, np.stack([error, np.ones(5)]), flat=True)
    marks = {line.get_marker(): line.get_xydata().tolist() for line in ax.lines}
    assert marks == {"x": [[2.0, 2.0]], ">": [[1.0, 1.0]], "<": [[0.0, 3.0]]}


def test_a_removal_after_which_the_loss_is_not_a_number_is_marked(study: Path) -> None:
    data = result_of(study, "lesion").copy(deep=True)
    data["loss_increase"][:2] = [np.nan, np.inf]
    ax = lesion.bars(data, Figure().subplots(), "loss_increase", "loss")
    (marks,) = (line for line in ax.lines if line.get_marker() == "^")
    assert list(marks.get_xdata()) == [0, 1]
