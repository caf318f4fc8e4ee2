"""Encode stored arrays for a page: base64 of float32, or of compressed integers on a stated scale."""

import base64
import zlib
from typing import Any

import numpy as np
import xarray as xr

EXACT = 4096  # values up to which an array is written as float32
LARGEST = 201  # points along one side of a drawn grid; more are left out evenly
WIDE = 100.0  # ratio of the ends from which the scale is logarithmic
VALUE, ERROR = 16, 8  # bits of a number, and of its error, which on a logarithmic scale is known to a few percent


def float32(values: Any) -> dict[str, Any]:
    """An array as little-endian float32."""
    array = np.asarray(values, dtype="<f4")
    return {"t": "f4", "n": list(array.shape), "b": base64.b64encode(array.tobytes()).decode()}


def encoded(values: np.ndarray, finished: np.ndarray | None = None, *, bits: int = VALUE) -> dict[str, Any]:
    """An array as float32 if it is small, else as integers of 8 or 16 bits between its extremes, compressed.

    The codes 0 to 2^bits - 3 are the scale, logarithmic where values of one sign span a factor of 100; 0 stands for a
    zero there. Values that are not finite keep their kind: the last code is unfinished, the one before finished with a
    loss that overflowed.
    """
    done = np.ones(values.shape, bool) if finished is None else finished
    if values.size <= EXACT:
        return float32(np.where(done, np.where(np.isfinite(values), values, np.inf), np.nan))
    top = 2**bits - 3
    known = np.isfinite(values) & done
    inside = values[known] if known.any() else np.array([0.0, 1.0])
    positive = inside[inside > 0]
    logarithmic = bool(inside.min() >= 0 and positive.size and positive.max() > WIDE * positive.min())
    low, high = np.log([positive.min(), positive.max()]) if logarithmic else (inside.min(), inside.max())
    zero = logarithmic and positive.size < inside.size
    low -= (high - low) / (top - 1) if zero else 0.0
    scaled = (
        np.log(np.where(known & (values > 0), values, np.exp(low))) if logarithmic else np.where(known, values, low)
    )
    code = np.rint(top * (scaled - low) / ((high - low) or 1.0)).astype(np.int64)
    code = np.where(known, code, np.where(done, top + 1, top + 2))
    about = {"lo": float(low), "hi": float(high), "log": logarithmic, "zero": bool(zero)}
    return {"t": f"u{bits // 8}", "n": list(values.shape), **about, "z": base64.b64encode(packed(code, bits)).decode()}


def packed(code: np.ndarray, bits: int) -> bytes:
    """Integers as what is left when each is predicted from its neighbours (left + above - above left), deflated.

    What is left is small on a smooth surface; its sign becomes the last bit, and its bytes stand apart, low ones first.
    """
    grid = np.pad(code.reshape(-1, code.shape[-1]), ((1, 0), (1, 0)))
    left = grid[1:, 1:] - grid[1:, :-1] - grid[:-1, 1:] + grid[:-1, :-1]
    half = 2 ** (bits - 1)
    left = (left + half) % (2 * half) - half
    left = np.where(left < 0, -2 * left - 1, 2 * left).ravel()
    planes = [(left >> shift & 255).astype(np.uint8) for shift in range(0, bits, 8)]
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    return deflate.compress(np.concatenate(planes).tobytes()) + deflate.flush()


def thinned(data: xr.Dataset, *axes: str, most: int = LARGEST) -> xr.Dataset:
    """A result with at most so many points along some axes, evenly spaced, both ends among them."""
    chosen = {
        axis: np.unique(np.linspace(0, data.sizes[axis] - 1, most).round().astype(int))
        for axis in axes
        if data.sizes[axis] > most
    }
    return data.isel(chosen) if chosen else data
