"""Surfaces, lines and paths of a results file as files of other tools."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import xarray as xr

from landscape.exchange import paraview, park2022_csv, tomgoldstein
from landscape.exchange.grid import Course, Grid, course_of, grid_of, lines_of
from landscape.results import reader

# format -> (suffix, how it is written)
WRITERS: Mapping[str, tuple[str, Callable[[Path, Grid], None]]] = {
    "tomgoldstein": (".h5", tomgoldstein.write_surface),
    "csv": (".csv", park2022_csv.write_surface),
    "vtp": (".vtp", paraview.write_vtp),
    "vtk": (".vtk", paraview.write_vtk),
}
OF_LINES = ("tomgoldstein", "vtp")  # the others have no place for them
COURSES: Mapping[str, tuple[str, Callable[[Path, Course], None]]] = {
    "tomgoldstein": ("_proj.h5", tomgoldstein.write_course),
    "vtp": ("-path.vtp", paraview.write_course),
}
T = TypeVar("T")
Part = tuple[str, Callable[[Path], None]]  # what comes after the stem of the file, and how it is written


def export(path: Path, out: Path, formats: Sequence[str], *, label: str | None = None) -> list[Path]:
    """Write every surface, line and trajectory with a finished unit, in files `<label>-<digest>` per format.

    Lines with several directions are counted up behind the name; the path over a surface, and that of a trajectory,
    get a file of their own.

    Args:
        path: results file.
        out: folder, made if absent.
        formats: names in `WRITERS`.
        label: only answers of that label.

    Returns:
        the files.

    Raises:
        FileNotFoundError, ValueError: there is no results file, nothing to export in it, or `out` is no folder.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, expected a folder; give another --out")
    found = [(name, data) for name, data in _answers(path, label) if reader.finished_units(data)]
    parts = [(name, part) for name, data in found for kind in formats for part in _parts(name, data, kind)]
    if not parts:
        labels = sorted({str(data.attrs.get("label", "")) for _, data in _answers(path, None)})
        which = f" with the label {label}, but of {', '.join(labels) or 'none'}" if label else ""
        if found:
            which = f" that {', '.join(formats)} has a place for"
        raise ValueError(f"{path} holds no surface{which} to export; measure one first: landscape surface")
    out.mkdir(parents=True, exist_ok=True)
    return [_whole(out / f"{name.partition('/')[2]}{suffix}", write) for name, (suffix, write) in parts]


def _answers(path: Path, label: str | None) -> list[tuple[str, xr.Dataset]]:
    return [answer for probe in ("surface", "line", "trajectory") for answer in reader.find(path, probe, label)]


def _parts(name: str, data: xr.Dataset, kind: str) -> list[Part]:
    """The files that one answer makes in one format."""
    suffix, write = WRITERS[kind]
    if kind == "tomgoldstein":
        write = partial(tomgoldstein.write_surface, split=_split(data))
    probe = name.partition("/")[0]
    if probe == "trajectory":
        return _course(course_of(data), kind) if np.isfinite(data["pc1"].values).any() else []
    if probe == "line":
        grids = lines_of(data) if kind in OF_LINES else []
        numbers = [f"-{k}" if len(grids) > 1 else "" for k in range(len(grids))]
        return [(f"{n}{suffix}", _bound(write, grid)) for n, grid in zip(numbers, grids, strict=True)]
    grid = grid_of(data)
    return [(suffix, _bound(write, grid)), *(_course(grid.course, kind) if grid.course is not None else [])]


def _course(course: Course, kind: str) -> list[Part]:
    if kind not in COURSES or (kind == "vtp" and np.isfinite(course.loss).sum() < 2):
        return []
    suffix, write = COURSES[kind]
    return [(suffix, _bound(write, course))]


def _bound(write: Callable[[Path, T], None], what: T) -> Callable[[Path], None]:
    return lambda target: write(target, what)


def _whole(target: Path, write: Callable[[Path], None]) -> Path:
    """Write a file that is there as a whole or not at all."""
    partly = target.with_name(f".{target.name}.partial")
    try:
        write(partly)
        os.replace(partly, target)
    finally:
        partly.unlink(missing_ok=True)
    return target


def _split(data: xr.Dataset) -> str:
    return str(data.attrs.get("split") or json.loads(data.attrs.get("spec", "{}")).get("split", "train"))
