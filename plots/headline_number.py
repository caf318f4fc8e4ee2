"""One headline number as a number: value, standard error, 95 % interval, unit, and which direction is better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import xarray as xr

from landscape.results.rounding import interval, plus_minus
from landscape.statistics.intervals import share_interval
from landscape.statistics.stored import count_of, ends_of, error_of

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
    n: float = np.nan  # independent values behind the error
    bounds: str = ""  # what the number cannot leave, as of its quantity: `share` or `positive`
    at: str = ""  # where it was found, in words

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return bool(np.isfinite(self.low) and np.isfinite(self.high))

    def __str__(self) -> str:
        low, high = (f"{end:.0f}" if 1000 <= abs(end) < 1e6 else f"{end:.3g}" for end in (self.low, self.high))
        text = f"{self.value:.4g}" + (f" [{low}, {high}]" if self.known else "")
        return f"{text} {self.at}".strip()

    def in_words(self) -> str:
        """The value with half the width of its interval, or with both ends where these are not equally far."""
        above, below = self.high - self.value, self.value - self.low
        if abs(above - below) <= 0.02 * (above + below):
            return plus_minus(self.value, (above + below) / 2)
        return interval(self.value, self.low, self.high)

    def as_json(self) -> dict[str, Any]:
        """With JSON's null for what is not known."""
        row = {"standard_error" if key == "error" else key: value for key, value in asdict(self).items()}
        return {key: None if isinstance(v, float) and not np.isfinite(v) else v for key, v in row.items()}


def number(
    data: xr.Dataset, name: str, quantity: str, reading: Reading = "", at: At | None = None
) -> Iterator[Measured]:
    """A stored quantity with its error and interval at a position; nothing where the result lacks the quantity."""
    if quantity not in data:
        return
    here = {} if at is None else dict(at)
    arrays = (error_of(data, quantity), count_of(data, quantity), *ends_of(data, quantity))
    parts = [_at(data[quantity], np.asarray(values), here) for values in (data[quantity].values, *arrays)]
    unit = str(data[quantity].attrs.get("units", "1"))
    value, error, n, low, high = parts
    bounds = str(data[quantity].attrs.get("bounds", ""))
    yield Measured(name, value, error, low, high, "" if unit == "1" else unit, reading, n, bounds)


def _at(like: xr.DataArray, values: np.ndarray, here: At) -> float:
    """The entry at a position of values that are aligned with an array; NaN of arrays with other axes."""
    values = np.asarray(values, dtype=float)
    if not values.ndim:
        return float(values)
    if values.shape != like.shape or not set(here) <= set(like.dims):
        return np.nan
    return float(values[tuple(here.get(str(dim), slice(None)) for dim in like.dims)])


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
    low, high = share_interval(value, error, samples)
    return Measured(name, value, error, float(low), float(high), reading=HIGHER, n=samples, bounds="share")
