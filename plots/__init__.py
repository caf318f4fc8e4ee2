"""The figures, by file name. Adding one: a file here with its name, a line in this table, a test."""

from __future__ import annotations

import csv
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr

from landscape.options import OptionError
from landscape.plots import style
from landscape.plots.appearance import Look, looks
from landscape.results import reader

FORMATS = ("png", "pdf", "svg")
# No time of writing in the files: equal figures are equal files.
_METADATA: Mapping[str, dict[str, None]] = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Figure:
    """A figure: the module of its own name, which holds what is below, imported on use.

    - a function of that name, `(data, axes) -> axes`, drawing one answer;
    - `page(answers, looks)`, the whole figure of all answers;
    - `MEANING`, two sentences: what the numbers mean, and what they do not;
    - where it draws some answers only, `select(answers)`, their positions.

    Args:
        name: of the module, the function and the file.
        probe: whose answers it draws.
        needs: quantities that an answer must hold; the first must have a finite value by now.
        lacks: axes that it must not have.
    """

    name: str
    probe: str
    needs: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    @property
    def module(self) -> Any:
        """The module, imported."""
        return import_module(f"landscape.plots.{self.name}")

    def draw(self, data: xr.Dataset, axes: Any) -> Any:
        """Draw one answer and return the axes."""
        return getattr(self.module, self.name)(data, axes)

    def drawable(self, data: xr.Dataset) -> bool:
        """Whether an answer has got far enough to be drawn."""
        fits = all(name in data for name in self.needs) and not any(axis in data.dims for axis in self.lacks)
        return fits and bool(np.isfinite(data[self.needs[0]].values).any())

    def selected(self, answers: Sequence[xr.Dataset]) -> list[xr.Dataset]:
        """Those of the drawable answers that belong into the figure."""
        drawable = [data for data in answers if self.drawable(data)]
        select = getattr(self.module, "select", None)
        return drawable if select is None else [drawable[i] for i in select(drawable)]


FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure("surface", "surface", needs=("loss", "done", "x", "y")),
        Figure("surface_heat", "surface", needs=("loss", "done", "x", "y")),
        Figure("surface_error", "surface", needs=("loss_se", "loss", "x", "y")),
        Figure("surface_relief", "surface", needs=("loss", "x", "y")),
        Figure("surface_height", "surface", needs=("loss", "height", "radius")),
        Figure("surface_3d", "surface", needs=("loss", "done", "x", "y")),
        Figure("objective", "surface", needs=("objective", "done", "x", "y")),
        Figure("path", "surface", needs=("loss", "done", "x", "y", "path_x", "path_y")),
        Figure("saddle", "surface", needs=("loss", "rise_se", "done", "x", "y")),
        Figure("line", "line", needs=("loss", "loss_se", "accuracy", "done", "t")),
        Figure("trajectory", "trajectory", needs=("radius", "angle", "pc1", "pc2")),
        Figure("trajectory_loss", "trajectory", needs=("loss", "loss_se", "plane_loss", "plane_loss_se", "off_plane")),
        Figure("hessian", "hessian", needs=("eigenvalue",), lacks=("group",)),
        Figure("hessian_density", "hessian", needs=("nodes", "weights"), lacks=("group",)),
        Figure("hessian_loss", "hessian", needs=("eigenvalue", "loss"), lacks=("group",)),
        Figure("hessian_phases", "hessian", needs=("nep", "ape", "largest"), lacks=("group",)),
        Figure("hessian_layers", "hessian", needs=("largest", "smallest", "name", "group")),
        Figure("trace", "trace", needs=("trace", "trace_se", "batch_trace", "batch_trace_se")),
        Figure("density", "density", needs=("nodes", "weights", "mean", "mean_se", "smallest", "largest")),
        Figure("fourier", "fourier", needs=("delta_log_amplitude", "frequency", "depth")),
        Figure("fourier_depth", "fourier", needs=("high_frequency", "depth", "kind", "reduces")),
        Figure("fourier_spectrum", "fourier", needs=("spectrum", "row_frequency", "column_frequency", "kind")),
        Figure("variance", "variance", needs=("variance", "depth", "kind", "reduces")),
        Figure("similarity", "similarity", needs=("cka", "stage", "kind", "reduces", "other_stage")),
        Figure("attention", "attention", needs=("distance", "mutual_information", "depth")),
        Figure("attention_diversity", "attention", needs=("token_cosine", "head_cosine", "depth_cosine", "depth")),
        Figure("attention_spectrum", "attention", needs=("image_singular_value", "token_singular_value", "depth")),
        Figure("lesion", "lesion", needs=("accuracy_drop", "accuracy_drop_se", "name", "kind", "stage")),
        Figure("noise", "noise", needs=("accuracy_drop", "accuracy_drop_se", "band")),
        Figure("probe_linear", "probe-linear", needs=("accuracy", "accuracy_se", "depth", "kind", "reduces")),
    )
}


