"""The figures, by file name. Adding one: a file here with its name, a line in this table, a test."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr

from landscape import results
from landscape.plots import style
from landscape.plots.appearance import Look, looks
from landscape.probe import OptionError

FORMATS = ("png", "pdf", "svg")
# No time of writing in the files: equal figures are equal files.
_METADATA: Mapping[str, dict[str, None]] = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Figure:
    """A figure: the module of its own name, which holds what is below, imported on use.

    - a function of that name, `(data, axes) -> axes`, drawing one answer;
    - `page(answers, looks)`, the whole figure of all answers;
    - `MEANING`, two sentences: what the numbers mean, and what they do not.

    Args:
        name: of the module, the function and the file.
        probe: whose answers it draws.
        needs: quantities that an answer must hold; the first must have a finite value by now.
    """

    name: str
    probe: str
    needs: tuple[str, ...]

    @property
    def module(self) -> Any:
        """The module, imported."""
        return import_module(f"landscape.plots.{self.name}")

    def draw(self, data: xr.Dataset, axes: Any) -> Any:
        """Draw one answer and return the axes."""
        return getattr(self.module, self.name)(data, axes)

    def drawable(self, data: xr.Dataset) -> bool:
        """Whether an answer has got far enough to be drawn."""
        return all(name in data for name in self.needs) and bool(np.isfinite(data[self.needs[0]].values).any())


FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure("surface", "surface", needs=("loss", "done", "x", "y")),
        Figure("surface_heat", "surface", needs=("loss", "done", "x", "y")),
        Figure("surface_error", "surface", needs=("loss_se", "loss", "x", "y")),
        Figure("surface_relief", "surface", needs=("loss", "x", "y")),
        Figure("surface_height", "surface", needs=("loss", "height", "radius")),
        Figure("surface_3d", "surface", needs=("loss", "done", "x", "y")),
        Figure("trajectory", "trajectory", needs=("radius", "angle", "pc1", "pc2")),
        Figure("hessian", "hessian", needs=("eigenvalue",)),
        Figure("trace", "trace", needs=("trace", "trace_se", "batch_trace", "batch_trace_se")),
        Figure("density", "density", needs=("nodes", "weights", "mean", "mean_se", "smallest", "largest")),
        Figure("fourier", "fourier", needs=("delta_log_amplitude", "frequency", "depth")),
        Figure("fourier_depth", "fourier", needs=("high_frequency", "depth", "kind", "reduces")),
        Figure("variance", "variance", needs=("variance", "depth", "kind", "reduces")),
        Figure("lesion", "lesion", needs=("accuracy_drop", "accuracy_drop_se", "name", "kind", "stage")),
    )
}


def draw(
    path: Path | str, out: Path | str, formats: Sequence[str] = ("png",), probes: Sequence[str] | None = None
) -> list[Path]:
    """Draw every figure that the results allow, all answers of a probe in one; returns the files written.

    Answers with nothing finished are left out and logged; `left_out` names them.

    Raises:
        OptionError: a format or a probe is unknown.
        FileNotFoundError, ValueError: there is no results file, or `out` is no folder.
    """
    for name in formats:
        if name not in FORMATS:
            raise OptionError(f"format {name} is unknown; ask for {', '.join(FORMATS)}")
    known = {figure.probe for figure in FIGURES.values()}
    for name in probes or ():
        if name not in known:
            raise OptionError(f"there is no figure of a probe {name}; ask for {', '.join(sorted(known))}")
    found, folder = results.by_checkpoint(results.groups(path)), Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, expected a folder for the figures; give another --out")
    for group in _left_out(found):
        _log.info("nothing to draw yet in %s", group)
    everyone = [data for _, data in found]
    written = []
    for figure in FIGURES.values():
        answers = [data for name, data in found if name.partition("/")[0] == figure.probe and figure.drawable(data)]
        if answers and (probes is None or figure.probe in probes):
            folder.mkdir(parents=True, exist_ok=True)
            written += _save(figure, answers, looks(answers, among=everyone), folder, formats)
    return written


def left_out(path: Path | str) -> list[str]:
    """Groups that appear in no figure: nothing of them is finished, or no figure draws their probe."""
    return _left_out(results.groups(path))


def _left_out(found: Sequence[tuple[str, xr.Dataset]]) -> list[str]:
    return [
        name
        for name, data in found
        if not any(f.drawable(data) for f in FIGURES.values() if f.probe == name.partition("/")[0])
    ]


def _save(
    figure: Figure, answers: Sequence[xr.Dataset], looks: Sequence[Look], folder: Path, formats: Sequence[str]
) -> list[Path]:
    paths = [folder / f"{figure.name}.{name}" for name in formats]
    with matplotlib.rc_context(style.RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a label in any script is welcome
        page = figure.module.page(answers, looks)
        for path, name in zip(paths, formats, strict=True):
            page.savefig(path, format=name, metadata=_METADATA[name])
    return paths
