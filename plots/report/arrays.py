"""Encode stored arrays for a page: base64 of float32, or of 16-bit integers on a stated scale."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import xarray as xr

EXACT = 4096  # values up to which an array is written as float32
LARGEST = 201  # points along one side of a drawn grid; more are left out evenly
UNFINISHED, NOT_FINITE, TOP = 65535, 65534, 65533  # codes of 16-bit values; 0 to TOP is the scale
WIDE = 100.0  # ratio of the ends from which the scale is logarithmic


def float32(values: Any) -> dict[str, Any]:
    """An array as little-endian float32."""
    array = np.asarray(values, dtype="<f4")
    return {"t": "f4", "n": list(array.shape), "b": base64.b64encode(array.tobytes()).decode()}


def encoded(values: np.ndarray, finished: np.ndarray | None = None) -> dict[str, Any]:
    """An array as float32 if it is small, else as 16-bit integers between its extremes.

    The step is 1/65533 of the range, in logarithms where positive values span a factor of 100. Values that are not
    finite keep their kind: unfinished, or finished with a loss that overflowed.
    """
    done = np.ones(values.shape, bool) if finished is None else finished
    if values.size <= EXACT:
        return float32(np.where(done, np.where(np.isfinite(values), values, np.inf), np.nan))
    known = np.isfinite(values) & done
    low, high = (float(values[known].min()), float(values[known].max())) if known.any() else (0.0, 1.0)
    logarithmic = low > 0 and high > WIDE * low
    ends = (np.log(low), np.log(high)) if logarithmic else (low, high)
    scaled = np.log(np.where(known, values, low)) if logarithmic else np.where(known, values, low)
    code = np.rint(TOP * (scaled - ends[0]) / ((ends[1] - ends[0]) or 1.0))
    code = np.where(known, code, np.where(done, NOT_FINITE, UNFINISHED)).astype("<u2")
    about = {"lo": ends[0], "hi": ends[1], "log": logarithmic}
    return {"t": "u2", "n": list(values.shape), **about, "b": base64.b64encode(code.tobytes()).decode()}


def thinned(data: xr.Dataset, *axes: str, most: int = LARGEST) -> xr.Dataset:
    """A result with at most so many points along some axes, evenly spaced, both ends among them."""
    chosen = {
        axis: np.unique(np.linspace(0, data.sizes[axis] - 1, most).round().astype(int))
        for axis in axes
        if data.sizes[axis] > most
    }
    return data.isel(chosen) if chosen else data