def draw(
    path: Path | str,
    out: Path | str,
    formats: Sequence[str] = ("png",),
    probes: Sequence[str] | None = None,
    *,
    eigenvalues: tuple[float, float] | None = None,
) -> list[Path]:
    """Draw every figure that the results allow, all answers of a probe in one; returns the files written.

    Answers with nothing finished are left out and logged; `left_out` names them.

    Args:
        path: results file.
        out: folder for the figures.
        formats: any of `FORMATS`.
        probes: only the figures of these.
        eigenvalues: of the figure of max-eigenvalue spectra, such as (-120, 900) in the paper; default: the data

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
    found, folder = reader.by_checkpoint(reader.groups(path)), Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, expected a folder for the figures; give another --out")
    for group in _left_out(found):
        _log.info("no figure of %s yet", group)
    everyone = [data for _, data in found]
    written = []
    for figure in FIGURES.values():
        answers = figure.selected([data for name, data in found if name.partition("/")[0] == figure.probe])
        if answers and (probes is None or figure.probe in probes):
            folder.mkdir(parents=True, exist_ok=True)
            page = figure.module.page
            if figure.name == "hessian" and eigenvalues is not None:
                page = partial(page, ranges=((eigenvalues[0], 0.0), (0.0, eigenvalues[1])))
            written += _save(figure.name, page, answers, looks(answers, among=everyone), folder, formats)
    return written


def draw_run(folder: Path, out: Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Draw loss and accuracy of a training run from its `metrics.csv`; returns the files written, `curves.*`.

    Raises:
        FileNotFoundError: the folder has none.
        ValueError: it is no table of a run.
    """
    from landscape.plots import curves

    file = folder / "metrics.csv"
    if not file.exists():
        raise FileNotFoundError(
            f"no metrics.csv in {folder}; give a results file, or the folder of a run: landscape train"
        )
    try:
        lines = list(csv.DictReader(file.read_text().splitlines()))
        run = {name: np.array([float(line[name]) for line in lines]) for name in (*curves.NEEDS, "seconds")}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is no table of a training run ({error}); train again, or delete it") from None
    if not lines:
        raise ValueError(f"{file} holds no finished epoch yet; wait for the first")
    out.mkdir(parents=True, exist_ok=True)
    return _written("curves", lambda: curves.page(run, folder.resolve().name), out, formats)


def left_out(path: Path | str) -> list[str]:
    """Groups that appear in no figure: nothing of them is finished, or no figure draws their probe."""
    return _left_out(reader.groups(path))


def _left_out(found: Sequence[tuple[str, xr.Dataset]]) -> list[str]:
    return [
        name
        for name, data in found
        if not any(f.drawable(data) for f in FIGURES.values() if f.probe == name.partition("/")[0])
    ]


def _save(
    figure: str,
    page: Callable[..., Any],
    answers: Sequence[xr.Dataset],
    looks: Sequence[Look],
    folder: Path,
    formats: Sequence[str],
) -> list[Path]:
    return _written(figure, lambda: page(answers, looks), folder, formats)


def _written(figure: str, page: Callable[[], Any], folder: Path, formats: Sequence[str]) -> list[Path]:
    paths = [folder / f"{figure}.{name}" for name in formats]
    with matplotlib.rc_context(style.RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a label in any script is welcome
        drawn = page()
        for path, name in zip(paths, formats, strict=True):
            drawn.savefig(path, format=name, metadata=_METADATA[name])
    return paths
