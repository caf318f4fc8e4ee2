"""Surfaces of a results file as files of other tools."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import xarray as xr

from landscape import results
from landscape.exchange import paraview, published, tomgoldstein
from landscape.exchange.grid import Grid, grid_of

# format -> (suffix, how it is written)
WRITERS: Mapping[str, tuple[str, Callable[[Path, Grid], None]]] = {
    "tomgoldstein": (".h5", tomgoldstein.write_surface),
    "csv": (".csv", published.write_surface),
    "vtp": (".vtp", paraview.write_vtp),
    "vtk": (".vtk", paraview.write_vtk),
}


def export(path: Path, out: Path, formats: Sequence[str], *, label: str | None = None) -> list[Path]:
    """Write every surface with a finished point, each in a file `<label>-<digest>` per format; returns the files.

    Args:
        path: results file.
        out: folder, made if absent.
        formats: names in `WRITERS`.
        label: only surfaces of that label.

    Raises:
        FileNotFoundError, ValueError: there is no results file, nothing to export in it, or `out` is no folder.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, expected a folder; give another --out")
    found = [(name, data) for name, data in results.find(path, "surface", label) if results.finished_units(data)]
    if not found:
        labels = sorted({str(data.attrs.get("label", "")) for _, data in results.find(path, "surface")})
        which = f" with the label {label}, but of {', '.join(labels) or 'none'}" if label else ""
        raise ValueError(f"{path} holds no surface{which} to export; measure one first: landscape surface")
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, data in found:
        for kind in formats:
            suffix, write = WRITERS[kind]
            if kind == "tomgoldstein":
                write = partial(tomgoldstein.write_surface, split=_split(data))
            target = out / f"{name.partition('/')[2]}{suffix}"
            partly = target.with_name(f".{target.name}.partial")
            try:
                write(partly, grid_of(data))
                os.replace(partly, target)
            finally:
                partly.unlink(missing_ok=True)
            written.append(target)
    return written


def _split(data: xr.Dataset) -> str:
    return str(data.attrs.get("split") or json.loads(data.attrs.get("spec", "{}")).get("split", "train"))
