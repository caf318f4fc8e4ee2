"""Marks in figures where numbers or errors are infinite or not numbers."""

from pathlib import Path

import numpy as np
import pytest
from drawable import result_of
from matplotlib.figure import Figure

from landscape.plots import broken
from landscape.plots.figures import lesion


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


@pytest.mark.slow
def test_a_removal_after_which_the_loss_is_not_a_number_is_marked(study: Path) -> None:
    data = result_of(study, "lesion").copy(deep=True)
    data["loss_increase"][:2] = [np.nan, np.inf]
    ax = lesion.bars(data, Figure().subplots(), "loss_increase", "loss")
    (marks,) = (line for line in ax.lines if line.get_marker() == "^")
    assert list(marks.get_xdata()) == [0, 1]
