"""One headline number as a number: value, standard error, 95 % interval, unit, and which direction is better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import xarray as xr

from landscape.results.statistics import QUANTILE, score_interval

Reading = Literal["", "lower is better", "higher is better", "lower is flatter", "higher is flatter"]
At = Mapping[str, int]  # a position on some axes
LOWER: Reading = "lower is better"
HIGHER: Reading = "higher is better"
FLATTER: Reading = "lower is flatter"
FLATTER_ABOVE: Reading = "higher is flatter"


@dataclass(frozen=True)
class Measured:
    """One headline number of one result; NaN where an error is not known."""

    name: str
    value: float
    error: float = np.nan  # standard error
    low: float = np.nan  # ends of the 95 % interval
    high: float = np.nan
    unit: str = ""
    reading: Reading = ""

    def as_json(self) -> dict[str, Any]:
        """With JSON's null for what is not known."""
        row = {"standard_error" if key == "error" else key: value for key, value in asdict(self).items()}
        return {key: None if isinstance(v, float) and not np.isfinite(v) else v for key, v in row.items()}


def number(
    data: xr.Dataset, name: str, quantity: str, reading: Reading = "", at: At | None = None
) -> Iterator[Measured]:
    """A stored quantity with its error at a position; nothing where the result lacks the quantity."""
    if quantity not in data:
        return
    here = {} if at is None else dict(at)

    def stored(ending: str) -> float:
        key = f"{quantity}{ending}"
        return float(data[key].isel(here).values) if key in data and set(here) <= set(data[key].dims) else np.nan

    value, error, low, high = (stored(ending) for ending in ("", "_se", "_low", "_high"))
    if np.isnan(low) and np.isfinite(error):
        low, high = _interval(quantity, value, error, data)
    elif np.isnan(error) and np.isfinite(low):
        error = (high - low) / (2 * QUANTILE)
    unit = str(data[quantity].attrs.get("units", "1"))
    yield Measured(name, value, error, low, high, "" if unit == "1" else unit, reading)


def _interval(quantity: str, value: float, error: float, data: xr.Dataset) -> tuple[float, float]:
    if quantity.rpartition("_")[2] == "accuracy":
        low, high = score_interval(quantity, value, error, float(data.attrs.get("samples", np.nan)))
        return float(low), float(high)
    return value - QUANTILE * error, value + QUANTILE * error


def without_error(data: xr.Dataset, name: str, value: float) -> Measured:
    """A number of a headline without a stored error."""
    if name in ("intact accuracy", "clean accuracy"):
        return of_share(data, name, value)
    unit = str(data[name].attrs.get("units", "1")) if name in data and not data[name].ndim else "1"
    return Measured(name, value, unit="" if unit == "1" else unit)


def of_share(data: xr.Dataset, name: str, value: float) -> Measured:
    """A share of right classes, whose error follows from the number of samples: std(ddof=1) / sqrt(n) of 0 and 1."""
    samples = int(data.attrs.get("samples", 0))
    error = float(np.sqrt(value * (1 - value) / (samples - 1))) if samples > 1 and 0 <= value <= 1 else np.nan
    return Measured(name, value, error, *_interval("accuracy", value, error, data), reading=HIGHER)
